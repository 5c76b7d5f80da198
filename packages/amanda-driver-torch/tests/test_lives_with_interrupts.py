"""Signals whose handlers raise, at any moment of a program in a scope."""

import gc
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from interrupts import Interrupts, opened
from programs import PROGRAMS, bits, checkpointed, convolution, functional
from restoration import Restoration

import amanda
from amanda import interceptor

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this platform has no timers")


@pytest.fixture(autouse=True, scope="module")
def interruptible() -> Iterator[None]:
    """SIGINT raises, also in a process that was started in the background of a shell, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    with handler.handling():
        yield handler


# Those that enter no context of torch's, which an interrupt may leave open.
INTERRUPTIBLE = [program for program in PROGRAMS if program not in (functional, checkpointed)]


# What Python calls while it frees something raises to nobody, be it in a scope or not.
unraisable = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.slow
@pytest.mark.xfail(
    not interceptor.NATIVE,
    reason="never: without native code an interrupt may come between the two halves of a change",
    run=False,
)
@unraisable
def test_an_interrupt_of_a_step_leaves_torch_as_it_was(interrupts: Interrupts, harmless: amanda.Tool) -> None:
    expected = {}
    for program in PROGRAMS:
        expected[program] = bits(program()())
        with amanda.apply(harmless):
            program()()
    gc.collect()
    restoration = Restoration()
    before = restoration()
    for _ in range(25):
        for program in INTERRUPTIBLE:
            step = program()
            with amanda.apply(harmless):
                interrupts.around(lambda step=step: (step(), step()), 0.003)  # type: ignore[misc]
            if program is convolution:
                # Its optimizer calls dynamo before it restores the grad mode: an interrupt there leaves the
                # mode off, in a scope or not.
                torch.set_grad_enabled(True)
            assert restoration() == before
            assert bits(program()()) == expected[program]
    assert interrupts.raised > 20


@pytest.mark.slow
@unraisable
def test_an_interrupt_while_a_scope_opens_or_closes_leaves_torch_as_it_was(interrupts: Interrupts) -> None:
    tool, x = amanda.Tool(), torch.ones(2)

    def program() -> None:
        amanda.apply(tool).start().stop()

    program()
    restoration = Restoration()
    before = restoration()
    for _ in range(300):
        interrupts.around(program, 0.002)
        for scope in opened():
            scope.stop()  # the interrupt came after `start` and before `stop`
        assert restoration() == before
    torch.relu(x)
    assert interrupts.raised > 50


def test_a_signal_in_a_routine_reaches_the_user_with_a_note(acting: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    tool = acting("insert_before_op", "relu", lambda: signal.raise_signal(signal.SIGINT), inputs=[])
    with pytest.raises(KeyboardInterrupt) as raised, amanda.apply(tool):
        torch.relu(torch.ones(2))
    assert "insert_before_op" in raised.value.__notes__[0]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_arrives_while_a_scope_opens_is_handled_once_it_is_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from amanda.drivers.torch import TorchDriver

    scope, arrived = amanda.apply(amanda.Tool()), []
    attach = TorchDriver.attach

    def interrupted(self: TorchDriver) -> None:
        signal.raise_signal(signal.SIGINT)
        attach(self)
        arrived.append(type(torch.nn.Module.__call__).__name__)

    monkeypatch.setattr(TorchDriver, "attach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scope.start()
    assert arrived == ["Enclosure"]
    assert type(torch.nn.Module.__call__).__name__ == "function"
    assert scope.closed


def test_scopes_open_on_threads_that_no_signal_reaches(op_log: Any) -> None:
    thread = threading.Thread(target=amanda.apply(op_log)(lambda: torch.relu(torch.ones(2))))
    thread.start()
    thread.join()
    assert op_log.names == ["ones", "relu"]


def test_what_a_failed_routine_held_is_freed_with_its_exception() -> None:
    """A cycle of an exception and a frame of ours would keep alive what an interrupted routine held."""
    references: list[weakref.ref[Any]] = []

    def fail(*values: Any) -> None:
        local = torch.ones(1)
        references.append(weakref.ref(local))
        raise KeyboardInterrupt

    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(fail))
    gc.disable()
    try:
        for _ in range(2):
            with suppress(KeyboardInterrupt), amanda.apply(tool):
                torch.ones(1) + 1
        assert [reference() for reference in references] == [None] * len(references)
        assert references
    finally:
        gc.enable()

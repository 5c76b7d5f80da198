"""partition(protect=): selected ops run in another process, and training is the same to the bit."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.errors import ToolError
from amanda.tools.partition import PartitionTool, ProtectedResult, ProtectError
from amanda.tools.partition._enclave import Enclave, ProcessLink, pack_tensor, receive, send, unpack_tensor
from amanda.tools.partition._pytorch_protection import ProtectedExecution, _PassEnd
from amanda.tools.partition._pytorch_stand_ins import ParameterStandIns, ProtectedOptimizers

Optimizer = Callable[[Any], torch.optim.Optimizer]
Protecting = PartitionTool[ProtectedResult]


class Net(nn.Module):
    """A model with what makes training hard to repeat: batch normalisation, in-place ops, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.secret = nn.Sequential(
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(128, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 10))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.classifier(self.secret(self.features(x)))
        return output


def train(model: nn.Module, optimizer: Optimizer, accumulate: int = 1, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    stepper, losses = optimizer(model.parameters()), []
    for _ in range(steps):
        stepper.zero_grad()
        for _ in range(accumulate):
            loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 8, 8)), torch.randint(0, 10, (4,)))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        stepper.step()
    return losses


@pytest.fixture
def protect() -> Iterator[Callable[[str], Protecting]]:
    tools = []

    def make(text: str) -> Protecting:
        tools.append(PartitionTool(protect=text))
        return tools[-1]

    yield make
    for tool in tools:
        tool._delegate.end()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [
        (lambda given: torch.optim.Adam(given, lr=0.01), 1),
        (lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.01), 2),
    ],
    ids=["adam", "sgd"],
)
def test_training_is_the_same_to_the_bit(
    optimizer: Optimizer, accumulate: int, protect: Callable[[str], Protecting]
) -> None:
    plain, model, tool = Net(), Net(), protect("module=classifier|secret")
    expected = train(plain, optimizer, accumulate)
    with amanda.apply(tool):
        assert train(model, optimizer, accumulate) == expected
    for name, parameter in model.named_parameters():
        assert parameter.isnan().all() == name.startswith(("classifier", "secret")), name
    with pytest.raises(ProtectError, match="given a Net that has none of the protected parameters"):
        tool.finalize(Net())
    assert tool.finalize(model).model is model
    states = zip(plain.state_dict().items(), model.state_dict().values(), strict=True)
    assert all(torch.equal(state, other_state) for (_, state), other_state in states)


class Tokens(nn.Module):
    """A parameter that an op reads in a list, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 4))
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.out(torch.cat([self.token, x], 1))
        return output


@pytest.mark.parametrize("trained", [True, False])
def test_parameter_in_a_list_is_trained(trained: bool, protect: Callable[[str], Protecting]) -> None:
    model, tool = Tokens(), protect("type=cat|linear")
    plain = deepcopy(model)
    inputs = torch.rand(1, 3, 4, requires_grad=trained)
    for net, tools in ((plain, ()), (model, (tool,))):
        stepper = torch.optim.SGD(net.parameters(), lr=0.1)
        with amanda.apply(*tools):
            net(inputs).square().sum().backward()
            stepper.step()
    tool.finalize(model)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.long
def test_result_declares_what_crosses(protect: Callable[[str], Protecting]) -> None:
    model, tool = Net(), protect("module=classifier.2")
    with amanda.apply(tool):
        model(torch.rand(4, 3, 8, 8)).sum().backward()
    result = tool.result
    assert result.title.startswith(
        f"2 parameters and buffers of module=classifier.2 are in process {result.pid}"
    )
    rows = [(row[0], row[1], row[4], row[6]) for row in result.rows()]
    assert rows == [
        ("hold", "parameter", 1, "float32[10,16] > -"), ("hold", "parameter", 1, "float32[10] > -"),
        ("forward", "linear", 1, "float32[4,16] > float32[4,10]"),
        ("backward", "linear", 1, "float32[4,10] > float32[4,16]"),
    ]  # fmt: skip


def test_result_stays_as_it_is_after_clear(protect: Callable[[str], Protecting]) -> None:
    model, tool = nn.Sequential(nn.Linear(4, 4)), protect("module=0")
    with amanda.apply(tool):
        model(torch.rand(1, 4))
    result = tool.result
    rows = result.rows()
    tool.clear()
    assert result.rows() == rows


@pytest.mark.slow
def test_inference_needs_no_gradients(protect: Callable[[str], Protecting]) -> None:
    model, x = Net().eval(), torch.rand(2, 3, 8, 8)
    expected = model(x)
    with amanda.apply(protect("module=secret")), torch.no_grad():
        assert torch.equal(model(x), expected)


def found_in_memory(masked: list[bytes]) -> list[bool]:
    """Return which bytes are in writable memory of this process; they are given and compared under a mask."""
    is_readable, longest = [False] * len(masked), max(map(len, masked))
    regions = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    writable = [item[0].split("-") for item in regions if "w" in item[1]]
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for start, end in ((int(first, 16), int(last, 16)) for first, last in writable):
            for at in range(start, end, 1 << 24):
                memory.seek(at)
                try:
                    read = memory.read(min((1 << 24) + longest, end - at))
                except OSError:  # another thread has unmapped it meanwhile
                    continue
                content = np.frombuffer(read, np.uint8) ^ 0x5A
                if content.size and (content != 0x5A).any():
                    text = content.tobytes()
                    is_readable = [
                        item or text.find(pattern) >= 0
                        for item, pattern in zip(is_readable, masked, strict=True)
                    ]
    return is_readable


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem is Linux's")
def test_protected_parameters_are_nowhere_in_the_memory_of_the_program(
    protect: Callable[[str], Protecting],
) -> None:
    model, x = Net(), torch.rand(4, 3, 8, 8)
    torch.seed()  # other tests have models of the same seed
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    named = dict(model.named_parameters())
    secret = [named[name] for name in ("classifier.2.weight", "secret.0.weight", "features.0.weight")]
    views = [one.detach().numpy().reshape(-1).view(np.uint8)[:64] for one in secret]
    masked = [(view ^ 0x5A).tobytes() for view in views]
    assert found_in_memory(masked) == [True, True, True]
    with amanda.apply(protect("module=classifier|secret")):
        model(x).sum().backward()
    assert found_in_memory(masked) == [False, False, True]


@pytest.mark.long
def test_gradients_that_are_clipped_are_an_error(protect: Callable[[str], Protecting]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with amanda.apply(protect("module=classifier")):
        model(torch.rand(4, 3, 8, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(ProtectError, match=r"gradient of classifier.0.weight was written between"):
            optimizer.step()


@pytest.mark.slow
def test_op_outside_that_reads_a_protected_parameter_is_an_error(
    protect: Callable[[str], Protecting],
) -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Linear(4, 4))
    with amanda.apply(protect("module=0")):
        y = model(torch.rand(1, 4))
        with pytest.raises(
            ProtectError, match=r"norm at .* reads 0.weight, which lies in the protected process"
        ):
            y.sum() + first.weight.norm()


@pytest.mark.slow
def test_parameter_that_an_op_outside_shares_is_an_error(protect: Callable[[str], Protecting]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with amanda.apply(protect("module=1")), pytest.raises(ProtectError, match="select both"):
        model(torch.rand(1, 4))


@pytest.mark.slow
def test_parameter_that_is_frozen_later_is_an_error(protect: Callable[[str], Protecting]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.rand(1, 4)
    with amanda.apply(protect("module=0")):
        model(x)
        model.requires_grad_(False)
        with pytest.raises(ProtectError, match=r"0.weight, whose requires_grad was changed"):
            model(x)


@pytest.mark.slow
def test_value_of_parameters_alone_does_not_leave_the_process(
    protect: Callable[[str], Protecting],
) -> None:
    class Transposed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.t()

    with (
        amanda.apply(protect("module=0")),
        pytest.raises(ProtectError, match="of protected parameters alone"),
    ):
        nn.Sequential(Transposed(4, 4))(torch.rand(1, 4))


class Checkpointed(nn.Module):
    """A backward pass within a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(checkpoint(self.inner, self.first(x), use_reentrant=True))
        return output


@pytest.mark.long
def test_gradients_of_a_pass_within_a_pass_arrive(protect: Callable[[str], Protecting]) -> None:
    plain, model, tool = Checkpointed(), Checkpointed(), protect("type=linear")
    x = torch.rand(3, 4)
    with amanda.apply(tool):
        descend(model, [x, x])
    tool.finalize(model)
    descend(plain, [x, x])
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def descend(model: nn.Module, batches: Sequence[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()


@pytest.mark.long
def test_gradients_of_passes_on_several_threads_add_up(protect: Callable[[str], Protecting]) -> None:
    torch.manual_seed(0)
    model, tool = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), protect("module=0|1")
    plain, x = deepcopy(model), torch.ones(2, 4)  # equal gradients add up alike in every order

    def passes(model: nn.Module) -> None:
        for _ in range(20):
            model(x).sum().backward()

    with amanda.apply(tool):
        model(x)
        threads = [Thread(target=passes, args=(model,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    tool.finalize(model)
    passes(plain)
    passes(plain)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


class Breaking(nn.Module):
    """A model whose backward pass can fail after it has reached the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.breaks = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        if self.breaks:
            hidden.register_hook(self._break)  # type: ignore[no-untyped-call]
        output: Tensor = self.last(hidden)
        return output

    def _break(self, gradient: Tensor) -> None:
        raise ArithmeticError("broken")


@pytest.mark.long
def test_gradients_of_a_pass_that_failed_are_forgotten(
    protect: Callable[[str], Protecting], monkeypatch: Any
) -> None:
    plain, model, tool, x = Breaking(), Breaking(), protect("module=last"), torch.rand(3, 4)
    failed, call = [], ProcessLink.call

    def listening(link: ProcessLink, header: Any, tensors: Any = ()) -> Any:
        failed.extend(header.get("failed", ()))
        return call(link, header, tensors)

    monkeypatch.setattr(ProcessLink, "call", listening)
    with amanda.apply(tool):
        model.breaks = True
        with pytest.raises(ArithmeticError, match="broken"):
            model(x).sum().backward()
        model.breaks = False
        descend(model, [x, x])
    tool.finalize(model)
    descend(plain, [x, x])
    assert len(failed) == 1
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_process_forgets_the_gradients_of_a_pass_that_failed() -> None:
    enclave, weight, x = Enclave(), torch.rand(2, 2), torch.rand(1, 2)
    enclave.hold([pack_tensor(weight)], "weight", True)
    inputs = [{"tensor": 0}, {"parameter": "weight"}]

    def forward(number: int, failed: Sequence[int]) -> None:
        enclave.forward(
            [pack_tensor(x)], "torch._C._nn.linear", inputs, number, [True], has_backward=True, random=False,
            in_place=False, dropped_executions=[], failed_passes=failed,
        )  # fmt: skip

    forward(0, [])
    enclave.backward([pack_tensor(torch.ones(1, 2))], 0, [0], backward_pass=7)
    assert list(enclave._pass_gradients) == [7]
    forward(1, [7])
    assert not enclave._pass_gradients


@pytest.mark.slow
def test_process_ends_with_the_tool(caplog: pytest.LogCaptureFixture) -> None:
    hooks, tool = len(_global_optimizer_pre_hooks), PartitionTool(protect="module=0")
    with amanda.apply(tool):
        nn.Sequential(nn.Linear(4, 4))(torch.rand(1, 4))
    pid = tool.result.pid
    assert pid is not None
    os.kill(pid, 0)
    del tool
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert f"dropped without finalize(model); the parameters in process {pid} are lost" in caplog.text
    assert len(_global_optimizer_pre_hooks) == hooks


def test_number_of_an_optimizer_that_is_gone_is_not_given_again() -> None:
    linear = nn.Linear(2, 2)
    stand_ins = ParameterStandIns()
    stand_ins.move_to_process("weight", linear.weight, lambda *_: None)
    optimizers, numbers = ProtectedOptimizers(stand_ins), []
    alive = [torch.optim.SGD(linear.parameters()) for _ in range(2)]
    for _ in range(2):
        numbers += [optimizers.step_message(item, (item,), {}) for item in alive]
        del alive[0]
        gc.collect()
        alive = [torch.optim.SGD(linear.parameters())]
    assert [item["optimizer"] for item in numbers if item is not None] == [0, 1, 2]


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_was_killed(
    protect: Callable[[str], Protecting], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hooks, tool = len(_global_optimizer_pre_hooks), protect("module=0")
    with amanda.apply(tool):
        model = nn.Sequential(nn.Linear(4, 4))
        model(torch.rand(1, 4))
    assert list(tmp_path.iterdir()) == []
    assert tool.result.pid is not None
    os.kill(tool.result.pid, signal.SIGKILL)
    with pytest.raises(ProtectError, match="the protected process is gone"):
        tool.finalize(model)
    tool.finalize(model)
    assert len(_global_optimizer_pre_hooks) == hooks


@pytest.mark.slow
def test_process_serves_who_knows_the_key(protect: Callable[[str], Protecting], monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "amanda.tools.partition._enclave.Client",
        lambda address, family, key: Client(address, family, b"other"),
    )
    with amanda.apply(protect("module=0")), pytest.raises(AuthenticationError):
        nn.Sequential(nn.Linear(4, 4))(torch.rand(1, 4))


@pytest.mark.parametrize("text", ["classifier", "modul=a", "module=", ""])
def test_text_that_selects_nothing(text: str) -> None:
    with pytest.raises(ToolError, match="protect is"):
        PartitionTool(protect=text)


def test_patterns_of_a_name_that_is_given_twice_add_up(protect: Callable[[str], Protecting]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tool = protect("module=0 module=2")
    with amanda.apply(tool):
        model(torch.rand(1, 4))
    assert {row[2] for row in tool.result.rows() if row[0] == "forward"} == {"0", "2"}
    assert not tool.result.remarks


def test_finalize_is_of_protected_parts_and_release_is_its_former_name() -> None:
    with pytest.raises(ToolError, match="this tool has no protect"):
        PartitionTool().finalize(nn.Linear(4, 4))
    with pytest.warns(DeprecationWarning, match=r"release is deprecated since .* use finalize\(model\)"):
        PartitionTool().release()
    model, tool = nn.Linear(4, 4), PartitionTool(protect="module=a")
    assert tool.finalize(model).model is model  # nothing was protected


def test_stages_and_protect_are_one_or_the_other() -> None:
    with pytest.raises(ToolError, match="stages is 2 and protect is 'module=a'"):
        PartitionTool(stages=2, protect="module=a")  # type: ignore[call-overload]
    with pytest.raises(ToolError, match="memory is 9 and protect is 'module=a'"):
        PartitionTool(memory=9, protect="module=a")  # type: ignore[call-overload]
    with pytest.raises(ToolError, match="protect is 5; give a string"):
        PartitionTool(protect=5)  # type: ignore[call-overload]


def test_module_that_is_not_there_is_told() -> None:
    tool, model = PartitionTool(protect="module=clasifier.0"), Net()
    with amanda.apply(tool):
        model(torch.rand(1, 3, 8, 8))
    assert "No parameter is protected" in str(tool.result)
    assert "did you mean classifier.0" in str(tool.result)


TENSORS = [
    torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.rand(3, 4).t(), torch.tensor(True),
    torch.rand(3, dtype=torch.bfloat16), torch.rand(2, 2, dtype=torch.complex64), torch.empty(0, 3),
    torch.arange(3).expand(2, 3),
]  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda one: f"{one.dtype} {tuple(one.shape)}")
def test_tensors_arrive_as_they_were(tensor: Tensor) -> None:
    ours, theirs = Pipe()
    send(ours, {"kind": "test"}, [pack_tensor(tensor)])
    header, packed = receive(theirs)
    arrived = unpack_tensor(*packed[0])
    assert header == {"kind": "test"}
    assert arrived.dtype == tensor.dtype
    assert torch.equal(arrived, tensor)
    assert tensor.is_contiguous() == arrived.is_contiguous() or 0 in tensor.stride()


def test_message_of_another_length_than_declared_is_refused() -> None:
    ours, theirs = Pipe()
    form, content = pack_tensor(torch.rand(8000))
    send(ours, {}, [(form._replace(size=form.size), content)])
    message = bytearray(theirs.recv_bytes())
    ours.send_bytes(message[:-4])
    with pytest.raises(ProtectError, match=r"declares 32,\d+ bytes and has 32,\d+"):
        receive(theirs)


class Reading(nn.Module):
    """A layer whose output is read as a number, or written to by a subscript."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        output: Tensor = y * self.read(y)
        return output


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda y: y.sum().item(), "item at .* gives a float"),
        (lambda y: 2 if y.sum() > 0 else 1, "is_nonzero at .* gives a bool"),
        (lambda y: torch.equal(y, y), "equal at .* gives a bool"),
        (lambda y: y[0].tolist()[0], "tolist at .* gives a float"),
    ],
)
def test_number_that_would_leave_the_process_is_an_error(read: Callable[[Tensor], Any], words: str) -> None:
    model, tool = nn.Sequential(Reading(read)), PartitionTool(protect="module=0")
    try:
        with pytest.raises(ProtectError, match=words + ", and tensors alone leave"), amanda.apply(tool):
            model(torch.rand(2, 4))
    finally:
        tool.finalize(model)


class Writes(nn.Module):
    """A linear layer, into whose output it writes through views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        y[0].add_(1)
        y.view(-1)[3:].mul_(2)
        y.t()[1] = 5.0
        return y


def test_writes_into_views_of_outputs_reach_them(protect: Callable[[str], Protecting]) -> None:
    model, x = nn.Sequential(Writes(), nn.Linear(4, 2)), torch.rand(2, 4).requires_grad_()
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    tool = protect("module=0|0.*")
    with amanda.apply(tool):
        output = model(x)
        assert torch.equal(torch.autograd.grad(output.sum(), x)[0], gradient)
    assert torch.equal(output, expected)
    assert {row[1] for row in tool.result.rows()} == {"parameter", "linear", "add", "mul"}


def test_output_without_a_gradient_has_none_outside() -> None:
    def double(y: Tensor) -> Tensor:
        return y.detach().clone()

    model = nn.Sequential(nn.Linear(4, 4), Reading(double))
    x = torch.rand(2, 4)
    expected = model(x)
    (gradient,) = torch.autograd.grad(expected.sum(), model[0].weight)
    tool = PartitionTool(protect="module=1")
    with amanda.apply(tool):
        output = model(x)
        output.sum().backward()
    tool.finalize(model)
    assert torch.equal(output, expected)
    assert torch.equal(model[0].weight.grad, gradient)


@pytest.mark.parametrize("kind", [ProtectedExecution, _PassEnd])
def test_what_an_interrupt_left_unmade_is_freed_quietly(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    kind.__new__(kind)  # the handler of a signal may raise before `__init__` has stored anything
    assert errors == []

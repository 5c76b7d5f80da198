"""Programs made from bytes: calls in and out of scopes, which have to end as bare calls do."""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import functools
import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Enclosure, PlanTable, Suspension

from . import kinds
from .kinds import Identity, Target
from .values import Choices, Inner, arguments, counts, outcome

Outcome = tuple[str, str, str]


class Own(Exception):
    """Raised by handlers."""


class Module:
    """Its calls are regions."""

    def __call__(self, inner: Callable[[], Any]) -> Any:
        return inner()

    def path(self, _subject: Any) -> Any:
        return 7, True


_vanilla_call = Module.__call__
_module = Module()
_parent = Module()


def _path(owner: Any, subject: Any) -> Any:
    return owner.path(subject)


def _in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            results.append((context.run(call), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = results.pop()
    if error is not None:
        raise error
    return value


def _enclosed(call: Callable[[], Any]) -> Any:
    Module.__call__ = Enclosure(_vanilla_call, _path)  # type: ignore[method-assign]
    try:
        return _parent(lambda: _module(lambda: _module(call)))
    finally:
        Module.__call__ = _vanilla_call  # type: ignore[method-assign]


def _replayed(call: Callable[[], Any]) -> Any:
    return interceptor.snapshot().replay(call)


def _in_generator(call: Callable[[], Any]) -> Any:
    def generator() -> Any:
        yield
        yield call()

    running = generator()
    next(running)
    return next(running)


def _deep(call: Callable[[], Any], left: int = 150) -> Any:
    return _deep(call, left - 1) if left else call()


def _in_finalizer(call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    class Dying:
        def __init__(self) -> None:
            self.self = self

        def __del__(self) -> None:
            results.append(outcome(call))

    Dying()
    gc.collect(0)
    return results.pop() if results else outcome(call)  # one collection does not run inside another


def _suspended(call: Callable[[], Any]) -> Any:
    with Suspension():
        return call()


def _from_fresh_code(call: Callable[[], Any]) -> Any:
    code: dict[str, Any] = {}
    exec("def fresh(call):\n    return call()", code)
    return code["fresh"](call)


def _from_dying_code(call: Callable[[], Any]) -> Any:
    for number in range(3):
        code: dict[str, Any] = {}
        exec(compile("def fresh(call):\n    return call()", f"<{number}>", "exec"), code)
        fresh = functools.partial(code["fresh"], call)
        result = [_enclosed(fresh) for _ in range(2)][-1]  # at the root no place has more than its own frame
        del fresh
        code.clear()  # its function is in a cycle with it
    return result


def _while_kinds_change(call: Callable[[], Any]) -> Any:
    for _ in range(2):
        call()
        interceptor.forget_code()
        Identity.changed = not getattr(Identity, "changed", False)  # type: ignore[attr-defined]
    return call()


WAYS: list[Callable[[Callable[[], Any]], Any]] = [
    lambda call: call(),
    lambda call: call(),
    lambda call: next(map(lambda _: call(), "a")),  # noqa: C417
    lambda call: functools.reduce(lambda *_: call(), range(2)),
    lambda call: [call() for _ in range(70)][-1],
    _in_thread,
    _enclosed,
    _replayed,
    _in_generator,
    _deep,
    _in_finalizer,
    _suspended,
    _from_fresh_code,
    _from_dying_code,
    _while_kinds_change,
]


@dataclass
class Handling:
    """One call that a handler was given."""

    program: Program
    op_id: int
    site: Any
    args: Any
    kwargs: Any

    def invoke(self) -> Any:
        return self.site.invoke(self.args, self.kwargs)


def _raises(error: Callable[[], BaseException]) -> Callable[[Handling], Any]:
    def behaviour(_: Handling) -> Any:
        raise error()

    return behaviour


def _reenters(given: Handling) -> Any:
    Inner(given.program.other)()
    return given.invoke()


def _collects(given: Handling) -> Any:
    _in_finalizer(Inner(given.program.other))
    return given.invoke()


def _removes(given: Handling) -> Any:
    target = next(one for one in kinds.TARGETS if one.site is given.site)
    was = target.placed
    target.remove()
    try:
        return given.invoke()
    finally:
        if was:
            target.place()


def _plans(given: Handling) -> Any:
    given.program.table.set(given.op_id, None)
    return given.invoke()


def _scopes(given: Handling) -> Any:
    token = ACTIVATION.set(Activation(None, "nested"))
    try:
        return given.invoke()
    finally:
        ACTIVATION.reset(token)


def _spoils(given: Handling) -> Any:
    token = ACTIVATION.set("no activation")  # type: ignore[arg-type]
    try:
        return given.invoke()
    finally:
        ACTIVATION.reset(token)


def _forgets(given: Handling) -> Any:
    interceptor.forget_code()
    interceptor.reset_root()
    given.program.table.clear()
    return given.invoke()


def _mutates(given: Handling) -> Any:
    result = given.site.invoke(given.args, dict(given.kwargs))
    given.kwargs.clear()
    return result


PASSES: list[Callable[[Handling], Any]] = [
    Handling.invoke,
    _reenters,
    _collects,
    _removes,
    _plans,
    _scopes,
    _spoils,
    _forgets,
    _mutates,
    lambda given: _in_thread(given.invoke),
    lambda given: _enclosed(given.invoke),
    lambda given: _replayed(given.invoke),
    lambda given: _deep(given.invoke),
]
ENDS: list[tuple[Callable[[Handling], Any], Outcome | None]] = [
    (_raises(lambda: Own("own")), ("raises", "Own", "Own Own('own')")),
    (_raises(KeyboardInterrupt), ("raises", "KeyboardInterrupt", "KeyboardInterrupt KeyboardInterrupt()")),
    (_raises(GeneratorExit), ("raises", "GeneratorExit", "GeneratorExit GeneratorExit()")),
    (lambda _: NotImplemented, ("gives", "NotImplementedType", "NotImplemented")),
    (lambda _: None, ("gives", "NoneType", "None")),
    (lambda _: [3], ("gives", "list", "[3]")),
    (lambda given: given.site.invoke(given.args[:-1], given.kwargs), None),
    (lambda given: given.site.invoke(list(given.args)), None),
    (lambda given: given.site.invoke(given.args, {3: 4}), None),
    (lambda given: given.site.invoke(), None),
    (lambda given: (given.invoke(), given.invoke())[1], None),
]


AROUND = ("Static.__setitem__", "Heap.__getitem__")
"""Targets whose callers do not pass on what the handler gives."""


class Difference(AssertionError):
    """An instrumented call did not end as the bare one."""


@dataclass
class Call:
    """One call of the program, the same bare and instrumented."""

    target: Target
    make: Callable[[Target], Any]
    way: Callable[[Callable[[], Any]], Any]

    def run(self) -> tuple[Outcome, list[str], list[int]]:
        """How it ends, what the arguments are then, and the references to them that it leaves."""
        args, keywords = self.make(self.target)
        before = counts(args, keywords)
        ended = outcome(lambda: self.way(lambda: self.target(*args, **keywords)))
        for one in (*args, *keywords.values()):
            if isinstance(one, BaseException):
                one.__traceback__ = one.__context__ = None  # frames hold the arguments
        gc.collect(0)
        left = [new - old for new, old in zip(counts(args, keywords), before, strict=True)]
        return ended, [outcome(lambda one=one: one)[2] for one in (*args[:8], *keywords.values())], left  # type: ignore[misc]


class Program:
    """The program that the bytes stand for."""

    def __init__(self, data: bytes) -> None:
        choices = Choices(data)
        self.targets = [choices.one_of(kinds.TARGETS) for _ in range(4)]
        self.other = choices.one_of(kinds.TARGETS)
        self.table = PlanTable()
        self.handled, self.site = 0, None
        self.behaviour: Callable[[Handling], Any] = Handling.invoke
        self.tokens: list[Any] = []
        self.steps: list[Callable[[], None]] = []
        self.bare: list[Any] = []
        self.disturber = choices.one_of([None, *self._disturbers()])
        while choices.left and len(self.steps) < 24:
            self.steps.append(self._step(choices))

    def run(self) -> None:
        """Run it; a Difference where instrumentation shows."""
        kinds.handlers.append(self._handle)
        for target in self.targets[:3]:
            target.place()
        # A build for tests calls it wherever Python may run; calls are the same whatever it does there.
        disturb_with = getattr(interceptor, "disturb_with", lambda _: None)
        disturb_with(self.disturber)
        self._open(True)
        try:
            for step in self.steps:
                step()
        finally:
            disturb_with(None)
            while self.tokens:
                self._close()
            for target in self.targets:
                target.remove()
            self.other.remove()
            kinds.handlers.pop()
            interceptor.reset_root()
        kinds.assert_restored()

    def _disturbers(self) -> list[Callable[[], object]]:
        """Functions that take away what native code may hold."""
        other = self.other

        def replace() -> None:
            other.remove() if other.placed else other.place()

        def drop_errors() -> None:
            with contextlib.suppress(Own):
                raise Own

        return [
            self.table.clear,
            interceptor.forget_code,
            replace,
            drop_errors,
            functools.partial(gc.collect, 0),
            lambda: [Identity() for _ in range(20)],
        ]

    def _handle(self, state: Any, plan: Any, op_id: int, site: Any, args: Any, kwargs: Any) -> Any:
        self.handled, self.site = self.handled + 1, site
        behaviour, self.behaviour = self.behaviour, Handling.invoke
        try:
            return behaviour(Handling(self, op_id, site, args, kwargs))
        finally:
            self.behaviour = behaviour

    def _open(self, with_table: bool) -> None:
        if len(self.tokens) < 5:
            self.tokens.append(ACTIVATION.set(Activation(self.table if with_table else None, self)))

    def _close(self) -> None:
        if self.tokens:
            ACTIVATION.reset(self.tokens.pop())

    def _step(self, choices: Choices) -> Callable[[], None]:
        kind = choices.below(12)
        target = choices.one_of(self.targets)
        if kind < 6:
            return self._call_step(choices, target)
        number = choices.below(64)
        return [
            lambda: self._open(number % 2 == 0),
            self._close,
            target.place,
            target.remove,
            functools.partial(self._toggle),
            functools.partial(self._disturb, number),
        ][kind - 6]

    def _call_step(self, choices: Choices, target: Target) -> Callable[[], None]:
        call = Call(target, arguments(choices, kinds.TARGETS), choices.one_of(WAYS))
        passing = choices.below(3)
        behaviour, expected = (choices.one_of(PASSES), None) if passing else choices.one_of(ENDS)
        with _settled():
            bare = call.run()

        def step() -> None:
            before, self.behaviour = self.handled, behaviour
            try:
                with _settled():
                    got = call.run()
            finally:
                self.behaviour = Handling.invoke
            if passing and got != bare:
                raise Difference(f"{target.name}: bare {bare}, instrumented {got}")
            plainly = call.way is WAYS[0] and self.handled == before + 1 and self.site is target.site
            if expected and plainly and target.name not in AROUND and got[0] != expected:
                raise Difference(f"{target.name}: the handler {expected}, the call {got[0]}")

        return step

    def _toggle(self) -> None:
        activation = ACTIVATION.get(None)
        if isinstance(activation, Activation):
            activation.active = not activation.active

    def _disturb(self, number: int) -> None:
        for key in range(1, number):
            self.table.set(key << 40, None if key % 2 else self)
        for key in range(1, number, 3):
            self.table.discard(key << 40)
        kept = [Identity() for _ in range(number)]
        for one in (*kept, 3, None):
            interceptor.ordinal(one)
        for wrong in (-1, 1 << 64, "x", 0.5):
            with contextlib.suppress(TypeError, OverflowError):
                self.table.get(wrong)  # type: ignore[arg-type]
            with contextlib.suppress(TypeError, OverflowError):
                self.table.set(wrong, None)  # type: ignore[arg-type]


@contextlib.contextmanager
def _settled() -> Any:
    """Collections where the program asks for them, so that both runs of a call have the same."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def run(data: bytes) -> None:
    """Run the program that the bytes stand for."""
    Program(data).run()


def bytes_of(number: int) -> bytes:
    """Bytes of a program, the same for the same number."""
    source = random.Random(number)
    return source.randbytes(source.randrange(10, 400))


def main(count: str = "1000", first: str = "0", seconds: str = "inf") -> None:
    """Run that many programs, or as many as there is time for; says which one failed."""
    faulthandler.enable()
    end, done = time.monotonic() + float(seconds), 0
    while done < int(count) and time.monotonic() < end:
        number = int(first) + done
        try:
            run(bytes_of(number))
        except BaseException as error:
            error.add_note(f"program {number}")
            raise
        done += 1
    sys.stdout.write(f"{done} programs\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Every allocation is made to fail, one after the other: a MemoryError or success, and all is well.

`python -m interceptor_fuzz.allocation NAME`; without a name, lists them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import amanda
from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Detour, Enclosure, PlanTable, Suspension
from amanda.testing import fake

from . import kinds
from .kinds import TARGETS, Identity, Target, builtin_kinds
from .values import plain

FOREVER = 1 << 40
Act = Callable[[], Any]
SCENARIOS: dict[str, Callable[[], Iterator[tuple[str, Act, Act]]]] = {}
"""Each gives (what it is, what is done while memory fails, what has to hold afterwards)."""


def scenario(function: Callable[[], Iterator[tuple[str, Act, Act]]]) -> Any:
    """Enter it in the list."""
    SCENARIOS[function.__name__] = function
    return function


def nothing() -> None:
    """Nothing to check besides."""


def exhaust(name: str, act: Act, check: Act, limit: int = 5000) -> int:
    """Do it with its n-th allocation failing, then with all from the n-th on, for every n there is.

    Python code can close nothing once all fail, so where it runs they fail one at a time.
    """
    sys._getframe()  # so that no exception has to make the frame
    for lasting in (False,) if python_runs else (False, True):
        for nth in range(limit):
            error = None
            builtin_kinds.fail_allocations(nth, FOREVER if lasting else nth + 1)
            try:
                act()
            except Exception as raised:
                error = raised
            finally:
                asked = builtin_kinds.stop_failing()
            if error is not None and not acceptable(error):
                raise error
            check()
            if asked <= nth:
                break
        else:
            raise AssertionError(f"{name}: no end after {limit} allocations")
    return nth


def acceptable(error: Exception) -> bool:
    """A MemoryError, what the handler raises, and what Python says where its own code lacks memory."""
    expected = (MemoryError, ZeroDivisionError)
    return isinstance(error, (*expected, SystemError, RuntimeError) if python_runs else expected)


python_runs: list[str] = []
"""Not empty while a scenario runs Python code, which says SystemError, or that it has no lock, besides."""


def call_of(target: Target) -> Act:
    """Its sample call, made without running any Python code."""
    args = target.sample()
    kind = type(target.callable).__name__
    if kind == "getset_descriptor":
        return functools.partial(target.callable.__get__, *args)
    if kind == "wrapper_descriptor":
        return functools.partial(operator.getitem if len(args) == 2 else operator.setitem, *args)
    if kind == "classmethod_descriptor":
        return functools.partial(getattr(args[0], target.attribute), *args[1:], **target.keywords)
    return functools.partial(target.callable, *args, **target.keywords)


@contextmanager
def in_force(*targets: Target) -> Iterator[None]:
    """Placed, and in a scope."""
    with kinds.placed(*targets):
        token = ACTIVATION.set(Activation(None, "state"))
        try:
            yield
        finally:
            ACTIVATION.reset(token)


def named(name: str) -> Target:
    """The target of that name."""
    return next(target for target in TARGETS if target.name == name)


def works(target: Target) -> Act:
    """Whether a call gives what it gives now."""
    expected = result(target)

    def check() -> None:
        assert result(target) == expected, target.name

    return check


def result(target: Target) -> str:
    """What the sample call ends with."""
    try:
        return plain(target(*target.sample(), **target.keywords))
    except Exception as error:
        return type(error).__name__


@scenario
def sites_are_made() -> Iterator[tuple[str, Act, Act]]:
    """Sites, detours and enclosures come to be or do not."""
    for target in TARGETS:
        yield target.name, target.new_site, works(target)
    site = next(target.site for target in TARGETS if target.holder)
    yield "Detour", lambda: Detour(site), nothing
    yield "Enclosure", lambda: Enclosure(print, print), nothing
    yield "Activation", lambda: Activation(PlanTable(), "state"), nothing


@scenario
def targets_are_placed_and_removed() -> Iterator[tuple[str, Act, Act]]:
    """Afterwards a callable is placed or it is not, and can be removed."""
    for target in TARGETS:
        if not target.holder:
            holds = works(target)

            def removed(target: Target = target, holds: Act = holds) -> None:
                assert target.placed == target.site.placed
                holds()
                target.remove()
                assert not target.placed
                assert not target.site.placed
                holds()

            yield f"place {target.name}", target.place, removed

            def place_and_remove(target: Target = target) -> None:
                target.place()
                target.remove()

            yield f"place and remove {target.name}", place_and_remove, removed


NATIVE = [target for target in TARGETS if not target.holder and target.attribute != "__setitem__"]
SILENT = ("nothing_said", "both_said", "deeper", "failing", "reader")  # csv.reader says that it lacks options


@scenario
def ops_are_called_in_scope() -> Iterator[tuple[str, Act, Act]]:
    """Calls through a handler that passes and one that raises, in places that have to be described."""
    for handler in (builtin_kinds.pass_through, builtin_kinds.refuse):
        for target in NATIVE:
            if target.attribute not in SILENT:
                site, holds = target.site, works(target)
                target.site = target.new_site(handler)

                def check(holds: Act = holds) -> None:
                    with Suspension():
                        holds()
                    interceptor.forget_code()
                    interceptor.reset_root()

                with in_force(target):
                    yield target.name, call_of(target), check
                target.site = site


@scenario
def code_is_described() -> Iterator[tuple[str, Act, Act]]:
    """The first op of code that nobody has seen."""
    target = named("math.sin")
    site, target.site = target.site, target.new_site(builtin_kinds.pass_through)
    call, fresh = call_of(target), []

    def code(call: Act) -> Any:
        return call()

    def renew() -> None:
        assert call()
        fresh[:] = [types.FunctionType(code.__code__.replace(co_name="fresh"), {})]

    renew()
    with in_force(target):
        yield "new code", lambda: fresh[0](call), renew
    target.site = site


@scenario
def detours_are_called() -> Iterator[tuple[str, Act, Act]]:
    """Python callables, with a handler in Python."""
    python_runs.append("detours")
    for target in TARGETS:
        if target.holder:
            args, holds = target.sample(), works(target)

            def call(target: Target = target, args: Any = args) -> None:
                target(*args, **target.keywords)

            with in_force(target):
                yield target.name, call, holds
    python_runs.clear()


@scenario
def arguments_get_numbers() -> Iterator[tuple[str, Act, Act]]:
    """Objects that tell ops apart are numbered, at once or later, and let go of."""
    target = named("builtin_kinds.varargs")
    python_runs.append("ids")

    def call() -> None:
        items = [Identity(), Identity()]
        target.callable(items, Identity(), items)

    def check() -> None:
        one = Identity()
        assert interceptor.ordinal(one) == interceptor.ordinal(one) > 0

    with in_force(target):
        yield "in a call", call, check
    python_runs.clear()
    yield "asked for", lambda: interceptor.ordinal(Identity()), check


@scenario
def calls_are_enclosed_and_replayed() -> Iterator[tuple[str, Act, Act]]:
    """Regions end with their calls."""

    class Module:
        def __call__(self, inner: Act) -> Any:
            return inner()

    inside: list[Any] = []
    python_runs.append("modules")
    Module.__call__ = Enclosure(Module.__call__, lambda owner, subject: (7, subject is not owner))  # type: ignore[method-assign]
    outer = Module()

    # Made beforehand: CPython 3.12 crashes where it lacks the memory for a function.
    again = functools.partial(outer, lambda: inside.append(interceptor.snapshot()))

    def nest() -> None:
        outer(functools.partial(Module(), again))

    def replay() -> None:
        kept.replay(math.sin, 0.5)

    def check() -> None:
        inside.clear()
        assert interceptor.subjects() == []
        assert math.sin(0.5)

    with in_force(named("math.sin")):
        kept = interceptor.snapshot()
        yield "nested", nest, check
        yield "replayed", replay, check
        yield "subjects", lambda: outer(interceptor.subjects), check
    python_runs.clear()


@scenario
def tables_grow_and_shrink() -> Iterator[tuple[str, Act, Act]]:
    """A table holds what was put into it, however it grew."""
    table, plan = PlanTable(), Identity()
    references = sys.getrefcount(plan)

    def fill() -> None:
        for key in range(1, 120):
            table.set(key << 30, plan)
            table.get(key << 29)
        for key in range(1, 120, 2):
            table.discard(key << 30)

    def check() -> None:
        assert sys.getrefcount(plan) == references + len(table)
        table.clear()
        assert sys.getrefcount(plan) == references

    yield "table", fill, check


@scenario
def graphs_are_marked_and_read() -> Iterator[tuple[str, Act, Act]]:
    """What is read is all there is, or nothing; nothing is kept of it."""

    class Op:
        def __init__(self, number: int, *next: Any) -> None:
            self.count = number.__int__
            self.notes: dict[str, Any] = {}
            self.next = tuple((one, 0) for one in next)

    class Leaf(Op):
        pass

    class Tensor:
        maker: Any = None
        base: Any = None

    of = interceptor.Graphs(Tensor, Leaf, "maker", "base", "next", "notes", "count", "mark", id)
    ops = [Op(0, Leaf(0), None)]
    for number in range(1, 200):
        ops.append(Op(number, ops[-1], ops[number // 2]))
    outputs = [Tensor(), (Tensor(), Tensor())]
    outputs[0].maker, outputs[0].base = ops[-1], outputs[1][0]
    outputs[1][0].maker = ops[50]
    mark = interceptor.Mark("trace", 0, 40, 200)
    last, marks = ops[-1], interceptor.Mark.alive()
    references = sys.getrefcount(last)

    def check() -> None:
        of.mark(outputs, mark)
        assert len(of.marked([last])) == 161
        assert (sys.getrefcount(last), interceptor.Mark.alive()) == (references, marks)
        for notes in [op.notes for op in ops]:
            notes.clear()

    yield "mark", lambda: of.mark(outputs, mark), check
    yield "marked", lambda: of.marked([ops[-1]]), check
    yield "Mark", lambda: interceptor.Mark("trace", 0, 40, 200), check
    yield "DeferredRelease", lambda: interceptor.DeferredRelease(last), check
    yield "Graphs", lambda: interceptor.Graphs(Tensor, Leaf, *"abcdef", id), check
    yield "marker", lambda: of.marker("trace", True), check


@scenario
def threads_get_their_root() -> Iterator[tuple[str, Act, Act]]:
    """The first op of a thread needs room for what is known of the thread."""
    target = named("math.sin")
    failures: list[BaseException] = []

    def first_op(nth: int) -> None:
        try:
            token = ACTIVATION.set(Activation(None, "state"))
            builtin_kinds.fail_allocations(nth, nth + 1)
            try:
                math.sin(0.5)
            except MemoryError:
                pass
            finally:
                builtin_kinds.stop_failing()
            assert math.sin(0.5)
            ACTIVATION.reset(token)
        except BaseException as error:
            failures.append(error)

    with kinds.placed(target):
        for nth in range(40):
            thread = threading.Thread(target=first_op, args=(nth,))
            thread.start()
            thread.join()
    assert not failures, failures
    yield "afterwards", nothing, nothing


@scenario
def scopes_open_and_close() -> Iterator[tuple[str, Act, Act]]:
    """`amanda.apply` on the core's own framework: the framework is restored, and the next scope works."""
    before = {name: vars(fake)[name] for name in dir(fake)}
    watched: list[Any] = []

    class Watching(amanda.Tool):
        def __init__(self) -> None:
            self.add_inst_for_op(lambda context: context.insert_before_op(watched.append, inputs=[0]))

    def program() -> Any:
        return fake.relu(fake.tensor([1.0, -1.0])).numbers

    expected = program()

    def scope() -> None:
        with amanda.apply(Watching()):
            program()

    def check() -> None:
        assert interceptor.active() is None
        left = [name for name in dir(fake) if vars(fake)[name] is not before.get(name)]
        assert not left, left
        assert program() == expected
        watched.clear()

    python_runs.append("apply")
    yield "apply", scope, check
    python_runs.clear()


def main(*names: str) -> None:
    """Run these; the process ends normally if all is well."""
    faulthandler.enable()
    sys.unraisablehook = lambda _: None  # what cannot be said for want of memory
    builtin_kinds.watch_allocations()
    for name in names:
        if name != "scopes_open_and_close":
            interceptor.configure(builtin_kinds.describe, builtin_kinds.hear)
        for label, act, check in SCENARIOS[name]():
            check()
            with contextlib.suppress(ZeroDivisionError):
                act()
            check()
            sys.stdout.write(f"{name}: {label}: {exhaust(label, act, check)}\n")
            sys.stdout.flush()
        kinds.assert_restored()
    sys.stdout.write("".join(f"{line}\n" for line in (["survived"] if names else SCENARIOS)))


if __name__ == "__main__":
    main(*sys.argv[1:])

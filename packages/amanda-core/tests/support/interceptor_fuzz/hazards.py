"""What a process may do around the interceptor; each runs in a process of its own, which has to survive.

`python -m interceptor_fuzz.hazards NAME`
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Detour, Enclosure, PlanTable, Site, Suspension

from . import kinds
from .kinds import TARGETS, Identity, Target, builtin_kinds
from .values import outcome

HAZARDS: dict[str, Callable[[], None]] = {}


def hazard(function: Callable[[], None]) -> Callable[[], None]:
    """Enter it in the list."""
    HAZARDS[function.__name__] = function
    return function


def named(name: str) -> Target:
    """The target of that name."""
    return next(target for target in TARGETS if target.name == name)


def run(target: Target) -> Any:
    """Call it with its sample arguments."""
    return target(*target.sample(), **target.keywords)


def scope(table: PlanTable | None = None) -> Any:
    """An activation, in force until the token is reset."""
    return ACTIVATION.set(Activation(table, "state"))


@hazard
def sites_are_made_of_anything() -> None:
    """What is no callable is refused by a TypeError, however small the object is."""
    add, offset = int.__add__, vars(type)["__dictoffset__"]
    for thing in (object(), 3, 0.5, None, "x", (), b"", add, offset, iter("")):
        try:
            Site(thing, thing, "thing", 1, print)
        except TypeError:
            continue
        raise AssertionError(thing)


@hazard
def types_share_definitions() -> None:
    """A call through another type that has the same method definitions is left alone."""
    twin, kind = builtin_kinds.Twin(), builtin_kinds.Twin
    calls: dict[str, Callable[[], Any]] = {
        "keywords": lambda: twin.keywords(1, b=2),
        "class_fast": lambda: kind.class_fast(1),
        "both": lambda: twin.both,
        "__getitem__": lambda: twin[1],
    }
    targets = [named(f"Static.{name}") for name in calls]
    bare = {name: call() for name, call in calls.items()}
    with kinds.placed(*targets):
        token = scope()
        assert {name: call() for name, call in calls.items()} == bare
        ACTIVATION.reset(token)


@hazard
def originals_outlive_their_sites() -> None:
    """The way past interception works for as long as anybody holds it."""

    def check(target: Target) -> None:
        original, expected, args = target.new_site().original, outcome(lambda: run(target)), target.sample()
        gc.collect()
        kept = [bytes(size) for size in range(200)]
        assert outcome(lambda: original(*args, **target.keywords)) == expected, target.name
        assert repr(original)
        del kept

    for target in TARGETS:
        if not target.holder and target.attribute != "both_said" and target.name != "Heap.__getitem__":
            check(target)


@hazard
def tables_are_emptied_without_memory() -> None:
    """What is taken out of a table is out, and what lives on is let go of once, with no memory left."""
    builtin_kinds.watch_allocations()
    (count_of_an_item,) = {sys.getrefcount(item) for item in [Identity()]}
    for size in range(1, 40):
        table, plans = PlanTable(), [Identity() for _ in range(size)]
        for key, plan in enumerate(plans, 1):
            table.set(key, plan)
        del plan
        discards = map(table.discard, list(range(1, size + 1)))
        builtin_kinds.fail_allocations(0, 1 << 40)
        try:
            any(discards)
        finally:
            builtin_kinds.stop_failing()
        assert len(table) == 0
        assert {sys.getrefcount(plan) for plan in plans} == {count_of_an_item}


@hazard
def numbered_objects_die_without_memory() -> None:
    """An object that has an ordinal dies as any other, and its address may be used again."""
    builtin_kinds.watch_allocations()
    sys.unraisablehook = lambda _: None  # the core hears of the deaths when there is memory again
    numbers = set()
    for size in range(1, 60):
        objects = [Identity() for _ in range(size)]
        numbers |= {interceptor.ordinal(one) for one in objects}
        builtin_kinds.fail_allocations(0, 1 << 40)
        try:
            objects.clear()
        finally:
            builtin_kinds.stop_failing()
    assert len(numbers) == sum(range(60))


@hazard
def slots_are_swapped_all_or_none() -> None:
    """Where memory ends while a slot is placed or removed, the type and its heirs agree."""
    builtin_kinds.watch_allocations()
    heirs = [type("Heir", (kinds.StaticHeir,), {}) for _ in range(5)]
    target, seen = named("Static.__getitem__"), []

    def handler(_state: Any, _plan: Any, _id: int, site: Site, args: Any, kwargs: Any) -> Any:
        seen.append(args)
        return site.invoke(args, kwargs)

    kinds.handlers.append(handler)
    subjects = [kind() for kind in (builtin_kinds.Static, kinds.StaticHeir, *heirs)]
    for change in (target.place, target.remove):
        for nth in range(1000):
            seen.clear()
            builtin_kinds.fail_allocations(nth, 1 << 40)
            try:
                change()
            except MemoryError:
                failed = True
            else:
                failed = False
            finally:
                builtin_kinds.stop_failing()
            token = scope()
            for subject in subjects:
                subject[1]
            ACTIVATION.reset(token)
            assert len(seen) == len(subjects) * target.placed, (nth, len(seen))
            assert target.site.placed == target.placed == ((change == target.place) != failed)
            if not failed:
                break


@hazard
def threads_end_inside_a_scope() -> None:
    """What dies with a thread may call ops when the thread's own dict is gone."""
    results = []

    class Late:
        def __del__(self) -> None:
            results.extend([math.sin(1.0), math.sin(1.0), interceptor.subjects()])
            interceptor.reset_root()

    for before in (False, True):
        local = threading.local()

        def work(local: Any = local, before: bool = before) -> None:
            if before:
                local.late = Late()
            scope()
            math.sin(0.5)
            local.late = Late()

        with kinds.placed(named("math.sin")):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert results == [math.sin(1.0), math.sin(1.0), []] * 3


@hazard
def collections_empty_the_arguments() -> None:
    """A collection that runs while a list of arguments is read may empty that list."""
    target = named("builtin_kinds.varargs")
    thresholds = gc.get_threshold()

    class Emptying:
        def __init__(self, items: list[Any]) -> None:
            self.items, self.self = items, self

        def __del__(self) -> None:
            interceptor.ordinal(self.items[-1])
            self.items.clear()

    with kinds.placed(target):
        token = scope()
        for room in range(120):
            items = [Identity() for _ in range(20)]
            gc.disable()
            gc.collect()
            Emptying(items)
            kept = [[] for _ in range(room)]  # type: ignore[var-annotated]
            gc.set_threshold(100)
            gc.enable()
            target.callable(items)
            gc.set_threshold(*thresholds)
            del kept
        ACTIVATION.reset(token)


@hazard
def what_is_collected_is_called() -> None:
    """In a cycle that is collected, something that dies late calls what could have been cleared."""

    class Holder:
        def __call__(self, *_: Any) -> int:
            said.append(1)
            return 1

    said: list[int] = []
    makers: list[Callable[[Any], Any]] = [
        lambda function: Detour(Site(function, function, "f", 1, function)),
        Enclosure,
    ]
    for make in makers:
        holder = Holder()
        made = make(holder)
        box: list[Any] = [builtin_kinds.Deathbed(made)]
        other = [box]  # so that the box outlives the holder's dict
        box.append(other)
        holder.box = box  # type: ignore[attr-defined]
        del holder, made, box, other
        gc.collect()
    assert len(said) == len(makers)


@hazard
def arguments_of_the_interceptor_are_wrong() -> None:
    """Every function of the face, given what it does not take, raises and goes on."""
    detour, table = Detour(named("Plain.method").site), PlanTable()
    wrong = [object(), 3, None, b"x", "x", 0.5, (), print, -1, 1 << 70, Identity, vars(dict)["fromkeys"]]
    faces: list[Callable[..., Any]] = [
        type(detour).__getattribute__.__get__(detour), type(detour).__get__.__get__(detour), detour,
        Detour, Enclosure, Site, Activation, PlanTable, Suspension, table.get, table.set, table.discard,
        interceptor.add_identity_type, interceptor.subjects, interceptor.snapshot().replay,
        interceptor.reset_root, interceptor.active, interceptor.ordinal, named("math.sin").site.invoke,
        named("math.sin").site.place,
    ]  # fmt: skip
    for face in faces:
        for count in range(4):
            for shift in range(len(wrong)):
                outcome(lambda f=face, c=count, s=shift: f(*(wrong * 2)[s : s + c]))  # type: ignore[misc]
    named("math.sin").remove()
    for kind in (builtin_kinds.Static, dict, bytearray):
        for name in vars(kind):
            thing = vars(kind)[name]
            outcome(lambda thing=thing: Site(thing, thing, "thing", 1, print))  # type: ignore[misc]


@hazard
def zero_is_no_id() -> None:
    """A table refuses the one number that no op has, rather than mislay its plan."""
    table = PlanTable()
    for use in (lambda: table.set(0, table), lambda: table.get(0), lambda: table.discard(0)):
        assert outcome(use)[1] == "ValueError"
    assert len(table) == 0


@hazard
def deletions_are_not_intercepted() -> None:
    """The descriptor that deletes shares its slot with the one that assigns, and is refused."""
    target = vars(builtin_kinds.Static)["__delitem__"]
    assert outcome(lambda: Site(target, target, "delete", 1, print))[1] == "TypeError"


@hazard
def other_interpreters_are_left_alone() -> None:
    """A subinterpreter is refused, calls the same builtins as they are, and disturbs nobody."""
    target, seen = named("array.tolist"), []

    def handler(_state: Any, _plan: Any, _id: int, site: Site, args: Any, kwargs: Any) -> Any:
        seen.append(args)
        if len(seen) < 3:
            run_elsewhere("assert array.array('d', [1.0]).tolist() == [1.0]")
        return site.invoke(args, kwargs)

    kinds.handlers.append(handler)
    with kinds.placed(target):
        token = scope()
        for count in range(1, 5):
            assert run(target) == [3.0, 1.0, 2.0]
            assert len(seen) == count
            run_elsewhere(
                "from amanda import interceptor",
                "assert not interceptor.NATIVE",
                "assert array.array('d', [1.0]).tolist() == [1.0]",
            )
        ACTIVATION.reset(token)


def run_elsewhere(*lines: str) -> None:
    """Run code in a subinterpreter of this thread."""
    interpreters: Any = importlib.import_module(
        "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    )
    code = "\n".join(["import array, sys", f"sys.path[:] = {sys.path!r}", *lines])
    interpreter = interpreters.create()
    try:
        failure = interpreters.run_string(interpreter, code)
        assert not failure, failure
    finally:
        interpreters.destroy(interpreter)


@hazard
def the_interceptor_is_loaded_again() -> None:
    """A reload leaves what is in force in force."""
    target, seen = named("math.sin"), []
    kinds.handlers.append(lambda *given: (seen.append(given), 1.0)[1])
    with kinds.placed(target):
        token = scope()
        importlib.reload(interceptor)
        assert interceptor.NATIVE
        assert interceptor.ACTIVATION is ACTIVATION
        assert math.sin(0.5) == 1.0
        ACTIVATION.reset(token)
    assert len(seen) == 1


@hazard
def threads_call_while_others_place_and_remove() -> None:
    """Threads call, in scopes and out of them, while others place and remove the same callables."""
    names = "math.sin math.gcd csv.reader array.tolist dict.update Static.both array.__getitem__ Heap.parsed"
    targets = [*map(named, names.split()), named("Static.__getitem__"), named("bytes.fromhex")]
    bare = {target.name: outcome(lambda target=target: run(target)) for target in targets}  # type: ignore[misc]
    until, wrong = time.monotonic() + 1.5, []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def call(in_scope: bool) -> None:
        table = PlanTable()
        while time.monotonic() < until:
            token = scope(table) if in_scope else None
            for target in targets:
                got = outcome(lambda target=target: run(target))  # type: ignore[misc]
                if got != bare[target.name]:
                    wrong.append((target.name, got))
            if token is not None:
                ACTIVATION.reset(token)
            table.clear()

    def place(offset: int) -> None:
        while time.monotonic() < until:
            for target in targets[offset::2]:
                target.place()
            for target in targets[offset::2]:
                target.remove()

    threads = [threading.Thread(target=call, args=(index % 2 == 0,)) for index in range(4)]
    threads += [threading.Thread(target=place, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(switch)
    assert not wrong, wrong[:3]


@hazard
def a_handler_forks() -> None:
    """The child of a fork inside a handler goes on, and so does the parent."""
    target = named("math.sin")

    def handler(_state: Any, _plan: Any, _id: int, site: Site, args: Any, kwargs: Any) -> Any:
        child = os.fork()
        result = site.invoke(args, kwargs)
        if child == 0:
            kinds.handlers[:] = [lambda *given: given[3].invoke(*given[4:])]
            threads = [threading.Thread(target=math.sin, args=(0.5,)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            os._exit(0 if math.sin(0.5) == result else 3)
        assert os.waitpid(child, 0)[1] == 0
        return result

    kinds.handlers.append(handler)
    idle = threading.Event()
    other = threading.Thread(target=lambda: (scope(), math.sin(0.5), idle.wait()))
    with kinds.placed(target):
        token = scope()
        expected = math.sin(0.5)
        other.start()
        assert [math.sin(0.5) for _ in range(3)] == [expected] * 3
        idle.set()
        other.join()
        ACTIVATION.reset(token)


@hazard
def recursion_ends_in_an_error() -> None:
    """Recursion through stubs, handlers and detours ends at Python's limit, at every depth of it."""
    deeper, again = named("builtin_kinds.deeper"), named("Plain.again")
    kinds.handlers.append(lambda *given: given[3].invoke(*given[4:]))
    loop: list[Any] = [lambda *given: (math.sin(0.5), loop[0](*given))]
    with kinds.placed(deeper, again, named("math.sin")):
        token = scope()
        for limit in (sys.getrecursionlimit(), 5000):
            sys.setrecursionlimit(limit)
            for call in (
                lambda: builtin_kinds.deeper(builtin_kinds.deeper),
                lambda: kinds.Plain().again(100_000),
                lambda: builtin_kinds.deeper(lambda f: builtin_kinds.deeper(f)),
                loop[0],
            ):
                assert outcome(call)[1] == "RecursionError", outcome(call)
        sys.setrecursionlimit(1000)
        for depth in range(900, 1000):

            def descend(left: int) -> Any:
                return descend(left - 1) if left else builtin_kinds.deeper(lambda _: math.sin(0.5))

            assert outcome(lambda depth=depth: descend(depth))[1] in ("float", "RecursionError")  # type: ignore[misc]
        ACTIVATION.reset(token)


FINALE = """
import atexit, io, math, sys, threading, time, array
from amanda import interceptor
from interceptor_fuzz import kinds
targets = [one for one in kinds.TARGETS if not one.holder]
for one in targets:
    one.place()
interceptor.ACTIVATION.set(interceptor.Activation(interceptor.PlanTable(), "state"))
kinds.handlers.append(lambda *given: given[3].invoke(*given[4:]))
class Late:
    def __init__(self): self.me = self
    def __del__(self, sin=math.sin, kind=kinds.StaticHeir, numbers=array.array):
        sin(0.5), kind().read, kind()[1], kind.class_fast(1), numbers("d", [1.0])[0], dict.fromkeys("ab")
local = threading.local()
local.late, sys.late, math.late = Late(), Late(), Late()
def forever():
    interceptor.ACTIVATION.set(interceptor.Activation(None, "state"))
    while True:
        math.sin(0.5), kinds.StaticHeir().keywords(1), numbers.tolist()
numbers = array.array("d", [1.0])
threading.Thread(target=forever, daemon=True).start()
atexit.register(lambda: math.sin(0.5))
time.sleep(0.05)
"""


@hazard
def the_interpreter_ends_with_everything_placed() -> None:
    """A process ends inside a scope, with a thread in an op and objects that call ops as they die."""
    for ending in ("", "sys.exit(0)", "import os; os.kill(os.getpid(), 2)"):
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", FINALE + ending], capture_output=True, text=True
        )
        expected = {0} if "kill" not in ending else {0, -2, 130, 1}  # 0: interrupts are ignored here
        assert done.returncode in expected, f"{done.returncode}\n{done.stderr}"


@hazard
def regions_nest_deep() -> None:
    """Places that hold their enclosing places, a hundred thousand deep, are let go of."""

    class Module:
        def __call__(self) -> Any:
            return interceptor.snapshot()

    Module.__call__ = Enclosure(Module.__call__)  # type: ignore[method-assign]
    token, module = scope(), Module()
    kept = interceptor.snapshot()
    for _ in range(100_000):
        kept = kept.replay(module)
    del kept
    ACTIVATION.reset(token)


@hazard
def two_sites_have_one_target() -> None:
    """The first that is placed stays, the other says that it is not; what was there comes back."""
    names = "math.sin csv.reader array.tolist bytes.fromhex Static.both array.__getitem__ Static.keywords"
    for target, placed_first in itertools.product(map(named, names.split()), (True, False)):
        if not placed_first:
            second = target.new_site()
        target.place()
        if placed_first:
            second = target.new_site()
        second.place()
        assert (target.site.placed, second.placed) == (True, False)
        second.original(*target.sample(), **target.keywords)
        target.remove()
        second.remove()
        assert not target.placed, target.name
        second.place()
        assert second.placed
        second.remove()
        assert not target.placed, target.name


def main(*names: str) -> None:
    """Run one; the process ends normally if all is well. Without a name: list them."""
    faulthandler.enable()
    for name in names:
        HAZARDS[name]()
        kinds.assert_restored()
    sys.stdout.write("".join(f"{line}\n" for line in (["survived"] if names else HAZARDS)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ops met again and again while everything that tells them apart changes; prints their ids.

What an interceptor remembers of a place has to go with what it depends on: run this with both interceptors.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from amanda import interceptor
from amanda.interceptor import ACTIVATION, Activation, Detour, Enclosure, PlanTable, Site, codes
from amanda.interceptor.opid import BOUNDARY, FRAMEWORK, SKIPPED, digest

REUSES = "PYTHONMALLOC" not in os.environ
"""Whether what is freed is used again at once: debugging allocators may keep it."""
CASES: dict[str, Callable[[], None]] = {}
ids: list[int] = []
table = PlanTable()


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Enter it in the list."""
    CASES[function.__name__] = function
    return function


class Identity:
    """Its instances tell ops apart."""


class Slotted:
    """Instances cannot be held weakly."""

    __slots__ = ()


class Leaf:
    """Its instances tell rounds of a loop apart, if they say so."""

    def __init__(self, trained: bool = True) -> None:
        self.trained = trained

    def __call__(self, *_: Any) -> None:
        op(self)


class Module:
    """Its calls are regions."""

    def __init__(self, *inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, *args: Any) -> Any:
        """Calls what is in it."""
        for one in self.inner:
            one(*args)
        return op(*args)


def _path(owner: Any, subject: Any) -> tuple[int, bool]:
    inner = getattr(owner, "inner", ())
    return (digest(inner.index(subject)), True) if subject in inner else (digest("elsewhere"), False)


def _op(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args else None


def _handler(state: Any, plan: Any, op_id: int, site: Site, args: Any, kwargs: Any) -> Any:
    ids.append(op_id)
    return site.invoke(args, kwargs)


def _framework(x: Any = None) -> Any:
    return op(x)


op: Any = Detour(Site(_op, _op, "op", digest("op"), _handler))
Module.__call__ = Enclosure(Module.__call__, _path)  # type: ignore[method-assign]
codes.add_code(_framework.__code__, FRAMEWORK)
codes.add_code(vars(Module)["__call__"].__wrapped__.__code__, BOUNDARY)
interceptor.add_identity_type(Identity)
interceptor.set_leaf_type(Leaf, lambda leaf: leaf.trained)


def again(function: Callable[[], Any], times: int = 3) -> None:
    """Call it some times from one place, each time as if for the first."""
    for _ in range(times):
        function()
        interceptor.reset_root()


def _helper(x: Any = None) -> Any:
    return op(x)


@case
def walks_with_known_places_beyond_their_end() -> None:
    """Every frame out to the program's is at an instruction from which ops were called before.

    First: what is known goes when code dies.
    """

    class Unbound:
        def __call__(self, _: Any = None) -> Any:
            return _helper()

    Unbound.__call__ = Enclosure(Unbound.__call__)  # type: ignore[method-assign]
    calls = op, _framework, _helper, Unbound()
    for _ in range(3):
        for call, given in ((op, None), (_framework, None), *((again, one) for one in calls)):
            call(given)


@case
def other_arguments_at_one_place() -> None:
    """What is given decides, by position, by name and in a list, and so does its order."""
    one, two = Identity(), Identity()
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}), ((one,), {}), ((two,), {}), ((3,), {}), ((None, one), {}), ((one, two), {}),
        ((two, one), {}), (([one],), {}), (([one, 3, two],), {}), (((two,),), {}),
        ((), {"x": one}), ((), {"x": two, "y": one}), ((Slotted(),), {}), (([],), {}), (((one, (two,)),), {}),
    ]  # fmt: skip

    def body() -> None:
        for args, kwargs in given:
            op(*args, **kwargs)
            interceptor.reset_root()

    again(body)
    given[1][0][0].x = 3
    given[7][0][0][0] = two
    again(body)


@case
def one_code_in_many_modules() -> None:
    """Instances, and ways to one instance, have ids of their own."""
    leaf = Module()
    models = [Module(leaf, Module(leaf)), Module(Module(), leaf), Module(leaf, leaf)]
    again(lambda: [model(Identity()) for model in models])
    again(lambda: [model() for model in (leaf, *models, Module(leaf))])


@case
def one_code_by_two_ways() -> None:
    """A function called at two places, and once more through itself."""

    def recursive(left: int) -> None:
        op()
        if left:
            recursive(left - 2 + left % 2)
            recursive(0)

    again(lambda: (_helper(), _helper(), [_helper() for _ in range(2)], list(map(_helper, "ab"))))
    again(lambda: recursive(4))
    again(lambda: recursive(140), 2)


@case
def repeats() -> None:
    """They are counted up to the cap, at the root and in a module."""

    class Looping(Module):
        def forward(self, *args: Any) -> Any:
            for one in range(70):
                op(one)
            return [op(), op()]

    model = Looping()
    again(lambda: [op() for _ in range(70)])
    again(lambda: (model(), op(), model(), op()))


@case
def ways_to_the_root() -> None:
    """A function of the program has an op for each way to it, a loop has one; leaves count as ways."""

    def twice() -> None:
        for _ in range(2):
            _helper()

    def deep(left: int) -> None:
        twice()
        if left:
            deep(left - 1)

    def leaves() -> None:
        for one in leaf, Leaf(), leaf, Leaf(False):
            op(one)
            op(x=one)

    leaf = Leaf()
    again(lambda: [(_helper(), twice(), _framework()) for _ in range(3)])
    again(lambda: (deep(20), deep(90)), 2)
    again(lambda: (leaves(), leaves()))
    again(lambda: [Module(leaf)(leaf) for _ in range(2)])


@case
def suspended_frames() -> None:
    """A generator and a coroutine go on where others called them."""

    def generator() -> Iterator[None]:
        while True:
            op()
            yield
            _helper()
            yield

    class Resuming(Module):
        def forward(self, *args: Any) -> Any:
            next(running)
            return super().forward()

    async def task(model: Module) -> None:
        model()
        await asyncio.sleep(0)
        op()

    async def tasks() -> None:
        await asyncio.gather(task(model), task(model), task(Module()))

    running, model = generator(), Resuming()
    again(lambda: (next(running), model(), next(running), Module(model)()), 4)
    again(lambda: asyncio.run(tasks()))


@case
def threads() -> None:
    """Each counts for itself."""

    def body() -> None:
        model()
        op()
        op()

    model = Module(Module())
    body()
    for _ in range(3):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(body,))
        thread.start()
        thread.join()
    body()


@case
def code_that_dies() -> None:
    """Other code comes to lie where it was."""
    addresses = set()
    for number in range(60):
        names: dict[str, Any] = {"op": op}
        exec(compile("def fresh():\n    return op()", f"<{number}>", "exec"), names)
        again(names["fresh"], 2)
        addresses.add(id(names["fresh"].__code__))
        del names
        gc.collect(0)
    assert len(addresses) < 60 or not (interceptor.NATIVE and REUSES)  # in Python code is kept


@case
def objects_that_die() -> None:
    """Others get new ids where they were, and a module's path dies with it."""
    for _ in range(40):
        again(functools.partial(op, Identity()), 2)
        again(Module(Module()), 2)


@case
def types_that_die() -> None:
    """Values of another, which lies there, may tell ops apart where those of the one did not."""
    addresses = set()
    for number in range(40):
        kind: Any = type("Kind", (Identity,) if number % 2 else (), {})
        kind.x = number
        assert kind().x == number
        one = kind()
        again(functools.partial(op, one), 2)
        again(functools.partial(op, [one]), 2)
        del one
        addresses.add(id(kind))
        del kind
        gc.collect()
    assert len(addresses) < 40 or not REUSES


@case
def types_that_change() -> None:
    """A type may come to inherit from one that tells ops apart, or become one."""

    class Base:
        pass

    class Changing(Base):
        pass

    class Late:
        pass

    one, two = Changing(), Late()
    again(lambda: (op(one), op(two), one.__class__, two.__class__))
    Changing.__bases__ = (Identity,)
    again(lambda: (op(one), op(two)))
    interceptor.add_identity_type(Late)
    again(lambda: (op(one), op(two)))
    Changing.__bases__ = (Base,)
    again(lambda: (op(one), op(two)))


@case
def code_that_changes_its_kind() -> None:
    """It comes to be passed over, walked through, or the end of a walk, after it was met as another."""

    def middle() -> None:
        op()

    def outer() -> None:
        middle()

    class Inside(Module):
        def forward(self, *args: Any) -> Any:
            return outer()

    model = Inside()
    again(lambda: (outer(), model()))
    for function, kind in ((middle, FRAMEWORK), (outer, FRAMEWORK), (middle, SKIPPED), (outer, BOUNDARY)):
        codes.add_code(function.__code__, kind)
        again(lambda: (outer(), model()))


@case
def places_taken_along() -> None:
    """A replay, where the same instructions are reached from another place."""

    class Keeping(Module):
        def forward(self, *args: Any) -> Any:
            kept.append(interceptor.snapshot())
            return super().forward(*args)

    kept: list[Any] = []
    leaf = Module()
    model, other = Module(Keeping(leaf)), Module(Module(), leaf)
    again(lambda: (model(), kept[-1].replay(_helper), model(), kept[0].replay(model)))
    again(lambda: (model(), other(), kept[0].replay(leaf), other(), kept[0].replay(leaf)))
    kept.append(interceptor.snapshot())
    again(lambda: kept[-1].replay(_helper))

    def helped() -> None:
        for _ in range(2):
            _helper()
            kept[-1].replay(_helper)
            kept.append(interceptor.snapshot())

    again(lambda: (helped(), kept[-1].replay(helped), helped()))


@case
def scopes_in_between() -> None:
    """Ids go on, whichever scope is open and whether or not it keeps plans."""

    def body() -> None:
        op()
        token = ACTIVATION.set(Activation(None, None))
        op()
        ACTIVATION.reset(token)
        token = ACTIVATION.set(Activation(table, None, False))
        op()
        ACTIVATION.reset(token)
        op()

    again(body)


@case
def plans_that_change() -> None:
    """An op is handled, or not, as its plan is at that moment."""

    def body() -> None:
        op()

    again(body)
    op_id = ids[-1]
    for plan in (None, "plan", None, NotImplemented, "plan", None):
        if plan is NotImplemented:
            table.discard(op_id)
        else:
            table.set(op_id, plan)
        again(body, 2)
        ids.append(-1)
    table.clear()
    again(body)


def main() -> None:
    """Print the ids of each case, a line each."""
    for name, run in (("begin", op), ("go on", _framework), *CASES.items()):
        interceptor.reset_root()
        run()
        sys.stdout.write(f"{name} {' '.join(map(str, ids))}\n")
        ids.clear()


if __name__ == "__main__":
    ACTIVATION.set(Activation(table, None))
    for part in (op, _framework, main):
        part()

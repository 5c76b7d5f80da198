"""Callables of every kind to intercept: the standard library's, an extension's, Python's own."""

from __future__ import annotations

import array
import csv
import datetime
import importlib.util
import io
import math
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amanda import interceptor
from amanda.interceptor import Detour, Site
from amanda.interceptor.opid import digest

BUILD = "AMANDA_FUZZ_BUILD"
"""Environment variable: the folder that has, or gets, the compiled extension."""


def build(folder: Path) -> Path:
    """Compile the extension `builtin_kinds` into the folder unless it is there."""
    library = folder / f"builtin_kinds{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not library.exists():
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        source = Path(__file__).with_name("builtin_kinds.c")
        include = sysconfig.get_path("include")
        part = library.with_suffix(f".{os.getpid()}")
        shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        subprocess.run(
            [*compiler, *shared, "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(part)], check=True
        )
        part.replace(library)
    return library


def load() -> Any:
    """The extension, compiled now where nobody has."""
    if "builtin_kinds" not in sys.modules:
        folder = os.environ.setdefault(BUILD, "") or tempfile.mkdtemp(prefix="amanda-fuzz-")
        os.environ[BUILD] = folder
        spec = importlib.util.spec_from_file_location("builtin_kinds", build(Path(folder)))
        assert spec is not None
        assert spec.loader is not None
        sys.modules["builtin_kinds"] = importlib.util.module_from_spec(spec)
    return sys.modules["builtin_kinds"]


builtin_kinds = load()


class StaticHeir(builtin_kinds.Static):  # type: ignore[misc]
    """Inherits the slots of a static type, and can be held weakly."""


class HeapHeir(builtin_kinds.Heap):  # type: ignore[misc]
    """Inherits the slots of a heap type."""

    __iter__ = None  # it has an item for every index

    def __getitem__(self, key: Any) -> Any:
        return "own", super().__getitem__(key)


class ArrayHeir(array.array):  # type: ignore[type-arg]
    """Inherits subscripts."""


class Identity:
    """Its instances tell ops apart, as parameters do."""

    def __repr__(self) -> str:
        return "Identity()"


interceptor.add_identity_type(Identity)


class Plain:
    """Methods and a call in Python, which are detoured."""

    def method(self, x: Any, *rest: Any, only: Any = None) -> Any:
        return x, rest, only

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def again(self, n: int) -> Any:
        return n and self.again(n - 1)


@dataclass
class Target:
    """One callable with arguments that it takes; holder: of what Python replaces by attribute."""

    name: str
    callable: Any
    sample: Callable[[], tuple[Any, ...]]
    keywords: dict[str, Any] = field(default_factory=dict)
    holder: Any = None
    flags: int = 0
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        self.site = self.new_site()

    def new_site(self, handler: Any = None) -> Site:
        """A site whose calls go to the handler, by default to the one of this moment."""
        handler = handler or _handle
        return Site(self.callable, self.callable, self.name, digest("fuzz", self.name), handler, self.flags)

    @property
    def placed(self) -> bool:
        """Whether calls pass the interceptor."""
        return self.state() != self.vanilla

    def state(self) -> Any:
        """The pointer or the attribute that is in place now."""
        return vars(self.holder)[self.attribute] if self.holder else self.site.address

    @property
    def vanilla(self) -> Any:
        """The same while nothing is placed."""
        return self.callable if self.holder else _ADDRESSES[self.name]

    @property
    def attribute(self) -> str:
        """The name under which it is found."""
        return str(self.name.rpartition(".")[2])

    def place(self) -> None:
        """Let calls pass the interceptor."""
        if self.holder:
            setattr(self.holder, self.attribute, Detour(self.site))
        else:
            self.site.place()

    def remove(self) -> None:
        """Leave the callable as it was."""
        if self.holder:
            setattr(self.holder, self.attribute, self.callable)
        else:
            self.site.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as a program would."""
        kind = type(self.callable).__name__
        if kind == "getset_descriptor":
            return getattr(args[0], self.attribute)
        if kind == "wrapper_descriptor" and self.attribute == "__getitem__":
            return args[0][args[1]]
        if kind == "wrapper_descriptor":
            args[0][args[1]] = args[2]
            return None
        if self.holder or kind == "classmethod_descriptor":
            return getattr(args[0], self.attribute)(*args[1:], **kwargs)
        return self.callable(*args, **kwargs)


Handler = Callable[..., Any]
handlers: list[Handler] = []
"""The last is in force; without one calls go through."""


def _handle(state: Any, plan: Any, op_id: int, site: Site, args: tuple[Any, ...], kwargs: Any) -> Any:
    if handlers:
        return handlers[-1](state, plan, op_id, site, args, kwargs)
    return site.invoke(args, kwargs)


def _numbers() -> Any:
    return array.array("d", [3.0, 1.0, 2.0])


def _standard() -> Iterator[Target]:
    yield Target("os.getpid", os.getpid, lambda: ())
    yield Target("math.sin", math.sin, lambda: (0.5,))
    yield Target("csv.reader", csv.reader, lambda: (["a;b"],), {"delimiter": ";"})
    yield Target("math.gcd", math.gcd, lambda: (12, 18, 30))
    yield Target("math.isclose", math.isclose, lambda: (1.0, 2.0), {"abs_tol": 3})
    yield Target("array.tolist", array.array.tolist, lambda: (_numbers(),))
    yield Target("array.count", array.array.count, lambda: (ArrayHeir("d", [1.0]), 1.0))
    yield Target("dict.update", dict.update, lambda: ({}, {"a": 1}), {"b": 2})
    yield Target("array.index", array.array.index, lambda: (_numbers(), 2.0))
    yield Target("bytes.split", bytes.split, lambda: (b"a b c",), {"maxsplit": 1})
    yield Target("bytes.fromhex", vars(bytes)["fromhex"], lambda: (bytes, "ff00"))
    yield Target("dict.fromkeys", vars(dict)["fromkeys"], lambda: (dict, "ab", 1))
    stamp = vars(datetime.datetime)["fromtimestamp"]
    utc = {"tz": datetime.timezone.utc}
    yield Target("datetime.fromtimestamp", stamp, lambda: (datetime.datetime, 86400.0), utc)
    yield Target("BytesIO.closed", vars(io.BytesIO)["closed"], lambda: (io.BytesIO(),))
    yield Target("BaseException.__context__", vars(BaseException)["__context__"], lambda: (OSError(),))
    yield Target("array.__getitem__", vars(array.array)["__getitem__"], lambda: (_numbers(), 1))


def _extended() -> Iterator[Target]:
    names = "noargs one varargs keywords fast fast_keywords parsed nothing_said both_said deeper".split()
    arguments: dict[str, tuple[Any, ...]] = {
        "noargs": (), "nothing_said": (), "both_said": (), "varargs": (1, "a"), "keywords": (1, "a"),
        "fast": (1, "a"), "fast_keywords": (1, "a"), "one": (1,), "parsed": (1,), "deeper": (len,),
    }  # fmt: skip
    keywords = {"keywords": {"b": 2}, "fast_keywords": {"b": 2}, "parsed": {"only": 3}}

    def one(name: str, convention: str, function: Any, head: Callable[[], tuple[Any, ...]]) -> Target:
        given = arguments[convention]
        return Target(name, function, lambda: (*head(), *given), keywords.get(convention, {}))

    for name in names:
        yield one(f"builtin_kinds.{name}", name, getattr(builtin_kinds, name), tuple)
    for kind, instance in ((builtin_kinds.Static, StaticHeir), (builtin_kinds.Heap, HeapHeir)):
        own = kind.__name__
        for name in names:
            yield one(f"{own}.{name}", name, vars(kind)[name], lambda instance=instance: (instance(),))
        for name in names[:7]:
            in_class, static = f"class_{name}", f"static_{name}"
            yield one(f"{own}.{in_class}", name, vars(kind)[in_class], lambda instance=instance: (instance,))
            yield one(f"{own}.{static}", name, getattr(kind, static), tuple)
        for name in ("read", "both", "failing"):
            yield Target(f"{own}.{name}", vars(kind)[name], lambda instance=instance: (instance(),))
        item = vars(kind)["__getitem__"]
        yield Target(f"{own}.__getitem__", item, lambda instance=instance: (instance(), 1))
    assign = vars(builtin_kinds.Static)["__setitem__"]
    yield Target("Static.__setitem__", assign, lambda: (StaticHeir(), 1, 2))


def _python() -> Iterator[Target]:
    yield Target("Plain.method", vars(Plain)["method"], lambda: (Plain(), 1, 2), {"only": 3}, holder=Plain)
    yield Target("Plain.__call__", vars(Plain)["__call__"], lambda: (Plain(), 1), holder=Plain)
    yield Target("Plain.again", vars(Plain)["again"], lambda: (Plain(), 5), holder=Plain)


TARGETS = [*_standard(), *_extended(), *_python()]
for flags, own in ((interceptor.TRANSPARENT, "static_one"), (interceptor.IMPLEMENTATION, "static_fast")):
    target = next(one for one in TARGETS if one.attribute == own)
    target.flags = flags
    target.site = target.new_site()
_ADDRESSES = {target.name: target.site.address for target in TARGETS}


@contextmanager
def placed(*targets: Target) -> Iterator[None]:
    """Calls of these pass the interceptor."""
    try:
        for target in targets:
            target.place()
        yield
    finally:
        for target in targets:
            target.remove()


def assert_restored() -> None:
    """Nothing is placed, nothing is active, and every callable still works."""
    assert interceptor.active() is None
    left = [target.name for target in TARGETS if target.placed]
    assert not left, f"still placed: {left}"

"""`python -m amanda_docs.drivers`: bring the tables of names in docs/writing-a-driver.md up to date."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
from pathlib import Path
from typing import Any

from amanda.backend import (
    BackwardPass,
    BackwardStep,
    Call,
    EagerDriver,
    OpFacts,
    Patches,
    Recomputation,
    State,
    Trace,
    TreeSlot,
    TreeSlots,
)
from amanda.testing._ladder import CAPABILITIES, member_summary
from amanda.testing._suite import RUNGS

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-driver.md"

OVERRIDDEN: dict[str, tuple[type, str]] = {
    "The driver": (EagerDriver, ""),
    "A call": (Call, "Call."),
    "The facts of an op": (OpFacts, "OpFacts."),
}
"""Classes that a driver subclasses or fills in, with the prefix by which a rung names their members."""

HANDED: dict[str, type] = {
    "An execution, for its backward ops": Trace,
    "A backward pass": BackwardPass,
    "A backward op in a backward pass": BackwardStep,
    "A parameter of a functional framework": TreeSlot,
    "The parameters of a functional framework": TreeSlots,
    "The state of a thread": State,
    "Changes to the framework": Patches,
    "A part of the program that runs again": Recomputation,
}
"""Classes whose objects a driver gets or makes, and does not subclass."""


def tables() -> str:
    """Return a table for each class: names, what they give, defaults, and the rungs that need them."""
    parts = []
    for title, (kind, prefix) in OVERRIDDEN.items():
        rows = ["| name | what it is or gives | default | rung |", "|---|---|---|---|"]
        # In the order in which a driver is written.
        for name in sorted(public_names(kind), key=lambda name: rung_number(prefix + name)):
            about = member_summary(kind, name), default(kind, name), rung_of(prefix + name)
            rows.append(_row(spelling(kind, name), *about))
        parts.append(f"### {title}: `{kind.__name__}`\n\n" + "\n".join(rows))
    for title, kind in HANDED.items():
        rows = ["| name | what it is or gives |", "|---|---|"]
        make = vars(kind).get("__init__")
        if text := make and make.__doc__:
            arguments = text.partition("Args:")[2]
            rows.append(_row(f"`{kind.__name__}{_parameters(make)}`", " ".join(arguments.split())))
        rows += [_row(spelling(kind, name), member_summary(kind, name)) for name in public_names(kind)]
        parts.append(f"### {title}: `{kind.__name__}`\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


def ladder() -> str:
    """Return a table of the rungs: number, title, what the tests show, and what a driver implements."""
    rows = ["| rung | the tests show | a driver implements |", "|---|---|---|"]
    for number, rung in enumerate(RUNGS, 1):
        names = ", ".join(f"`{name}`" for name in rung.implement)
        rows.append(_row(f"{number}. {rung.title}", " ".join((inspect.getdoc(rung) or "").split()), names))
    return "\n".join(rows)


def capabilities() -> str:
    """Return a table of the capabilities that a suite may lack."""
    rows = ["| capability | what the framework can do |", "|---|---|"]
    return "\n".join([*rows, *(_row(f"`{name}`", about) for name, about in CAPABILITIES.items())])


def public_names(kind: type) -> list[str]:
    """Return the public names of a class and of its bases in Amanda, each class in its own order."""
    names: dict[str, None] = {}
    for base in kind.__mro__:
        if base.__module__.startswith("amanda."):
            slots = vars(base).get("__slots__", ())
            names.update(dict.fromkeys([*vars(base).get("__annotations__", {}), *slots, *vars(base)]))
    return [name for name in names if not name.startswith("_")]


def spelling(kind: type, name: str) -> str:
    """Return a member as code: a method with its parameters."""
    value = inspect.getattr_static(kind, name, None)
    value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return f"`{name}{_parameters(value)}`" if isinstance(value, types.FunctionType) else f"`{name}`"


def _parameters(function: Any) -> str:
    """Return the names of a function's parameters, in parentheses."""
    parameters = inspect.signature(function).parameters.values()
    names = (str(parameter).partition(":")[0].partition("=")[0] for parameter in parameters)
    return f"({', '.join(name for name in names if name not in ('self', 'cls'))})"


def default(kind: type, name: str) -> str:
    """Return what a member is unless a driver overrides it: "required", a value, or what the base does."""
    value = inspect.getattr_static(kind, name, dataclasses.MISSING)
    if isinstance(value, types.MemberDescriptorType) and dataclasses.is_dataclass(kind):
        (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
        if field.default_factory is not dataclasses.MISSING:
            return "a function that gives nothing"
        value = field.default
    is_absent = value is dataclasses.MISSING or isinstance(value, types.MemberDescriptorType)
    if is_absent or getattr(value, "__isabstractmethod__", False):
        return "required"
    if isinstance(value, (types.FunctionType, property, functools.cached_property)):
        return _body(value)
    return f"`{value.__name__ if isinstance(value, type) else repr(value)}`"


def _body(value: Any) -> str:
    """Say what a method of a base does: nothing, give one value, or more than a table can say."""
    function = getattr(value, "fget", None) or getattr(value, "func", None) or value
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    if function.__name__ == "<lambda>":
        (gives,) = (node.body for node in ast.walk(tree) if isinstance(node, ast.Lambda))
        return f"gives `{ast.unparse(gives)}`"
    (definition,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    statements = [node for node in definition.body if not _is_text(node)]
    if not statements:
        return "does nothing"
    if len(statements) == 1 and isinstance(statements[0], ast.Return) and statements[0].value is not None:
        text = ast.unparse(statements[0].value)
        return f"gives `{text}`" if len(text) <= 24 else "as the base does"
    return "as the base does"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def rung_number(name: str) -> int:
    """Return the number of the first rung that needs a name; one above the last where no rung names it."""
    return next((i for i, rung in enumerate(RUNGS, 1) if name in rung.implement), len(RUNGS) + 1)


def rung_of(name: str) -> str:
    """Return number and title of the first rung that needs a name; "" where no rung names it."""
    number = rung_number(name)
    return f"{number}. {RUNGS[number - 1].title}" if number <= len(RUNGS) else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def written(page: str) -> str:
    """Return the text of the page with its generated parts as they are to be."""
    for (begin, end), text in PARTS.items():
        head, _, rest = page.partition(begin)
        _, _, tail = rest.partition(end)
        page = f"{head}{begin}\n\n{text()}\n\n{end}{tail}"
    return page


PARTS = {
    ("<!-- the ladder -->", "<!-- end of the ladder -->"): ladder,
    ("<!-- capabilities -->", "<!-- end of the capabilities -->"): capabilities,
    ("<!-- names of a driver -->", "<!-- end of the names -->"): tables,
}
"""Generated parts of the page, between two comments each."""


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

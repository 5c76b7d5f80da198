"""A table of the shipped drivers: their answers to the questions on which they differ, from their sources."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from amanda_docs.contents import ROOT
from amanda_docs.gaps import suites

MARKER = "<!-- how the drivers differ -->"
DRIVERS = {
    "PyTorch": "amanda-driver-torch",
    "TensorFlow": "amanda-driver-tf",
    "ONNX Runtime": "amanda-driver-onnxruntime",
    "MindSpore": "amanda-driver-mindspore",
    "JAX": "amanda-driver-jax",
}
"""Distributions, by the name that begins the title of their suites."""
BACKWARD = {
    "PyTorch": ("_autograd.py",),
    "TensorFlow": ("eager/_tape.py", "graph/_forward_map.py"),
    "ONNX Runtime": (),
    "MindSpore": ("_autograd.py",),
    "JAX": ("_autodiff.py",),
}
"""Modules that find the backward ops of an op; their first lines say how."""
MODULES = {
    "PyTorch": ("_modules.py",),
    "TensorFlow": ("_layers.py", "graph/_locations.py"),
    "ONNX Runtime": ("_facts.py",),
    "MindSpore": ("_cells.py",),
    "JAX": ("_modules.py",),
}
"""Modules that find the path of the user's module around an op."""


class Mode(NamedTuple):
    """A driver's class: its modes, the base class from the core, and the statements of its body."""

    modes: str
    base: str
    body: list[ast.stmt]


def differences() -> str:
    """Return the table: a row for each question, a column for each driver."""
    rows = [f"| | {' | '.join(DRIVERS)} |", "|---|" + "---|" * len(DRIVERS)]
    rows += [f"| {question} | {' | '.join(map(answer, DRIVERS))} |" for question, answer in QUESTIONS.items()]
    return "\n".join(rows)


def _bases(driver: str) -> str:
    return "<br>".join(f"{mode.modes}: `{mode.base}`" for mode in modes(driver))


def _interception(driver: str) -> str:
    """Return what `attach` of each mode says that it does."""
    attached = {mode.modes: _docstring_of(mode, "attach") for mode in modes(driver)}
    return "<br>".join(f"{names}: {text}" for names, text in attached.items())


def _summaries(driver: str, paths: tuple[str, ...]) -> str:
    """Return the first lines of modules of a driver, with links to the modules."""
    texts = []
    for path in paths:
        file = next(_sources(driver)).parent / path
        summary = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
        texts.append(f"[{path}](../{file.relative_to(ROOT)}): {summary}")
    return "<br>".join(texts)


def _lacking(driver: str) -> str:
    """Return the capabilities that the suite of each mode lacks."""
    texts = []
    for suite in suites():
        if suite.title.startswith(f"{driver}, "):
            names = ", ".join(f"`{name}`" for name in sorted(suite.lacks)) or "nothing"
            texts.append(f"{suite.title.removeprefix(f'{driver}, ')}: {names}")
    return "<br>".join(texts)


def _native(driver: str) -> str:
    names = {name for mode in modes(driver) for name in _names(mode)}
    return "yes" if "reader" in names else "no"


def _size(driver: str) -> str:
    sources = list(_sources(driver))
    lines = sum(len(path.read_text().splitlines()) for path in sources)
    return f"{lines:,} in {len(sources)} modules"


@cache
def modes(driver: str) -> tuple[Mode, ...]:
    """Return the classes of a driver that state an `api` and the modes that they serve."""
    found = []
    for path in _sources(driver):
        for node in ast.parse(path.read_text()).body:
            values = _values(node) if isinstance(node, ast.ClassDef) else {}
            if isinstance(node, ast.ClassDef) and {"api", "framework", "modes"} <= values.keys():
                found.append(Mode(", ".join(ast.literal_eval(values["modes"])), _core_base(node), node.body))
    return tuple(sorted(found, key=lambda mode: mode.modes))


def _core_base(kind: ast.ClassDef) -> str:
    """Return the name of the core's class below a driver's class, whose own bases may be mixins."""
    names = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in kind.bases]
    return next((name for name in names if name in ("EagerDriver", "GraphDriver", "Driver")), "EagerDriver")


def _values(kind: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the class attributes that have a value, by name."""
    values = {}
    for node in kind.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            values[ast.unparse(target)] = node.value
    return values


def _names(mode: Mode) -> Iterator[str]:
    yield from (node.name for node in mode.body if isinstance(node, ast.FunctionDef))


def _docstring_of(mode: Mode, method: str) -> str:
    """Return the first line of a method's docstring."""
    functions = [node for node in mode.body if isinstance(node, ast.FunctionDef) and node.name == method]
    return (ast.get_docstring(functions[0]) or "").partition("\n")[0]


def _sources(driver: str) -> Iterator[Path]:
    """Yield the modules of a driver, the package itself first."""
    (package,) = (ROOT / "packages" / DRIVERS[driver] / "src/amanda/drivers").iterdir()
    yield from sorted(package.rglob("*.py"), key=lambda path: (path.parent, path))


QUESTIONS: dict[str, Callable[[str], str]] = {
    "modes, and the base class of each": _bases,
    "where ops are intercepted": _interception,
    "how backward ops are found": lambda driver: _summaries(driver, BACKWARD[driver]) or "no backward pass",
    "whose modules are places of ops": lambda driver: _summaries(driver, MODULES[driver]),
    "whether native code runs routines": _native,
    "[capabilities](limitations.md#by-meaning) that it lacks": _lacking,
    "lines": _size,
}
"""By a question, the function that answers it for a driver."""

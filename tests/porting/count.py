"""Count the tools of a checkout of the paper's Amanda that run here with a change of imports alone.

    python tests/porting/count.py CHECKOUT [--only NAME] [--least 0.9]

Each class that derives from a Tool, in Python files, notebooks and Markdown files, is imported, made and
applied to a small model of each framework that its file names.  Nothing of its code changes but where imports
lead: `IMPORTS`.  An import that nothing here serves is left out: a tool that uses the name does not run, and
the table has the name.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import amanda

IMPORTS = {"tensorflow": "tensorflow.compat.v1", "amanda.io.file": "_files", "amanda.event": "amanda"}
"""Where an import of the checkout leads: from the name that it gives to the module that it gets."""
FAULTS = {
    r"store_tensor_to_file_op.so": "needs a library of its own build",
    r"compute_mask\(\) missing 1 required positional argument": "forgets an argument",
    r"reads 'backward_type' of a context": "reads a key that its rules write for two ops alone",
    r"Op.__init__\(\) got an unexpected keyword argument 'input_ops'": "its class Op has no such argument",
}
"""Errors that a tool has with the original, too, and the fault in words."""
TRIGGERED = {"on_op_call", "after_op_call", "on_backward_op_call", "after_backward_op_call"}
"""Events that a scope of the original triggers, in `conversion/pytorch_updater.py` and `conversion/tf.py`.

Others are left from an earlier interface; `amanda.adapter.apply(model, tool)` triggers some of them.
"""
RUNS, PACKAGE, NAME, FAULT, NOTHING, ERROR = (
    "runs", "missing package", "no counterpart", "fault of the original", "did nothing", "error",
)  # fmt: skip
OUTCOMES = (RUNS, PACKAGE, NAME, FAULT, NOTHING, ERROR)
CANNOT = {PACKAGE, FAULT}
"""Outcomes of tools that are not among those that can run."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A class of a tool: its file, its statements before it, and the frameworks to run it with."""

    name: str
    path: Path
    line: int
    statements: tuple[ast.stmt, ...]
    """Of a notebook, a Markdown file or a function: what to run to have the class; else empty."""
    frameworks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a tool with one framework."""

    found: Found
    framework: str
    kind: str
    why: str


class Unserved(Exception):
    """A tool uses a name that an import should have bound."""


class Absent:
    """A module, or a name of one, that nothing here serves; only modules that load may use it."""

    importing = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._use(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._use(self._name)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def _use(self, name: str) -> Absent:
        if not Absent.importing:
            raise Unserved(name)
        return Absent(name)


class Partial(types.ModuleType):
    """A module with `Absent` in place of names that it lacks."""

    def __init__(self, module: types.ModuleType, name: str) -> None:
        super().__init__(name)
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.module, name)
        except (AttributeError, ImportError):
            if name.startswith("__"):
                raise
            return Absent(f"{self.__name__}.{name}")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Let absent names be used, as decorators and annotations of a module do while it loads."""
    Absent.importing += 1
    try:
        yield
    finally:
        Absent.importing -= 1


def ensure_dir(path: str, is_file: bool = True) -> str:
    """Make the folder of a file, or a folder, and return the path, as `amanda.io.file` had it."""
    folder = Path(path).parent if is_file else Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return path


def files() -> types.ModuleType:
    """Return the module that takes the place of `amanda.io.file`."""
    module = types.ModuleType("_files")
    module.__dict__.update(ensure_dir=ensure_dir, root_dir=Path.cwd)
    return module


def port_import(
    name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
) -> Any:
    """Import for a module of a checkout, as `builtins.__import__`."""
    fromlist = fromlist or ()
    package = (globals or {}).get("__package__") or ""
    target = (
        IMPORTS.get(name, name) if not level else importlib.util.resolve_name("." * level + name, package)
    )
    module = _module(target)
    if module is None:
        return amanda if name.startswith("amanda.") and not fromlist else Absent(name)
    if "*" in fromlist:
        return module
    for member in fromlist:
        if _is_of_checkout(target) and not hasattr(module, member):
            _module(f"{target}.{member}")
    if fromlist or target != name:
        return Partial(module, name)
    return Partial(sys.modules[name.partition(".")[0]], name.partition(".")[0])


def _module(name: str) -> types.ModuleType | None:
    """Return a module; None if there is none, or if one of another distribution cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if is_missing or not _is_of_checkout(name):
            return None
        raise


def _is_of_checkout(name: str) -> bool:
    finders = [one for one in sys.meta_path if isinstance(one, CheckoutFinder)]
    return any(one.find_spec(name.partition(".")[0]) for one in finders)


class CheckoutLoader(importlib.machinery.SourceFileLoader):
    """Loads a file of a checkout, whose imports go through `port_import`."""

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": port_import}
        with loading():
            super().exec_module(module)


class CheckoutFinder(importlib.abc.MetaPathFinder):
    """Finds packages under the checkout's roots, except the original itself."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [str(root) for root in roots]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "amanda":
            return None
        loaders = (CheckoutLoader, importlib.machinery.SOURCE_SUFFIXES)
        for folder in self.roots if path is None else path:
            if any(Path(folder).is_relative_to(root) for root in self.roots):
                spec = importlib.machinery.FileFinder(str(folder), loaders).find_spec(name)
                if spec is not None and (spec.loader is not None or path is not None):
                    return spec
        return None


def find_tools(checkout: Path) -> list[Found]:
    """Return the tools of Python files, notebooks and Markdown files, in the order of their paths."""
    found = []
    for path in sorted(checkout.rglob("*")):
        if path.suffix not in _READERS or ".git" in path.parts:
            continue
        text = _READERS[path.suffix](path)
        if "Tool)" in text:
            with contextlib.suppress(SyntaxError):
                found += _tools_of(path, checkout, text)
    return found


def _tools_of(path: Path, checkout: Path, text: str) -> Iterator[Found]:
    module = ast.parse(text)
    inner = {id(node) for node in module.body} if path.suffix == ".py" else set()
    for node in ast.walk(module):
        if not isinstance(node, ast.ClassDef) or not any(map(_is_tool, node.bases)):
            continue
        if path.match("amanda/tools/*.py") and hasattr(_module(f"amanda.tools.{path.stem}"), node.name):
            continue  # Amanda has this one itself
        statements = () if id(node) in inner else (*_before(module, node), node)
        place = f"{path.relative_to(checkout)} {ast.unparse(node)}"
        yield Found(node.name, path, node.lineno, statements, _frameworks(place, text))


def _is_tool(base: ast.expr) -> bool:
    return ast.unparse(base) in ("Tool", "amanda.Tool", "amanda.tool.Tool")


def _before(module: ast.Module, tool: ast.ClassDef) -> Iterator[ast.stmt]:
    """Yield the statements before a class that bind names without running a model."""
    named = {node.id for node in ast.walk(tool) if isinstance(node, ast.Name)}
    for node in module.body:
        if node.lineno >= tool.lineno or node.end_lineno >= tool.lineno:  # type: ignore[operator]
            return
        binds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
        is_named = isinstance(node, ast.Assign) and named & {ast.unparse(one) for one in node.targets}
        if isinstance(node, binds) or is_named:
            yield node


def _frameworks(place: str, text: str) -> tuple[str, ...]:
    """Return the frameworks that a class asks for, or else its path, code or file names; else PyTorch."""
    path, _, code = place.partition(" ")
    asked = re.findall(r"namespace='(?:amanda/)?(pytorch|tensorflow)'", code)
    words = {"torch": r"pytorch|torch|__name__", "tensorflow": r"tensorflow|\btf\b|_tf|\bop\.(type|name)\b"}
    for source in (" ".join(asked), path, code, text):
        named = tuple(name for name, pattern in words.items() if re.search(pattern, source))
        if named:
            return named
    return ("torch",)


def _code_of_notebook(path: Path) -> str:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
    return "\n".join("" if line.lstrip()[:1] in "!%" and line.strip() else line for line in lines)


def _code_of_page(path: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL))


def _code_of_file(path: Path) -> str:
    return path.read_text(errors="replace")


_READERS: dict[str, Callable[[Path], str]] = {
    ".py": _code_of_file, ".ipynb": _code_of_notebook, ".md": _code_of_page,
}  # fmt: skip


def load(found: Found, roots: Sequence[Path]) -> type[amanda.Tool]:
    """Return the class of a tool."""
    if found.path.suffix == ".py":
        root = max((one for one in roots if found.path.is_relative_to(one)), key=lambda one: len(str(one)))
        name = ".".join(found.path.relative_to(root).with_suffix("").parts)
        if name.startswith("amanda."):  # ours has that name: the file is loaded by itself
            name = f"_original.{name}"
            module = sys.modules.get(name) or _module_of(name, found.path)
        else:
            module = importlib.import_module(name)
        names = module.__dict__
    else:
        names = {"__name__": found.path.stem, "__builtins__": {**vars(builtins), "__import__": port_import}}
    if found.statements:
        code = ast.Module([*found.statements], [])
        with loading():
            exec(compile(code, str(found.path), "exec"), names)
    return names[found.name]  # type: ignore[no-any-return]


def _module_of(name: str, path: Path) -> types.ModuleType:
    loader = CheckoutLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def make(kind: type[amanda.Tool], framework: str) -> tuple[amanda.Tool, dict[str, int]]:
    """Make a tool that counts its analyses and the runs of its routines."""
    counts = {"registered": 0, "analyses": 0, "actions": 0, "runs": 0}

    def add_inst_for_op(self: Any, callback: Any, *args: Any, **kwargs: Any) -> None:
        counts["registered"] += 1
        counted = _counted(callback, counts, "analyses")
        super(counting, self).add_inst_for_op(counted, *args, **kwargs)  # type: ignore[misc]

    def wrap(context: amanda.OpContext, action: Any, routine: Any) -> Any:
        counts["actions"] += 1
        return _counted(routine, counts, "runs")

    counting = type(kind.__name__, (kind,), {"add_inst_for_op": add_inst_for_op})
    given = {
        name: _ARGUMENTS[name](framework)
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name in _ARGUMENTS and (parameter.default is parameter.empty or name == "namespace")
    }
    tool = counting(**given)
    tool.wrap_routines(wrap)
    return tool, counts


def _counted(function: Callable[..., Any], counts: dict[str, int], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return counted


def _zeros(tensor: Any) -> Any:
    return tensor * 0


_ARGUMENTS: dict[str, Callable[[str], Any]] = {
    "namespace": lambda framework: "pytorch" if framework == "torch" else framework,
    "op_name": lambda framework: "conv2d" if framework == "torch" else "Conv2D",
    "backward_op_name": lambda framework: "Conv" if framework == "torch" else "Conv2DBackpropFilter",
    "store_dir": lambda framework: Path("store"),
    "filter_fn": lambda framework: lambda *given: "relu" in str(given[0]),
    "modify_fn": lambda framework: _zeros,
}
"""Values for the arguments of tools, by name."""
BEFORE = ("init_masks",)
"""Methods that a tool may have, to be called before the model runs."""
AFTER: dict[str, tuple[Any, ...]] = {"export_chrome_trace": ("trace.json",)}
"""Methods that a tool may have, to be called once the model has run, and their arguments."""


def run_torch(tool: amanda.Tool) -> None:
    """Run a residual block and a classifier, forward and backward."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    stem, block = (
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
    )
    head = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 8))
    with amanda.tool.apply(tool):
        x = torch.relu(stem(torch.rand(2, 4, 8, 8)))
        loss = head(block(x) + x).sum()
        loss.backward()
        _finish(tool)
    assert loss.isfinite()


def run_tensorflow(tool: amanda.Tool, use_resource: bool = True) -> None:
    """Run two convolutions and a classifier in a session, and their gradients.

    use_resource: False for variables of TensorFlow 1, which are references.
    """
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default() as graph, amanda.tool.apply(tool), tf.Session(graph=graph) as session:
        variable = functools.partial(tf.get_variable, use_resource=use_resource)
        x = tf.random.uniform([2, 8, 8, 4])
        y = tf.nn.relu(tf.nn.conv2d(x, variable("stem", [3, 3, 4, 8]), 1, "SAME"))
        y = tf.nn.max_pool2d(y + tf.nn.conv2d(y, variable("block", [3, 3, 8, 8]), 1, "SAME"), 2, 2, "SAME")
        loss = tf.reduce_sum(tf.matmul(tf.reshape(y, [2, 128]), variable("head", [128, 8])))
        session.run(tf.global_variables_initializer())
        session.run(loss)
        session.run([loss, *tf.gradients(loss, tf.trainable_variables())])
        _finish(tool)


def run_sum(tool: amanda.Tool) -> None:
    """Run a sum of constants, for tools that change the value of every op."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default() as graph, amanda.tool.apply(tool), tf.Session(graph=graph) as session:
        session.run(tf.constant([1, 2, 3, 4]) + tf.constant([1, 2, 3, 4]))


def _finish(tool: amanda.Tool) -> None:
    for name, args in AFTER.items():
        if hasattr(tool, name):
            getattr(tool, name)(*args)


MODELS = {"torch": run_torch, "tensorflow": run_tensorflow}
OTHERS = {
    "HookGraphTool": run_sum,  # adds 100 to every value, on the model of its own test
    "EffectivePathTool": functools.partial(run_tensorflow, use_resource=False),  # leaves out references alone
}
"""Models of tools that are written for another."""


def outcome(found: Found, framework: str, roots: Sequence[Path], verbose: bool) -> Outcome:
    """Import, make and apply a tool, and say what came of it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            tool, counts = make(load(found, roots), framework)
            for name in BEFORE:
                if hasattr(tool, name):
                    getattr(tool, name)()
            OTHERS.get(found.name, MODELS[framework])(tool)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return Outcome(found, framework, *_reason(error, found))
    if not counts["registered"]:
        return Outcome(found, framework, FAULT, "registers no routine")
    did = f"{counts['analyses']} analyses, {counts['actions']} actions, {counts['runs']} runs of routines"
    is_idle = any(counts[one] and not counts[next_one] for one, next_one in _STEPS)
    return Outcome(found, framework, NOTHING if is_idle else RUNS, did)


_STEPS = (("registered", "analyses"), ("actions", "runs"))
"""Numbers of which the second has to be something if the first is."""


def _reason(error: BaseException, found: Found) -> tuple[str, str]:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    absent = next((one for one in chain if isinstance(one, Unserved)), None)
    if absent is not None:
        return (NAME if str(absent).startswith("amanda") else PACKAGE), str(absent)
    said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    for one in chain:
        fault = next((words for pattern, words in FAULTS.items() if re.search(pattern, str(one))), None)
        if fault is not None:
            return FAULT, fault
        if isinstance(one, AttributeError) and "'register_event'" in str(one):
            idle = _events_of(found) - TRIGGERED
            if idle:
                return FAULT, f"{', '.join(sorted(idle))}: no scope of the original triggers it"
            return NAME, "Tool.register_event"
    return ERROR, said


def _events_of(found: Found) -> set[str]:
    """Return the names of the events that a class registers for."""
    classes = [
        node
        for node in ast.walk(ast.parse(_READERS[found.path.suffix](found.path)))
        if isinstance(node, ast.ClassDef)
    ]
    (kind,) = (node for node in classes if (node.name, node.lineno) == (found.name, found.line))
    calls = [
        node
        for node in ast.walk(kind)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_event"
    ]
    return {ast.unparse(call.args[0]).rpartition(".")[2] for call in calls}


def roots_of(checkout: Path) -> list[Path]:
    """Return the folders from which the checkout's packages are imported."""
    return [checkout, checkout / "src", checkout / "examples" / "apex"]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Print a line for each tool and framework, and the count; return 1 where too few run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--least", type=float, default=0.0, help="share of those that can run that has to run"
    )
    parser.add_argument("--only", default="", help="part of the path or name of the tools to run")
    parser.add_argument("--verbose", action="store_true", help="print tracebacks")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    roots = roots_of(checkout)
    sys.modules["_files"] = files()
    sys.meta_path.insert(0, CheckoutFinder(roots))
    results = []
    for found in find_tools(checkout):
        place = f"{found.path.relative_to(checkout)}:{found.line}"
        if options.only not in f"{place} {found.name}":
            continue
        for framework in found.frameworks:
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                one = outcome(found, framework, roots, options.verbose)
                os.chdir(checkout)
            results.append(one)
            _say(f"{one.kind:<22} {found.name:<24} {framework:<11} {place}\n{'':<22} {one.why}")
    able = [one for one in results if one.kind not in CANNOT]
    running = [one for one in able if one.kind == RUNS]
    for kind in OUTCOMES:
        _say(f"{sum(one.kind == kind for one in results):>3} {kind}")
    _say(f"{len(running)} of {len(able)} tools that can run do run ({len(results)} in all)")
    return int(len(running) < options.least * len(able))


if __name__ == "__main__":
    sys.exit(main())

"""Points of modules: identity ops through which modules pass what they are given and what they return.

Amanda instruments ops, and a module is none.  While a tool watches, each module that may be selected calls
an identity op on each tensor, inside of its own call, so that the op belongs to the module in eager mode and
in graphs that are traced meanwhile.  Rules write `point`, the side and the index, into contexts of these ops.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

import amanda
from amanda import interceptor
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.mapping import MappingTool

_REQUIRED = RequiredNames("amanda.tools.patch", "torch", "torch._dynamo.eval_frame:skip_code")

Side = Literal["input", "output"]
SIDES: tuple[Side, Side] = ("input", "output")
NOT_A_POINT = (
    "; modules of PyTorch and Keras 3 are points, in functions that are traced in the scope: for others give "
    "the type of ops"
)
BY_KEYWORD = (
    "; a module's inputs are the tensors that its call gives by position, and this call gives them by "
    "keyword: select the output of what makes them, or give the type of an op in the module"
)
_NAME = re.compile(r"amanda_(input|output)_(\d+)(_\d+)?$")
_WRAPPERS = frozenset(
    {"OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel",
     "CheckpointWrapper", "OffloadWrapper", "AveragedModel", "DeepSpeedEngine", "PeftModel", "BaseTuner"}
)  # fmt: skip
"""Classes of PyTorch's modules that return what the module in them returns, and have its path."""
_WRAPPED = frozenset(
    {"", "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "model"}
)  # fmt: skip
"""Ends of paths that the path of a module in a wrapper lacks."""


def point_rules() -> MappingTool:
    """Return rules that write two keys.

    point: side and index of a point of a module, None at other ops.
    reaches_values: whether a gradient reaches what a differentiable routine holds.
    """
    return MappingTool([["*", _any], ["pytorch", _pytorch], ["tensorflow", _tensorflow]])


def copied(tensor: Any) -> Any:
    """Return a copy that later writes into a tensor do not change; it takes part in autodiff."""
    if hasattr(tensor, "clone"):
        return tensor.clone()
    return tensor.copy() if hasattr(tensor, "flags") else tensor  # NumPy's; others are never written into


def requires_gradient(value: Any) -> bool:
    """Return True for a tensor or a variable that is trained."""
    return bool(getattr(value, "requires_grad", getattr(value, "trainable", False)))


def _any(context: amanda.OpContext) -> None:
    context["point"], context["reaches_values"] = None, True


def _pytorch(context: amanda.OpContext) -> None:
    if context.get_op_type() in ("amanda_tools::point", "amanda_tools::copied_point"):
        attributes = context.get_attrs()
        context["point"] = SIDES[attributes["side"]], attributes["index"]


def _tensorflow(context: amanda.OpContext) -> None:
    context["reaches_values"] = context.is_eager()
    if context.get_op_type() == "Identity":
        found = _NAME.search(getattr(context.get_op(), "name", None) or "")
        context["point"] = (found[1], int(found[2])) if found else _present.point


class Points:
    """The points at one side of modules, made while at least one tool watches."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self._lock, self._stack = threading.Lock(), ExitStack()
        self._watched: list[tuple[Collection[str], bool]] = []
        self._wanted: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self.by_keyword: set[str] = set()
        """Paths of modules whose calls gave no tensor by position."""

    @property
    def copies(self) -> bool:
        """True if a value may be changed: points give copies then, and views of the value else."""
        return any(changes for _, changes in self._watched)

    def open(self, ends: Collection[str], changes: bool) -> None:
        """Watch modules, by patterns of the last parts of their paths."""
        with self._lock:
            if not self._watched:
                self.by_keyword.clear()
                with ExitStack() as stack:
                    for framework, watch in _WATCHED.items():
                        if framework in sys.modules:
                            watch(stack, self)
                    self._stack = stack.pop_all()
            self._watched.append((ends, changes))
            self._wanted.clear()

    def close(self, ends: Collection[str], changes: bool) -> None:
        """Watch the modules of one call of `open` no more."""
        with self._lock:
            self._watched.remove((ends, changes))
            self._wanted.clear()
            if not self._watched:
                self._stack.close()

    def wants(self, module: Any) -> bool:
        """Return whether the call under way, of a module of PyTorch, has points."""
        if interceptor.active() is None:
            return False
        found = self._wanted.get(module)
        if found is None:
            ends = {path.rpartition(".")[2] for path in _paths(module)}
            patterns = [one for ends, _ in self._watched for one in ends]
            found = (
                not ends
                or not ends.isdisjoint(_WRAPPED)
                or any(fnmatchcase(end, one) for end in ends for one in patterns)
            )
            self._wanted[module] = found
        return found


def _paths(module: Any) -> list[str]:
    """Return the paths of a module of PyTorch in the model that is being called."""
    root = next(iter(interceptor.subjects()), module)
    return [path for path, one in root.named_modules(remove_duplicate=False) if one is module]


class _Present(threading.local):
    point: tuple[Side, int] | None = None


_present = _Present()


def _passed(value: Any, kind: Any, point: Callable[[Any, int], Any], count: list[int]) -> Any:
    """Return a value with each tensor in it passed through a point; count: of tensors so far, in a list."""
    if isinstance(value, kind):
        count[0] += 1
        return point(value, count[0] - 1)
    if isinstance(value, (list, tuple)):
        values = []
        for one in value:  # no comprehension: a compiler would take the comprehension for a function
            values.append(_passed(one, kind, point, count))
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        made = {}
        for key, one in value.items():
            made[key] = _passed(one, kind, point, count)
        return made if type(value) is dict else type(value)(**made)  # an output of transformers
    return value


def _watch_pytorch(stack: ExitStack, points: Points) -> None:
    """Put hooks on all modules, which the compiler traces too; there every module has points."""
    import torch
    from torch.nn.modules import module as modules

    (point_op, copied_op), number = _pytorch_ops(), SIDES.index(points.side)
    compiling, wrappers = torch.compiler.is_compiling, tuple(_heirs(torch.nn.Module))

    def point(tensor: Any, index: int) -> Any:
        return copied_op(tensor, index, number) if points.copies else point_op(tensor, index, number)

    def passed(module: Any, value: Any) -> Any:
        return None if isinstance(module, wrappers) else _passed(value, torch.Tensor, point, [0])

    def passed_by_python(module: Any, value: Any) -> Any:
        if not points.wants(module):
            return None
        if points.side == "input" and not any(isinstance(one, torch.Tensor) for one in leaves(value)):
            points.by_keyword.update(_paths(module))
        return passed(module, value)

    def given(module: Any, args: Any) -> Any:
        return passed(module, args) if compiling() else by_python(module, args)

    def returned(module: Any, args: Any, result: Any) -> Any:
        return passed(module, result) if compiling() else by_python(module, result)

    by_python = passed_by_python
    if "torch._dynamo" in sys.modules:  # it takes seconds to import
        _REQUIRED.check()
        dynamo = sys.modules["torch._dynamo"]
        # Around a graph Python calls hooks, of whose frames a compiler with fullgraph=True would raise.
        by_python = dynamo.disable(passed_by_python)
        for function in (given, returned, passed, point, _passed):  # compiled as parts of graphs, never alone
            dynamo.eval_frame.skip_code(function.__code__)
    stack.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
    register = modules.register_module_forward_hook if number else modules.register_module_forward_pre_hook
    stack.callback(register(returned if number else given).remove)


@cache
def _pytorch_ops() -> tuple[Any, Any]:
    """Return the op that gives a view, and the one that gives a copy."""
    import torch

    make: Any = torch.library.Library
    library = make("amanda_tools", "FRAGMENT")
    library.define("point(Tensor(a) x, int index, int side) -> Tensor(a)")
    library.impl("point", lambda x, index, side: torch.ops.aten.alias(x), "CompositeImplicitAutograd")
    library.define("copied_point(Tensor x, int index, int side) -> Tensor")
    library.impl("copied_point", lambda x, index, side: x.clone(), "CompositeImplicitAutograd")
    ops = torch.ops.amanda_tools.point.default, torch.ops.amanda_tools.copied_point.default
    _libraries.append(library)  # which would take the ops along
    return ops


_libraries: list[Any] = []


def _heirs(kind: type) -> list[type]:
    heirs: list[type] = type.__subclasses__(kind)
    below = [one for heir in heirs for one in (heir, *_heirs(heir))]
    return [one for one in below if one.__name__ in _WRAPPERS]


def _watch_keras(stack: ExitStack, points: Points) -> None:
    """Wrap the call of layers inside of name scopes; a function that was traced before has no points."""
    import tensorflow as tf
    from keras.src.layers.layer import Layer
    from keras.src.ops.operation import Operation

    side = points.side

    def point(tensor: Any, index: int) -> Any:
        before, _present.point = _present.point, (side, index)
        try:
            return tf.identity(tensor, name=f"amanda_{side}_{index}")
        finally:
            _present.point = before

    original = Operation.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Layer) or interceptor.active() is None:
            return original(self, *args, **kwargs)
        if side == "input":
            return original(self, *_passed(args, tf.Tensor, point, [0]), **kwargs)
        return _passed(original(self, *args, **kwargs), tf.Tensor, point, [0])

    Operation.__call__ = __call__
    stack.callback(setattr, Operation, "__call__", original)


_WATCHED: Mapping[str, Callable[[ExitStack, Points], None]] = {
    "torch": _watch_pytorch, "keras.src.layers.layer": _watch_keras,
}  # fmt: skip
"""By the module that is imported where there is something to watch."""
POINTS: Mapping[Side, Points] = {side: Points(side) for side in SIDES}

"""Points of modules: identity ops through which modules pass their inputs and outputs.

Amanda instruments ops, and a module is not an op.  While a tool watches, each module that
may be selected calls an identity op on each tensor, inside of its own call, so that the op belongs to the
module in eager mode and in graphs that are traced meanwhile.  Rules write `point`, the side and the index,
into contexts of these ops.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import amanda
from amanda import interceptor
from amanda.backend import when_imported
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.mapping import MappingTool

_REQUIRED = RequiredNames("amanda.tools.patch", "torch", "torch._dynamo.eval_frame:skip_code")
_REQUIRED_OF_KERAS = RequiredNames("amanda.tools.patch", "keras", "keras.src.backend.config:backend")

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
_POINT_NAME = re.compile(r"amanda_(input|output)_(\d+)(_\d+)?$")
# A point in the wrapper as well would change the value twice.
_WRAPPER_CLASSES = frozenset(
    {"OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel",
     "CheckpointWrapper", "OffloadWrapper", "AveragedModel", "DeepSpeedEngine", "PeftModel", "BaseTuner"}
)  # fmt: skip
"""Classes of PyTorch's modules that return what the module in them returns, and have its path."""
_ENDS_IN_WRAPPERS = frozenset(
    {"", "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "model"}
)  # fmt: skip
"""Ends of paths that the path of a module in a wrapper lacks."""


def point_rules() -> MappingTool:
    """Return rules that write three keys.

    point: side and index of a point of a module, None at other ops.
    reaches_values: whether a gradient reaches what a differentiable routine holds.
    may_return_lists: whether an output of an op may be a list of tensors.
    """
    pytorch, tensorflow = _write_pytorch_point, _write_tensorflow_point
    return MappingTool([["*", _write_defaults], ["pytorch", pytorch], ["tensorflow", tensorflow]])


def copied(tensor: Any) -> Any:
    """Return a copy that later writes into a tensor do not change, in autodiff; an immutable one itself."""
    # `clone` of PyTorch has a gradient; an array of NumPy has `copy`.
    if hasattr(tensor, "clone"):
        return tensor.clone()
    return tensor.copy() if hasattr(tensor, "flags") else tensor  # such as an array of JAX


def requires_gradient(value: Any) -> bool:
    """Return True for a tensor or a variable that is trained."""
    return bool(getattr(value, "requires_grad", getattr(value, "trainable", False)))


def _write_defaults(context: amanda.OpContext) -> None:
    """Write that an op is not a point, that gradients reach values of the tool, and that outputs are flat."""
    context["point"], context["reaches_values"], context["may_return_lists"] = None, True, False


def _write_pytorch_point(context: amanda.OpContext) -> None:
    """Write side and index of the point that an op of this package is."""
    if context.get_forward_op_type() in ("amanda_tools::point", "amanda_tools::copied_point"):
        attributes = context.get_attrs()
        context["point"] = SIDES[attributes["side"]], attributes["index"]


def _write_tensorflow_point(context: amanda.OpContext) -> None:
    """Write the point that an Identity is, by its name in a graph, in eager mode by the point under way.

    Also writes `reaches_values`, which is False in graphs, and `may_return_lists`, for ops such as Split.
    """
    context["reaches_values"], context["may_return_lists"] = context.is_eager(), True
    if context.get_forward_op_type() == "Identity":
        match = _POINT_NAME.search(getattr(context.get_op(), "name", None) or "")
        context["point"] = (match[1], int(match[2])) if match else _point_under_way.point


class Points:
    """The points at one side of modules, which exist while at least one tool watches.

    A tool watches modules by patterns of the last parts of their paths, and says if it may change values.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self._lock = threading.Lock()
        self._hooks = ExitStack()  # removes the hooks of all frameworks when it closes
        self._watches: list[tuple[Collection[str], bool]] = []  # (end patterns, may change) of each tool
        # Weak: a module must not live on because a tool once watched it.
        self._has_points_by_module: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self.by_keyword: set[str] = set()
        """Paths of modules whose calls gave no tensor by position."""

    @property
    def copies(self) -> bool:
        """True if a tool may change values: points then return copies, otherwise views."""
        return any(may_change for _, may_change in self._watches)

    def open(self, end_patterns: Collection[str], may_change: bool) -> None:
        """Watch modules for a tool; for the first one register the hooks of all frameworks.

        A framework that is not imported gets hooks at its import.  The first one also clears `by_keyword`.
        """
        with self._lock:
            # Hooks are global: there is one set for all tools, while at least one watches.
            if not self._watches:
                self.by_keyword.clear()
                self._hooks = hooks = ExitStack()
                with ExitStack() as on_failure:
                    on_failure.push(hooks)
                    for framework, watch in _WATCH_FUNCTIONS.items():
                        # A program may import its framework in the scope, as under `amanda run`.
                        cancel = when_imported(framework, partial(watch, hooks, self))
                        hooks.callback(cancel)
                    # Only now: if one framework's hooks fail, those registered before are removed again.
                    on_failure.pop_all()
            self._watches.append((end_patterns, may_change))
            self._has_points_by_module.clear()

    def close(self, end_patterns: Collection[str], may_change: bool) -> None:
        """End a watch that `open` began with equal arguments; remove the hooks with the last one."""
        with self._lock:
            self._watches.remove((end_patterns, may_change))
            self._has_points_by_module.clear()
            if not self._watches:
                self._hooks.close()

    def has_points(self, module: Any) -> bool:
        """Return True if calls of a PyTorch module have points now: a tool in force may select the module."""
        # Outside of scopes, and while instrumentation is off, modules run as they are.
        if interceptor.active() is None:
            return False
        has_points = self._has_points_by_module.get(module)
        if has_points is None:
            has_points = self._has_points_by_module[module] = self._may_be_selected(module)
        return has_points

    def _may_be_selected(self, module: Any) -> bool:
        """Return True if the end of one of a module's paths fits a pattern, or does not tell."""
        # Only the last part of a path is tested here, cheaply; the tool tests whole paths at analysis.
        ends = {path.rpartition(".")[2] for path in _paths(module)}
        patterns = [pattern for end_patterns, _ in self._watches for pattern in end_patterns]
        return (
            not ends
            # The wrapped module is selected by the wrapper's path, which has another end.
            or not ends.isdisjoint(_ENDS_IN_WRAPPERS)
            or any(fnmatchcase(end, pattern) for end in ends for pattern in patterns)
        )


def _paths(module: Any) -> list[str]:
    """Return the paths of a module of PyTorch in the model that is being called; [""] outside of a call."""
    # The outermost module that is being called: paths are relative to it.
    root = next(iter(interceptor.subjects()), module)
    return [path for path, submodule in root.named_modules(remove_duplicate=False) if submodule is module]


class _CurrentPoint(threading.local):
    """The point whose identity op a thread is calling; None between such calls."""

    point: tuple[Side, int] | None = None


_point_under_way = _CurrentPoint()


def _pass_through(
    value: Any, tensor_class: Any, point: Callable[[Any, int], Any], next_index: list[int]
) -> Any:
    """Return a value with each tensor in it passed through a point; lists, tuples and dicts are made anew.

    next_index: of the next tensor, the one element of a list, which nested calls count up.
    """
    if isinstance(value, tensor_class):
        next_index[0] += 1
        return point(value, next_index[0] - 1)
    if isinstance(value, (list, tuple)):
        values = []
        for item in value:  # no comprehension: a compiler would take the comprehension for a function
            values.append(_pass_through(item, tensor_class, point, next_index))
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        items = {}
        for key, item in value.items():
            items[key] = _pass_through(item, tensor_class, point, next_index)
        return items if type(value) is dict else type(value)(**items)  # an output of transformers
    return value


def _watch_pytorch(hooks: ExitStack, points: Points) -> None:
    """Register hooks on all modules that pass a call's inputs, or its result, through points.

    In code that the compiler traces every module but wrappers has points, elsewhere those that tools may
    select; `points.by_keyword` gets the paths of calls without a tensor by position.  Until `hooks` closes,
    which removes the hooks, the compiler's warning of such hooks is ignored.
    """
    import torch
    from torch.nn.modules import module as modules

    view_op, copy_op = _pytorch_ops()
    side_number = SIDES.index(points.side)
    is_compiling, wrappers = torch.compiler.is_compiling, tuple(_wrapper_classes(torch.nn.Module))

    # The functions below return None, as hooks do, to leave a value as it is.

    def point(tensor: Any, index: int) -> Any:
        return copy_op(tensor, index, side_number) if points.copies else view_op(tensor, index, side_number)

    def pass_tensors(module: Any, value: Any) -> Any:
        """Return the value passed through points; None for a module that only wraps another."""
        return (
            None
            if isinstance(module, wrappers)
            else _pass_through(value, torch.Tensor, point, next_index=[0])
        )

    def pass_in_python(module: Any, value: Any) -> Any:
        """Return the value passed through points, and note a call without inputs by position.

        None for a module without points.
        """
        if not points.has_points(module):
            return None
        # A hook sees no keyword arguments: the inputs of such a call have no points.
        if points.side == "input" and not any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
            points.by_keyword.update(_paths(module))
        return pass_tensors(module, value)

    python_hook = pass_in_python

    def pre_hook(module: Any, args: Any) -> Any:
        return pass_tensors(module, args) if is_compiling() else python_hook(module, args)

    def forward_hook(module: Any, args: Any, result: Any) -> Any:
        return pass_tensors(module, result) if is_compiling() else python_hook(module, result)

    if "torch._dynamo" in sys.modules:  # it takes seconds to import
        _REQUIRED.check()
        dynamo = sys.modules["torch._dynamo"]
        # Around a graph Python calls hooks, of whose frames a compiler with fullgraph=True would raise.
        python_hook = dynamo.disable(pass_in_python)
        # These are compiled as parts of graphs, never on their own.
        for function in (pre_hook, forward_hook, pass_tensors, point, _pass_through):
            dynamo.eval_frame.skip_code(function.__code__)
    hooks.enter_context(_ignored("Using `torch.compile.module.` when there are global hooks"))
    # Hooks of all modules, not of one: modules that are made later have points as well.
    if points.side == "input":
        handle = modules.register_module_forward_pre_hook(pre_hook)
    else:
        handle = modules.register_module_forward_hook(forward_hook)
    hooks.callback(handle.remove)


@contextmanager
def _ignored(pattern: str) -> Iterator[None]:
    """Ignore warnings that begin as a pattern says, by a filter that is removed at the end.

    `warnings.catch_warnings` would restore all filters, also those that the program sets meanwhile.
    """
    # Not by `filterwarnings`, which takes an equal filter of the program for the same.
    new_filter = ("ignore", re.compile(pattern), UserWarning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, new_filter)
    try:
        yield
    finally:
        filters = warnings.filters  # another list, within a `catch_warnings` of the program
        filters[:] = [other for other in filters if other is not new_filter]


@cache
def _pytorch_ops() -> tuple[Any, Any]:
    """Define the ops that stand for points; return the one that gives a view, and the one that copies."""
    import torch

    library_class: Any = torch.library.Library
    # A fragment, so that a second import of this module may define ops beside the first.
    library = library_class("amanda_tools", "FRAGMENT")
    library.define("point(Tensor(a) x, int index, int side) -> Tensor(a)")
    # Composite: autograd, vmap and compilers see the alias inside, and need no rule for this op.
    library.impl("point", lambda x, index, side: torch.ops.aten.alias(x), "CompositeImplicitAutograd")
    library.define("copied_point(Tensor x, int index, int side) -> Tensor")
    library.impl("copied_point", lambda x, index, side: x.clone(), "CompositeImplicitAutograd")
    ops = torch.ops.amanda_tools.point.default, torch.ops.amanda_tools.copied_point.default
    _libraries.append(library)  # kept, since its end would remove the ops
    return ops


_libraries: list[Any] = []


def _wrapper_classes(kind: type) -> list[type]:
    """Return the subclasses of a class that only wrap a module, at any depth."""
    # By the names of classes, found below Module: the libraries that define them are not imported here.
    subclasses: list[type] = type.__subclasses__(kind)
    descendants = [cls for heir in subclasses for cls in (heir, *_wrapper_classes(heir))]
    return [cls for cls in descendants if cls.__name__ in _WRAPPER_CLASSES]


def _watch_keras(hooks: ExitStack, points: Points) -> None:
    """Wrap the call of layers inside of name scopes; a function that was traced before has no points.

    In a scope every layer has points.  Closing `hooks` restores the call.  Does nothing for layers of another
    framework than TensorFlow: on PyTorch they are modules.
    """
    _REQUIRED_OF_KERAS.check()
    from keras.src.backend.config import backend

    if backend() != "tensorflow":
        return
    import tensorflow as tf
    from keras.src.layers.layer import Layer
    from keras.src.ops.operation import Operation

    side = points.side

    def point(tensor: Any, index: int) -> Any:
        """Return an Identity of a tensor, which a rule takes for the point."""
        # In eager mode an op has no name: the point under way is noted for the rule.
        outer_point, _point_under_way.point = _point_under_way.point, (side, index)
        try:
            return tf.identity(tensor, name=f"amanda_{side}_{index}")
        finally:
            _point_under_way.point = outer_point

    # The class's call, since Keras has no hook for all layers.
    original = Operation.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a layer with its inputs and result, as sides are watched, passed through points."""
        if not isinstance(self, Layer) or interceptor.active() is None:
            return original(self, *args, **kwargs)
        if "input" in _keras_points:
            args = _pass_through(args, tf.Tensor, _keras_points["input"], next_index=[0])
        result = original(self, *args, **kwargs)
        if "output" in _keras_points:
            result = _pass_through(result, tf.Tensor, _keras_points["output"], next_index=[0])
        return result

    def stop_watching() -> None:
        """Remove the points of this side, and with the last side's the wrapper of the call."""
        del _keras_points[side]
        if not _keras_points:
            _keras_hooks.close()

    # One wrapper for both sides: the side that was watched first may be the first that ends.
    if not _keras_points:
        Operation.__call__ = __call__
        _keras_hooks.callback(setattr, Operation, "__call__", original)
    _keras_points[side] = point
    hooks.callback(stop_watching)


_keras_points: dict[Side, Callable[[Any, int], Any]] = {}
"""By side that is watched, the function that returns a point of a tensor."""
_keras_hooks = ExitStack()


_WATCH_FUNCTIONS: Mapping[str, Callable[[ExitStack, Points], None]] = {
    "torch": _watch_pytorch, "keras.src.layers.layer": _watch_keras,
}  # fmt: skip
"""By the module that is imported where there is something to watch."""
POINTS: Mapping[Side, Points] = {side: Points(side) for side in SIDES}

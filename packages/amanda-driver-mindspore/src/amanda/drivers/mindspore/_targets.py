"""The native callables of MindSpore that are operators, each with the name of its operator.

Python reaches MindSpore's kernels by generated functions (`pyboost_relu`), by generated classes
(`ConcatPrim_`), by objects that pick among overloads (`_add_instance`) and by methods of tensors; what
has none of these goes through the executor by the name of its primitive. Pure-Python functions
(`mint.nn.functional.linear`, `ops.cross_entropy`) are absent: what they call natively is here.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import mindspore._c_expression as native
from amanda.backend import EagerDriver, Operation, Patches
from amanda.interceptor import IMPLEMENTATION, Detour
from mindspore.common._tensor_cpp_method import tensor_cpp_methods
from mindspore.graph import api
from mindspore.ops.auto_generate import gen_ops_prim, pyboost_inner_prim

Kind = Literal["kernel", "overload", "method", "assignment"]


@dataclass(frozen=True, slots=True)
class NativeTarget:
    """A native callable to intercept.

    callable: the callable.  holder, name: the object with the callable, and its attribute.
    kind: "kernel" is called with a primitive and a list of its arguments, "overload" with itself and the
        arguments, "method" with a tensor and the arguments, "assignment" with a tensor and another.
    operator: name of the operator, the same for all its spellings.
    """

    callable: Any
    holder: Any
    name: str
    kind: Kind
    operator: str


SPELLINGS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "pow", "abs", "getitem", "setitem")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul")},
    "__truediv__": "div",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__mod__": "remainder",
    "__imod__": "remainder_",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "le": "less_equal",
    "lt": "less",
    "ge": "greater_equal",
    "gt": "greater",
    "ne": "not_equal",
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "_item": "item",
    "_tolist": "tolist",
    "assign_value_cpp": "assign_value",
}
"""Operators by other names for them."""

UNLISTED_METHODS = (
    "__getitem__", "__setitem__", "_item", "_tolist", "asnumpy", "assign_value_cpp", "to_dlpack",
)  # fmt: skip
"""Methods of tensors that are not operators in MindSpore's lists."""


@cache
def native_targets() -> tuple[NativeTarget, ...]:
    """Return the operators of this version of MindSpore that are native callables, each once."""
    target_by_callable: dict[int, NativeTarget] = {}
    for target in (*_kernel_targets(), *_overload_targets(), *_method_targets()):
        # Several names may lead to one callable, and a callable can have a single stub.
        target_by_callable.setdefault(id(target.callable), target)
    return tuple(target_by_callable.values())


def _kernel_targets() -> Iterator[NativeTarget]:
    """Yield the generated functions, and the calls of generated classes, that call kernels."""
    for name, function in vars(native).items():
        # Python calls these functions as globals of `gen_ops_prim`, so the fallback patches them there.
        if name.startswith("pyboost_"):
            yield NativeTarget(function, gen_ops_prim, name, "kernel", name.removeprefix("pyboost_"))
    for name, primitive in vars(pyboost_inner_prim).items():
        if name.endswith("_impl"):
            # The object may be of a subclass; the generated class defines the call.
            holder = next(kind for kind in type(primitive).__mro__ if kind.__name__.endswith("Prim_"))
            call = vars(holder)["__call__"]
            yield NativeTarget(call.__func__, holder, "__call__", "kernel", name.removesuffix("_impl"))


def _overload_targets() -> Iterator[NativeTarget]:
    """Yield the calls of objects that pick among overloads, such as `_add_instance`."""
    for name, instance in vars(native).items():
        if name.endswith("_instance") and type(instance).__name__.endswith("Functional_"):
            holder = type(instance)
            operator = name.removeprefix("_").removesuffix("_instance")
            call = vars(holder)["__call__"].__func__
            yield NativeTarget(call, holder, "__call__", "overload", SPELLINGS.get(operator, operator))


def _method_targets() -> Iterator[NativeTarget]:
    """Yield the native methods of tensors that this version of MindSpore has."""
    method_by_name = vars(native.TensorPy)
    for name in (*tensor_cpp_methods, *UNLISTED_METHODS):
        if name in method_by_name:
            kind: Kind = "assignment" if name == "assign_value_cpp" else "method"
            yield NativeTarget(method_by_name[name], native.TensorPy, name, kind, SPELLINGS.get(name, name))


NO_OPERATORS = frozenset(
    {"typeof", "Shape", "DType", "Rank", "Size", "TensorShape", "Partial", "Depend", "UpdateState", "Load",
     "hastype", "IsInstance", "isconstant", "make_tuple", "stop_gradient"}
)  # fmt: skip
"""Primitives that read no data of a tensor, or only control autodiff."""


@cache
def operator_of(primitive: str) -> str:
    """Return the operator of a primitive, by the name of its class: "bias_add" for "BiasAdd"."""
    return _operators_by_class().get(primitive) or snake_case(primitive)


@cache
def _operators_by_class() -> dict[str, str]:
    """Return the operator of each generated primitive by its class: "add" by "Add", the class of `add_op`."""
    return {
        type(value).__name__: name.removesuffix("_op")
        for name, value in vars(gen_ops_prim).items()
        if name.endswith("_op") and isinstance(value, gen_ops_prim.Primitive)
    }


def snake_case(name: str) -> str:
    """Convert a name such as `MaxPool3DWithArgmax` to `max_pool3d_with_argmax`."""
    # "3D" stays with the word before it: `max_pool3d`.
    lowered = re.sub(r"(\d)D(?![a-z])", r"\1d", name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", lowered).lower()


def writes_first_input(operator: str) -> bool:
    """Return True if an operator writes into its first input."""
    # "add_" writes in place, as in PyTorch; names with two underscores are special methods.
    has_suffix = operator.endswith("_") and not operator.endswith("__")
    return has_suffix or operator.startswith("inplace_") or operator == "setitem"


RUN_METHODS = ("run_op_async", "real_run_op")


class PrimitiveInterception:
    """Patches of the two methods of the executor that run primitives, with a detour for each primitive."""

    def __init__(self, driver: EagerDriver) -> None:
        self._driver = driver
        self._detours: dict[tuple[str, str], Detour] = {}

    def patch(self, patches: Patches) -> None:
        """Patch the methods until `patches` are restored."""
        for method in RUN_METHODS:
            patches.set(api._PyNativeExecutor, method, self._stand_in(method))

    def _stand_in(self, method: str) -> Callable[..., Any]:
        """Stand-in for a method of the executor: runs operators through their detours."""
        detours, original = self._detours, vars(native.PyNativeExecutor_)[method].__func__

        def run_primitive(executor: Any, primitive: Any, name: str, args: Any) -> Any:
            """Run an operator through its detour, or directly if its name is one of `NO_OPERATORS`."""
            if name in NO_OPERATORS:
                return original(executor._executor, primitive, name, args)
            detour = detours.get((method, name))
            if detour is None:
                detour = detours[method, name] = self._make_detour(original, name)
            return detour(executor._executor, primitive, name, args)

        return run_primitive

    def _make_detour(self, original: Any, name: str) -> Detour:
        operator = operator_of(name)
        # The native method serves all primitives, so it gets no stub; the partial makes a callable for each.
        return Detour(self._driver.site(partial(original), Operation(operator), operator, IMPLEMENTATION))

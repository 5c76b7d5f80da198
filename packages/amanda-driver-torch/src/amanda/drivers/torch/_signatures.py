"""The signatures that a callable of torch accepts, read from the running torch.

A signature is a schema plus what torch's Python argument parser adds to it: the order
of positional arguments (methods put self first, deprecated forms shuffle), and sizes
that may be spread over the call, as in `x.view(2, 3)`.
"""

import inspect
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from ._collectives import COLLECTIVE_METHODS
from ._targets import Target, by_callable


class Argument(NamedTuple):
    """One argument of a schema. type is the schema's element type, "Any" where unknown.

    is_unreturned: whether the op writes the argument, and returns other values than that.
    """

    name: str
    type: str
    is_list: bool = False
    is_optional: bool = False
    is_written: bool = False
    is_unreturned: bool = False
    keyword_only: bool = False
    has_default: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a callable accepts, in schema order.

    positional: the argument that each positional value of a call fills, as an index.
    may_spread_size: whether the elements of the last positional argument may be values of their own.
    """

    arguments: tuple[Argument, ...]
    positional: tuple[int, ...]
    may_spread_size: bool = False

    def index(self, keyword: str) -> int | None:
        """Return the position of the argument that a keyword names, NumPy's spellings included; or None."""
        for name in (keyword, *_SPELLINGS.get(keyword, ())):
            for i, argument in enumerate(self.arguments):
                if argument.name == name:
                    return i
        return None


# torch accepts NumPy's names, and calls `input` what its schemas call `self`.
_SPELLINGS = {
    "input": ("self",), "self": ("input",), "x": ("input", "self"), "a": ("input", "self"),
    "x1": ("input", "self"), "x2": ("other",), "axis": ("dim",), "keepdims": ("keepdim",),
}  # fmt: skip

_LOCAL_NAMESPACE = "amanda::"
"""Namespace of the schemas that this module writes, which do not say what a call returns."""

# Callables whose Python signature is not an ATen schema, by their Python name.
_MOVE = "(Tensor self, Device? device=None, bool non_blocking=False, *, {})"
_LAYOUT = "MemoryFormat? memory_format=None"
_CAST = f"(Tensor self, *, {_LAYOUT})"
_WHERE = "Device? device=None, ScalarType? dtype=None"
_DATA = "ScalarType? dtype=None, Device? device=None, bool requires_grad=False"
PYTHON_SIGNATURES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bfloat16", "byte", "char", "double", "cdouble", "float"), (_CAST,)),
    **dict.fromkeys(("cfloat", "bool", "half", "chalf", "int", "long", "short"), (_CAST,)),
    **dict.fromkeys(("cuda", "xpu", "ipu", "mtia"), (_MOVE.format(_LAYOUT),)),
    "cpu": (_CAST,),
    "to": (
        f"(Tensor self, ScalarType dtype, bool non_blocking=False, bool copy=False, *, {_LAYOUT})",
        f"(Tensor self, Tensor other, bool non_blocking=False, bool copy=False, *, {_LAYOUT})",
        f"(Tensor self, {_WHERE}, bool non_blocking=False, bool copy=False, *, {_LAYOUT})",
    ),
    "type": (f"(Tensor self, Any? dtype=None, bool non_blocking=False, *, {_LAYOUT})",),
    "__getitem__": ("(Tensor self, Any index)",),
    "__setitem__": ("(Tensor(a!) self, Any index, Any value)",),
    "numpy": ("(Tensor self, *, bool force=False)",),
    "tolist": ("(Tensor self)",),
    "as_subclass": ("(Tensor self, Any cls)",),
    "apply_": ("(Tensor(a!) self, Any callable)",),
    "map_": ("(Tensor(a!) self, Tensor other, Any callable)",),
    "map2_": ("(Tensor(a!) self, Tensor x, Tensor y, Any callable)",),
    "new_tensor": (f"(Tensor self, Any data, *, {_DATA})",),
    "tensor": (f"(Any data, *, {_DATA}, bool pin_memory=False, str[]? names=None)",),
    "as_tensor": ("(Any data, ScalarType? dtype=None, Device? device=None)",),
    "asarray": (f"(Any obj, *, {_DATA}, bool? copy=None)",),
    "from_numpy": ("(Any ndarray)",),
    "frombuffer": (
        "(Any buffer, *, ScalarType dtype, int count=-1, int offset=0, bool requires_grad=False)",
    ),
    "nested_tensor": (f"(Any list, {_DATA}, bool pin_memory=False)",),
    "_from_dlpack": ("(Any dlpack)",),
    "_to_dlpack": ("(Tensor data)",),
    "_to_dlpack_versioned": ("(Tensor data)",),
    **{
        f"ProcessGroup.{method}": (f"({signature})",) for method, (_, signature) in COLLECTIVE_METHODS.items()
    },
}

# Positional orders that torch still accepts, with a warning.
_SCALED_PRODUCT = (("beta", "self", "alpha", "{0}", "{1}"), ("beta", "self", "{0}", "{1}"))
DEPRECATED_ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "add": (("self", "alpha", "other"),),
    "sub": (("self", "alpha", "other"),),
    "addcdiv": (("self", "value", "tensor1", "tensor2"),),
    "addcmul": (("self", "value", "tensor1", "tensor2"),),
    **{
        name: tuple(tuple(part.format(*factors) for part in order) for order in _SCALED_PRODUCT)
        for name, factors in {
            "addbmm": ("batch1", "batch2"),
            "baddbmm": ("batch1", "batch2"),
            "addmm": ("mat1", "mat2"),
            "sspaddmm": ("mat1", "mat2"),
            "addmv": ("mat", "vec"),
            "addr": ("vec1", "vec2"),
        }.items()
    },
}


def signatures(called: Any) -> tuple[Signature, ...]:
    """Return the signatures of an intercepted function, OpOverload(Packet) or autograd.Function.

    The tuple is empty if they are unknown.
    """
    target = by_callable().get(called)
    if target is not None:
        return _target_signatures(target)
    if isinstance(called, torch._ops.OpOverload):
        return (_in_schema_order(_convert_arguments(called._schema)),)
    if isinstance(called, torch._ops.OpOverloadPacket):
        names: list[str] = called.overloads()  # type: ignore[no-untyped-call]
        schemas = (getattr(called, name)._schema for name in names)
        return tuple(_in_schema_order(_convert_arguments(schema)) for schema in schemas)
    if isinstance(called, type) and issubclass(called, torch.autograd.Function):
        takes_context = called.setup_context is torch.autograd.Function.setup_context
        return _signature_of_python_function(called.forward, skipped_count=int(takes_context))
    return ()


@cache
def _target_signatures(target: Target) -> tuple[Signature, ...]:
    """Return the signatures of a target: written here, else ATen's of tensors, else torch's test overrides.

    With ATen's schemas come the deprecated orders of arguments that the target still takes.
    """
    texts = PYTHON_SIGNATURES.get(target.name)
    if texts is not None:
        schemas = (torch._C.parse_schema(f"{_LOCAL_NAMESPACE}op{text} -> Any") for text in texts)
        return tuple(_in_python_order(_convert_arguments(schema), target) for schema in schemas)
    schemas_of_op = _aten_schemas(target.canonical)
    if not schemas_of_op:
        return _testing_signatures(target.callable)
    # Schemas that neither take nor make a tensor serve TorchScript's numbers and lists: most of `add`.
    schemas_of_op = [
        schema for schema in schemas_of_op if any(map(_concerns_tensors, schema.arguments))
    ] or schemas_of_op
    overloads = [_convert_arguments(schema) for schema in schemas_of_op]
    signatures_by_overload = [_in_python_order(arguments, target) for arguments in overloads]
    return (*signatures_by_overload, *_signatures_in_deprecated_orders(overloads, target))


def _concerns_tensors(argument: Any) -> bool:
    return bool(argument.name == "dtype" or _element_type(argument)[0].kind() == "TensorType")


def _aten_schemas(name: str) -> list[Any]:
    return list(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _convert_arguments(schema: Any) -> tuple[Argument, ...]:
    """Return the arguments of a parsed schema, in its order.

    No argument counts as unreturned for a schema of this module, which does not say what the op returns.
    """
    says_returns = bool(schema.returns) and not schema.name.startswith(_LOCAL_NAMESPACE)
    # Alias sets are letters: the op of `f(Tensor(a!) x) -> Tensor(a!)` returns the argument that it writes.
    returned_alias_sets = {
        name for result in schema.returns if result.alias_info for name in result.alias_info.before_set
    }
    return tuple(
        _convert_argument(argument, returned_alias_sets if says_returns else None)
        for argument in schema.arguments
    )


def _convert_argument(argument: Any, returned_alias_sets: Set[str] | None) -> Argument:
    """Return an argument of a schema, with torch's value for a default that the schema has as a number.

    returned_alias_sets: of the op's results; None if unknown.
    """
    element_type, is_list, is_optional = _element_type(argument)
    type_name: str = element_type.kind().removesuffix("Type")
    default = argument.default_value
    if type_name in _ENUMS and isinstance(default, int):
        default = _ENUMS[type_name][default]
    alias_info = argument.alias_info
    is_written = bool(alias_info and alias_info.is_write)
    is_unreturned = (
        is_written
        and returned_alias_sets is not None
        and returned_alias_sets.isdisjoint(alias_info.before_set)
    )
    return Argument(
        name=argument.name,
        type=type_name,
        is_list=is_list,
        is_optional=is_optional,
        is_written=is_written,
        is_unreturned=is_unreturned,
        keyword_only=argument.kwarg_only,
        has_default=argument.has_default_value(),
        default=tuple(default) if isinstance(default, list) else default,
    )


def _element_type(argument: Any) -> tuple[Any, bool, bool]:
    """Return the type of a schema's argument without lists and options, and whether it has each of these."""
    element_type = getattr(argument, "real_type", None) or argument.type
    is_list = is_optional = False
    while (kind := element_type.kind()) in ("OptionalType", "ListType"):
        if kind == "ListType":
            is_list = True
        elif not is_list:  # optional elements of a list do not make the list optional
            is_optional = True
        element_type = element_type.getElementType()
    return element_type, is_list, is_optional


# Schemas state these defaults by number.
_ENUMS: dict[str, tuple[Any, ...]] = {
    "ScalarType": (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64),
    ),
    "MemoryFormat": (
        *(torch.contiguous_format, torch.preserve_format),
        *(torch.channels_last, torch.channels_last_3d),
    ),
    "Layout": (torch.strided,),
}


def _in_schema_order(arguments: tuple[Argument, ...]) -> Signature:
    positional = (i for i, argument in enumerate(arguments) if not argument.keyword_only)
    return Signature(arguments, tuple(positional))


def _in_python_order(arguments: tuple[Argument, ...], target: Target) -> Signature:
    """Return the signature by which torch's parser reads a call of a target.

    It puts self first in a method, and takes `view(2, 3)` for `view((2, 3))`.
    """
    positional = list(_in_schema_order(arguments).positional)
    names = [argument.name for argument in arguments]
    is_method = target.kind != "function"
    if is_method and "self" in names:
        positional.sort(key=lambda i: names[i] != "self")  # stable: the others keep their order
    # The size must be all that a call has, beside self.
    size = arguments[positional[-1]] if len(positional) == 1 + is_method else None
    may_spread_size = size is not None and size.is_list and size.type in ("Int", "SymInt")
    return Signature(arguments, tuple(positional), may_spread_size)


def _signatures_in_deprecated_orders(
    overloads: Iterable[tuple[Argument, ...]], target: Target
) -> Iterator[Signature]:
    """Yield signatures by the deprecated positional orders that a target still takes.

    They are for overloads with all arguments of such an order, the last of which is a tensor.
    """
    for order in DEPRECATED_ORDERS.get(target.canonical.removesuffix("_"), ()):
        for arguments in overloads:
            names = [argument.name for argument in arguments]
            if set(order) <= set(names) and arguments[names.index(order[-1])].type == "Tensor":
                python_order = list(order)
                if target.kind == "method":  # methods put self first
                    python_order.remove("self")
                    python_order.insert(0, "self")
                yield Signature(arguments, tuple(names.index(name) for name in python_order))


@cache
def _testing_overrides() -> dict[Any, Any]:
    # For its tests torch has a Python function with the parameters of each function that can be overridden.
    return dict(torch.overrides.get_testing_overrides())


def _testing_signatures(called: Any) -> tuple[Signature, ...]:
    override = _testing_overrides().get(called)
    return () if override is None else _signature_of_python_function(override)


def _signature_of_python_function(function: Any, skipped_count: int = 0) -> tuple[Signature, ...]:
    """Return a tuple of a function's signature without its first parameters; () if it takes any number."""
    parameters = list(inspect.signature(function).parameters.values())[skipped_count:]
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return ()
    arguments = tuple(
        Argument(
            parameter.name,
            "Any",
            keyword_only=parameter.kind is parameter.KEYWORD_ONLY,
            has_default=parameter.default is not parameter.empty,
            default=None if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in parameters
    )
    return (_in_schema_order(arguments),)

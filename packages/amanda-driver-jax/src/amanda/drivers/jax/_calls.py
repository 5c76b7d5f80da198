"""Calls of primitives, with inputs and attributes as JAX binds them; rules of functions for derivatives."""

import operator
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from amanda.backend import Call, Operation
from amanda.interceptor import Site
from jax.extend.core import Primitive

from ._autodiff import TappedExecution
from ._traces import INSERTION, add_note

LIST_PRIMITIVES = frozenset({"concatenate", "stack"})
"""Primitives that take a list of arrays, which is one input."""
CUSTOM_RULE_PRIMITIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""Calls of functions with rules for their derivatives."""
NAMES: dict[str, tuple[str, ...]] = {
    "dot_general": ("lhs", "rhs"),
    "conv_general_dilated": ("lhs", "rhs"),
    "select_n": ("which", "on_false", "on_true"),
    "gather": ("operand", "indices"),
    "clamp": ("min", "operand", "max"),
    **dict.fromkeys(("concatenate", "stack"), ("operands",)),
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "max", "min", "pow", "rem", "atan2", "and", "or", "xor", "eq", "ne",
         "lt", "le", "gt", "ge"), ("x", "y"),
    ),
}  # fmt: skip
"""Names of inputs, as `jax.lax` has them; those of other primitives are numbered."""

Bind = Callable[..., Any]


class PrimitiveCall(Call):
    """One bind of a primitive, as a call of its op.  _has_run: True once JAX has bound the primitive."""

    __slots__ = ("_has_run", "_params", "_primitive", "_site")

    op: Operation

    def __init__(self, site: Site, primitive: Primitive, args: Sequence[Any], params: dict[str, Any]) -> None:
        self._site, self._primitive, self._params = site, primitive, params
        self._has_run = False
        self.op = site.op
        self.inputs = [list(args)] if primitive.name in LIST_PRIMITIVES else list(args)
        named = NAMES.get(primitive.name, ("x",) if len(self.inputs) == 1 else ())
        self.names = [*named, *(f"operand{i}" for i in range(len(named), len(self.inputs)))]
        self.written_positions = self.target_positions = ()

    def _arguments(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(inputs[0]) if self._primitive.name in LIST_PRIMITIVES else tuple(inputs)

    def invoke(self, inputs: list[Any]) -> Any:
        """Bind the primitive; return its outputs, tapped if tools instrument its backward op."""
        return self._tap_if_executing(self.invoke_for_replacement(inputs))

    def invoke_for_replacement(self, inputs: Sequence[Any]) -> Any:
        """Bind the primitive for a replacement; return its outputs, without taps."""
        self._has_run = True
        return self._site.invoke(self._arguments(inputs), self._params)

    def as_function(self) -> Callable[[Sequence[Any]], Any] | None:
        """Return a function from inputs to the op's outputs, with the parameters of this call.

        None for functions with rules, which JAX has traced.
        """
        if self._primitive.name in CUSTOM_RULE_PRIMITIVES:
            return None
        primitive, params = self._primitive, self._params
        takes_list = primitive.name in LIST_PRIMITIVES
        # The closure has none of the call's inputs: a tool may keep the function longer than the arrays.
        return lambda inputs: primitive.bind(*(inputs[0] if takes_list else inputs), **params)

    def in_form_of_result(self, result: Any) -> Any:
        """Return a replacement's result in the op's form, a list for several results, with taps on it.

        A function with rules for its derivatives runs here, unless the replacement has run it.
        """
        add_note(INSERTION)
        if self._primitive.name in CUSTOM_RULE_PRIMITIVES and not self._has_run:
            # JAX takes the form of the result from the function, which has to run; its outputs are dropped.
            self.invoke_for_replacement(self.inputs)
        if self._primitive.multiple_results and not isinstance(result, (list, tuple)):
            result = [result]
        return self._tap_if_executing(result)

    def _tap_if_executing(self, result: Any) -> Any:
        execution = TappedExecution.current()
        return result if execution is None else execution.tap_outputs(result)

    def may_write_inputs(self) -> bool:
        """Return False: arrays are not written."""
        return False

    def attributes(self) -> dict[str, Any]:
        """Return the parameters of the primitive; for a function with rules, its name."""
        if self._primitive.name in CUSTOM_RULE_PRIMITIVES:
            return {"name": custom_name(self._params)}
        return dict(self._params)

    def op_type(self) -> str:
        """Return the name of the primitive, or of a function of JAX's with rules."""
        return self.op.__name__


def custom_name(params: dict[str, Any]) -> str:
    """Return the name of the function with rules for its derivatives that a primitive calls."""
    return str(params["subfuns"][0].debug_info.func_name)


def custom_op_name(primitive: str, params: dict[str, Any]) -> str:
    """Return the op name of a function with rules: the name of JAX's own, as "relu", else the primitive's."""
    # Functions of users keep the primitive's name: their own names say nothing to tools.
    info = params["subfuns"][0].debug_info
    _, _, place = str(info.func_src_info).rpartition(" at ")
    return str(info.func_name) if place.startswith(_JAX) else primitive


class _RuleState(threading.local):
    """State of a thread; running: functions whose rules run, by source, with the rules' primal values."""

    def __init__(self) -> None:
        self.running: list[tuple[str, Sequence[Any]]] = []


_thread = _RuleState()


def params_with_rule_caller(
    primitive: str, params: dict[str, Any], call_rule: Callable[..., Any]
) -> dict[str, Any]:
    """Return parameters of a function with rules with which `call_rule(rule, args)` calls its rule.

    That is when JAX takes the derivative: of a function in a program, after the program was traced.
    """
    function, rule, *other_rules = params["subfuns"]
    have_flags = primitive == "custom_vjp_call"
    rule = rule.wrap(_record_running_rule, (_function_source(primitive, params), have_flags, call_rule), None)
    return dict(params, subfuns=(function, rule, *other_rules))


def _record_running_rule(
    rule: Callable[..., Any], source: str, have_flags: bool, call_rule: Callable[..., Any], *args: Any
) -> Any:
    """Call a rule; meanwhile `is_called_by_own_rule` knows it by the source of its function.

    have_flags: True if a flag comes after each value; otherwise tangents follow the values.
    """
    values = args[::2] if have_flags else args[: len(args) // 2]
    _thread.running.append((source, values))
    try:
        return call_rule(rule, args)
    finally:
        _thread.running.pop()


def is_called_by_own_rule(primitive: str, args: Sequence[Any], params: dict[str, Any]) -> bool:
    """Return True for a function that its own rule calls at the same values: the op is under way already."""
    if primitive not in CUSTOM_RULE_PRIMITIVES or not _thread.running:
        return False
    source, values = _thread.running[-1]
    has_same_values = len(args) == len(values) and all(map(operator.is_, args, values))
    return has_same_values and source == _function_source(primitive, params)


def _function_source(primitive: str, params: dict[str, Any]) -> str:
    return f"{primitive} {params['subfuns'][0].debug_info.func_src_info}"


_JAX = str(Path(jax.__file__).parent)

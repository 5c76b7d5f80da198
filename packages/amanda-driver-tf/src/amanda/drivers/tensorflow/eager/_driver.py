"""The driver itself: how calls of ops reach the core."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

from amanda.backend import Call, EagerDriver, Exercise, OpFacts, Trace
from amanda.interceptor import Site
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor

from .._layers import enclose_modules, layer_name_paths, module_path
from .._requirements import NEWEST_TESTED, PRIVATE_NAMES, eager_exercise
from .._tensors import EagerTensorOps, allow_tapes_in_routines
from ._calls import EagerCall, FastCall, SlowCall, Variable, variables
from ._interception import Interception, call_execute
from ._schema import flatten
from ._state import Marking, TapeMark
from ._tape import Tape
from ._unseen_ops import REPORTED, Datasets


class TensorFlowEagerDriver(EagerTensorOps, EagerDriver):
    """TensorFlow, eager mode."""

    api = 1
    framework = "tensorflow"
    packages = ("keras", "tf_keras")
    modes = ("eager",)
    newest_tested = NEWEST_TESTED
    private_names = PRIVATE_NAMES["eager"]
    identity_types = (Variable,)

    def __init__(self) -> None:
        self._datasets = Datasets()
        self._attached = False

    @cached_property
    def _tape(self) -> Tape:
        return Tape(self)

    @cached_property
    def _interception(self) -> Interception:
        return Interception(self, self._tape.run_in_pass)

    def attach(self) -> None:
        """Patch the functions by which Python calls ops, the tapes, and the calls of modules."""
        self._attached = True
        self._interception.patch(self.attributes)
        self._tape.patch(self.attributes)
        allow_tapes_in_routines(self.attributes)
        self._datasets.patch(self.attributes)
        enclose_modules(self.attributes)

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        super().detach()
        if self._attached:
            # Native code still holds the stand-ins until TensorFlow's functions are registered again.
            self._tape.register()
            self._attached = False

    def exercise(self) -> Exercise | None:
        """Return a program of one op and its gradient; None where eager mode has been switched off."""
        return eager_exercise()

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call with its inputs in the order of the op's schema."""
        # A site's target is a partial of one of two functions, which tell the forms of a call apart.
        kind = SlowCall if site.target.func is call_execute else FastCall
        return kind(site.op, site.invoke, args, kwargs.get("variables", ()))

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return the part of a call that cannot be instrumented, and the reason; None if there is none."""
        if site.op.has_functions and "Dataset" in site.op.type:
            return REPORTED
        if site.op.has_functions:
            return f"the functions of {site.op.type}", "TensorFlow's native code runs them as they are"
        return None

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of a call's op: its layer, or name scope outside of layers, and its variables."""
        facts = super().describe(call, subjects)
        facts.scope = module_path(subjects) if subjects else str(ops.get_name_scope())
        facts.aliases, facts.variable_of = layer_name_paths(subjects), _handle_of
        return facts

    def identities(self, call: Call) -> list[Any]:
        """Return the variables among a call's arguments."""
        return list(call.identities) if isinstance(call, EagerCall) else []

    def results(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return a call's outputs by the op's schema, where a list of tensors is one; see `flatten`."""
        assert isinstance(call, EagerCall)
        return call.outputs(outputs)

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors a tape watches, as bits; None where none does."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return None
        tensors = [value for value in flatten(inputs) if value.__class__ is EagerTensor]
        if not pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors):
            return None
        # A leading 1 keeps leading zeros apart.
        bits = 1
        for tensor in tensors:
            bits = bits << 1 | pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor])
        return bits

    def tracing(self) -> Marking:
        """Return a context in which the ops that a tape records are marked."""
        return Marking()

    def attach_trace(self, trace: Trace, marking: Marking, values: list[Any]) -> None:
        """Store the trace in the marks."""
        for mark in marking.marks:
            mark.trace = trace

    def straight_through(self, original: Any, value: Any) -> Any:
        """Return `value` instead of `original`; its gradient belongs to the op that computed `original`."""
        fresh = super().straight_through(original, value)
        mark = TapeMark.by_output.get(getattr(original, "_id", -1))
        if mark is not None and fresh is not original:
            TapeMark.by_output[fresh._id] = mark
        return fresh


def _handle_of(value: Any) -> Any:
    """Return the handle of the variable that a tensor is the handle of or was read from, if any."""
    variable = variables.variable_of(value) if isinstance(value, EagerTensor) else None
    return None if variable is None else variable.handle

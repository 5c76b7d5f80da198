"""The driver itself: how calls of ops reach the core."""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

from amanda.backend import Call, EagerDriver, Trace
from amanda.interceptor import Site
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import ops
from tensorflow.python.framework.ops import EagerTensor

from .._layers import module_path, named_paths
from .._recording import allow_tapes_in_routines
from .._requirements import check
from .._tensors import TensorFlowTensors
from ._calls import EagerCall, FastCall, SlowCall
from ._datasets import REPORTED, Datasets
from ._interception import Interception, executed
from ._modules import Modules
from ._schema import flattened
from ._state import Made, Mark
from ._tape import Tape
from ._variables import Variable, variables


class TensorFlowEagerDriver(TensorFlowTensors, EagerDriver):
    """TensorFlow, eager mode."""

    api = 1
    framework = "tensorflow"
    packages = ("keras", "tf_keras")
    modes = ("eager",)
    identity_types = (Variable,)

    def __init__(self) -> None:
        self._datasets = Datasets()
        self._modules = Modules()
        self._attached = False

    @cached_property
    def _tape(self) -> Tape:
        return Tape(self)

    @cached_property
    def _interception(self) -> Interception:
        return Interception(self, self._tape.run)

    def attach(self) -> None:
        """Stand in for the ways by which Python calls ops, follow the tapes, enclose calls of modules."""
        check("eager")
        self._attached = True
        self._interception.enter(self.attributes)
        self._tape.enter(self.attributes)
        allow_tapes_in_routines(self.attributes)
        self._datasets.enter(self.attributes)
        self._modules.enter()

    def detach(self) -> None:
        """Leave TensorFlow as it was."""
        self._modules.leave()
        super().detach()
        if self._attached:
            self._tape.register()
            self._attached = False

    def bind(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call with its inputs in the order of the op's schema."""
        kind = SlowCall if site.target.func is executed else FastCall
        return kind(site.op, site.invoke, args, kwargs.get("variables", ()))

    def obstacle(self, site: Site) -> tuple[str, str] | None:
        """Return what keeps a call from being instrumented, and why."""
        if site.op.has_functions and "Dataset" in site.op.type:
            return REPORTED
        if site.op.has_functions:
            return f"the functions of {site.op.type}", "TensorFlow's native code runs them as they are"
        return None

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the calling layer in the model, or the name scope outside of layers."""
        return module_path(subjects) if subjects else str(ops.get_name_scope())

    def scope_aliases(self, subjects: Sequence[Any]) -> Sequence[str]:
        """Paths of the calling layer by the names of layers."""
        return named_paths(subjects)

    def identities(self, call: Call) -> list[Any]:
        """The variables that a call was given."""
        return list(call.identities) if isinstance(call, EagerCall) else []

    def variable_of(self, value: Any) -> Any:
        """The handle of the variable that a tensor is or was read of."""
        known = variables.known(value) if isinstance(value, EagerTensor) else None
        return None if known is None else known.handle

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An op's result as a list of outputs, and how to put such a list back into its form."""
        if isinstance(outputs, list):
            return list(outputs), list
        if outputs is None:
            return [], lambda values: None
        return [outputs], lambda values: values[0]

    def results(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The same by the op's schema: an output that is a list of tensors is one."""
        assert isinstance(call, EagerCall)
        return call.outputs(outputs)

    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Return which tensors a tape watches, as bits; None where none does."""
        if pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            return None
        tensors = [value for value in flattened(inputs) if value.__class__ is EagerTensor]
        if not pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop(tensors):
            return None
        bits = 1
        for tensor in tensors:
            bits = bits << 1 | pywrap_tfe.TFE_Py_TapeSetShouldRecordBackprop([tensor])
        return bits

    def tracing(self) -> Made:
        """Context in which what is recorded is marked."""
        return Made()

    def attach_trace(self, trace: Trace, made: Made, values: list[Any]) -> None:
        """Leave the trace at the marks."""
        for mark in made.marks:
            mark.trace = trace

    def straight_through(self, original: Any, value: Any) -> Any:
        """`value` for `original`, whose gradient belongs to what made the original."""
        fresh = super().straight_through(original, value)
        mark = Mark.by_output.get(getattr(original, "_id", -1))
        if mark is not None and fresh is not original:
            Mark.by_output[fresh._id] = mark
        return fresh

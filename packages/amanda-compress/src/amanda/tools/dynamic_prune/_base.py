"""The base of dynamic pruning tools: predictors, a loss, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import amanda
from amanda.errors import AmandaError
from amanda.options import Seed, checked
from amanda.tools.dynamic_prune._result import DynamicPruneResult, Pruned
from amanda.tools.dynamic_prune._thread_state import PerThreadState
from amanda.tools.kit import Dataflow, DataflowNode, tensors_of
from amanda.tools.libraries import get_dtype_name
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping

T = TypeVar("T")
Run = dict[Any, Any] | None
"""The dict of an execution; None where nothing runs again, as in a graph."""
_NOISE = "amanda.tools.dynamic_prune: noise"


class DynamicPruneTool(amanda.Tool):
    """Base of tools whose predictors choose for each input the parts of ops that are pruned.

    seed: of the predictors' initial values, and of the noise in training.  training: whether methods with
    noise add it; set by `train`, as for a module.

    Predictors are made as their ops are analysed; `prepare(model, *example)` analyses beforehand, so that
    `parameters()` returns them for an optimizer.  Add `loss()` to the loss of the model.  `result` has the
    shares that were pruned since `clear()`.
    """

    is_copied_when_used = False

    training = False

    @checked
    def __init__(self, seed: Seed = 0, state: Callable[[], Any] = dict) -> None:
        super().__init__()
        self._first, self._noises = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        self._flow, self._present = Dataflow(), PerThreadState[Any](self, state)
        self._ops: dict[str, Any] = {}
        self._rows: dict[str, Pruned] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._enter)
        self.add_inst_for_op(self._leave, require_outputs=True)

    @checked
    def train(self, mode: bool = True) -> None:
        """Switch training on or off."""
        self.training = mode

    @property
    def result(self) -> DynamicPruneResult:
        """Return the share of each op that was pruned so far."""
        return DynamicPruneResult(self._rows.values())

    def clear(self) -> None:
        """Forget the pruned shares, and the last predictions; analysed ops stay analysed."""
        self._present.clear()
        for row in self._rows.values():
            row.clear()

    def loss(self) -> Any:
        """Return a term for the training loss, of this thread's last execution; 0.0 without one."""
        return 0.0

    def _predictions(self) -> list[Any]:
        """Return the predictions at each op in this thread's last execution."""
        return [one for one in map(self._present.last, self._ops.values()) if one is not None]

    def _known(self, context: amanda.OpContext, make: Callable[[], T]) -> T:
        """Return the tool's record of an op, which `make` makes at the first analysis of the op."""
        place = self.place(context)
        if place not in self._ops:
            self._ops[place] = make()
        known: T = self._ops[place]
        return known

    def _row(self, context: amanda.OpContext, unit: str) -> Pruned:
        """Return a new row of the result, for an op; unit: the name of the parts that are pruned."""
        row = Pruned(context["type"], context.get_scope(), context.get_source(), unit)
        self._rows[self.place(context)] = row
        return row

    def _enter(self, context: amanda.OpContext) -> None:
        if context["phase"] == "forward":
            node = context["node"] = self._flow.node(context)
            self._analyse(context, node)

    def _leave(self, context: amanda.OpContext) -> None:
        if context["phase"] == "forward":
            self._flow.made(context["node"], context.get_outputs() or [])

    def _analyse(self, context: amanda.OpContext, node: DataflowNode) -> None:
        """Instrument a forward op."""

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load predictors that `state_dict` returned; existing parameters take the loaded values.

        Ops are analysed anew unless the state has exactly the parameters that exist.
        """
        own = self.state_dict()
        known = not self.waiting_state() and _shapes(own) == _shapes(state)
        if not (known and all(_renew(value, state[name]) for name, value in own.items())):
            self._ops.clear()
            self._rows.clear()
            super().load_state_dict(state, strict)

    def _trainable(self, context: amanda.OpContext, like: Any, name: str, make: Callable[[], Any]) -> Any:
        """Return a predictor's parameter at an op, on the device of `like`.

        Raises AmandaError if the loaded value has another shape.
        """
        start, tensors = np.asarray(make(), np.float32), tensors_of(like)
        dtype = (
            "float64" if get_dtype_name(like) == "float64" else "float32"
        )  # half precision is too coarse to train

        def state(value: Any) -> Any:
            return tensors.state(value, like, True, dtype)

        def load(loaded: Any) -> Any:
            if tuple(loaded.shape) != start.shape:
                raise AmandaError(
                    f"{name} that was loaded for {self.place(context)} is of shape {tuple(loaded.shape)}, "
                    f"not {start.shape}: it belongs to another model"
                )
            return state(loaded)

        return self.keep(context, name, lambda: state(start), load=load, renew=tensors.update)

    def _noise(self, like: Any, run: Run, recomputed: bool) -> Any:
        """Return logistic noise for the logits of a gate; None outside of training.

        run, recomputed: of the routine; a recomputation has the noise of its first execution.
        """
        if not self.training:
            return None
        noises = self._noises
        if recomputed and run is not None and _NOISE in run:
            noises = np.random.default_rng()
            noises.bit_generator.state = run[_NOISE]
        elif run is not None:
            run[_NOISE] = noises.bit_generator.state
        uniform = noises.uniform(1e-8, 1 - 1e-8, tuple(like.shape))
        return tensors_of(like).cast(np.log(uniform) - np.log1p(-uniform), like)


def without_run(context: amanda.OpContext) -> dict[str, Any]:
    """Return keyword arguments that keep `run` from a routine where nothing runs again."""
    return {} if context.is_eager() else {"run": None}


def _renew(value: Any, loaded: Any) -> bool:
    tensors = tensors_of(value)
    return tensors.update(value, tensors.state(loaded, value, True, get_dtype_name(value))) is value


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}

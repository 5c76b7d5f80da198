"""The base of dynamic pruning tools: predictors, a loss, and what was pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeVar

import numpy as np
from autoray import get_dtype_name

import amanda
from amanda.errors import AmandaError
from amanda.tools.dynamic_prune._result import DynamicPruneResult, Pruned
from amanda.tools.kit import Dataflow, DataflowNode, PerCaller, tensors_of
from amanda.tools.mapping import StandardMapping

T = TypeVar("T")


class DynamicPruneTool(amanda.Tool):
    """A tool whose predictors look at each input and say what of an op is pruned.

    seed: of the predictors' first values, and of the noise in training.

    Predictors are made where their ops are analysed; `prepare(model, *example)` does that ahead, so that
    `parameters()` has them for an optimizer.  training: whether noise is added where the method has it, as
    `train` of a module.  `loss()` is to be added to the user's.  `result` tells what was pruned since
    `clear()`.
    """

    training = False

    def __init__(self, seed: int = 0, state: Callable[[], Any] = dict) -> None:
        super().__init__()
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise AmandaError(f"seed is {seed!r}; it is a number without decimals, 0 or more")
        self._first, self._noises = np.random.default_rng(seed), np.random.default_rng([seed, 1])
        self._flow, self._present = Dataflow(), PerCaller[Any](self, state)
        self._ops: dict[str, Any] = {}
        self._rows: dict[str, Pruned] = {}
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._enter)
        self.add_inst_for_op(self._leave, require_outputs=True)

    def train(self, mode: bool = True) -> None:
        """Say whether what follows is training."""
        self.training = mode

    @property
    def result(self) -> DynamicPruneResult:
        """Return the share of each op that was pruned so far."""
        return DynamicPruneResult(self._rows.values())

    def clear(self) -> None:
        """Forget what was pruned, and what was predicted for the last input; what was analysed stays."""
        self._present.clear()
        for row in self._rows.values():
            row.clear()

    def loss(self) -> Any:
        """Return what training adds to its loss, of the last execution by this thread; 0.0 without one."""
        return 0.0

    def _said(self) -> list[Any]:
        """Return what was predicted at each op in this thread's last execution."""
        return [said for said in map(self._present.last, self._ops.values()) if said is not None]

    def _known(self, context: amanda.OpContext, make: Callable[[], T]) -> T:
        """Return what the tool keeps of an op, which is made where the op is analysed first."""
        place = self.place(context)
        if place not in self._ops:
            self._ops[place] = make()
        known: T = self._ops[place]
        return known

    def _row(self, context: amanda.OpContext, unit: str) -> Pruned:
        """Return a new row of the result, of an op whose units are pruned."""
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
        """Take predictors that `state_dict` gave; parameters that were made before get their values.

        Where these are all there is, ops are not analysed anew.
        """
        own = self.state_dict()
        known = not self.waiting_state() and _shapes(own) == _shapes(state)
        if not (known and all(_renew(value, state[name]) for name, value in own.items())):
            self._ops.clear()
            self._rows.clear()
            super().load_state_dict(state, strict)

    def _trainable(self, context: amanda.OpContext, like: Any, name: str, make: Callable[[], Any]) -> Any:
        """Return a predictor's parameter at an op, on the device of `like`.

        Raises AmandaError where one of another shape was loaded.
        """
        start, tensors = np.asarray(make(), np.float32), tensors_of(like)
        dtype = "float64" if get_dtype_name(like) == "float64" else "float32"  # half would not train

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

    def _noise(self, like: Any) -> Any:
        """Return logistic noise for the logits of a gate in training; None else."""
        if not self.training:
            return None
        uniform = self._noises.uniform(1e-8, 1 - 1e-8, tuple(like.shape))
        return tensors_of(like).cast(np.log(uniform) - np.log1p(-uniform), like)


def _renew(value: Any, loaded: Any) -> bool:
    tensors = tensors_of(value)
    return tensors.update(value, tensors.state(loaded, value, True, get_dtype_name(value))) is value


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def checked_share(name: str, value: float) -> float:
    """Return a share in (0, 1].

    Raises AmandaError for another number.
    """
    if not isinstance(value, Real) or not 0 < value <= 1:
        raise AmandaError(f"{name} is {value!r}; it is a share above 0, and 1 at most")
    return value

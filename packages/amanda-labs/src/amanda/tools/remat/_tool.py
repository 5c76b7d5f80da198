"""The tool: runs each differentiable op under hooks that keep the tensors it saves within a budget."""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from time import perf_counter
from typing import Annotated, Any, Literal, TypeAlias

import amanda
from amanda.errors import OptionError, ToolError
from amanda.options import Name, NonNegativeInt, Where, checked
from amanda.tools.mapping import MappingTool, Rerun, StandardMapping, rerun
from amanda.tools.remat import _pytorch
from amanda.tools.remat._heuristics import HEURISTICS, HeuristicName
from amanda.tools.remat._ledger import Totals
from amanda.tools.remat._records import OpCounts
from amanda.tools.remat._result import RematResult
from amanda.tools.remat._store import Store

logger = logging.getLogger("amanda")

_KNOWN = 10_000  # sizes kept at most
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)

_BYTES = 'a number of bytes, or a text such as "2GiB" or "512 MB"'
Budget: TypeAlias = Annotated[
    NonNegativeInt | Name, Where(_BYTES, lambda budget: isinstance(budget, int) or _AMOUNT.fullmatch(budget))
]


class RematTool(amanda.Tool):
    """A tool that keeps the tensors that autograd saves within a budget, and recomputes evicted ones.

    budget: bytes of the storages that recorded ops make, or a text such as "2GiB", "512 MB"; None: no bound.
    heuristic: chooses the storage to evict first, a name in `HEURISTICS`.
    cost: of an op, its "time" or, for runs that are to repeat exactly, "count" (each op is 1).
    strict: raise BudgetError if the budget cannot be held, instead of a warning.
    `result` has the evictions, `clear` starts anew.  Raises OptionError for other options.

    Source: Kirisame et al. 2021, "Dynamic Tensor Rematerialization".
    """

    is_copied_when_used = False

    @checked
    def __init__(
        self,
        budget: Budget | None = None,
        heuristic: HeuristicName = "h_dtr_eq",
        cost: Literal["time", "count"] = "time",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self._budget = _bytes(budget)
        self._heuristic = HEURISTICS[heuristic]
        self._unit = cost == "count"
        self._strict = strict
        self._counts: dict[int, OpCounts] = {}
        self._passed: set[amanda.Namespace] = set()
        self._sizes: dict[Hashable, int] = {}  # bytes that ops make, by type, shapes and values of inputs
        self._store: Store | None = None
        self._totals = Totals()
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", rerun]]))
        self.add_inst_for_op(self._analyse)

    @property
    def result(self) -> RematResult:
        """Return the evictions, and the ops that ran again, so far."""
        totals = self._totals
        return RematResult(list(self._counts.values()), self._budget, totals.peak, totals.short)

    def clear(self) -> None:
        """Reset the counts; evicted storages stay evicted."""
        for counts in self._counts.values():
            counts.evictions = counts.evicted_bytes = counts.rematerialisations = 0
            counts.seconds = 0.0
        self._totals.peak = self._totals.short = 0
        if self._store is not None:
            self._store.ledger.drain()
            self._store.ledger.note_peak()

    def scope_left(self) -> None:
        """Make all evicted storages again."""
        store, self._store = self._store, None
        if store is not None:
            store.restore()

    def _analyse(self, context: amanda.OpContext) -> None:
        kind: Rerun | None = context.get("rerun")
        if kind is None:
            self._pass(context)
            return
        if kind.written != ():
            context.insert_before_op(self._before_write, inputs=kind.written)
        if not kind.pure or context["phase"] != "forward":
            return
        counts = self._counts.setdefault(
            context.get_op_id(), OpCounts(context["type"], context.get_scope(), context.get_source())
        )
        context.replace_op(self._run, kind=kind, counts=counts, compute=context.get_computation())

    def _pass(self, context: amanda.OpContext) -> None:
        """Leave an op unchanged, and warn once for its namespace."""
        if context.is_static():
            raise ToolError(
                "remat acts while a model is trained in PyTorch's eager mode, not in a file: apply it to the "
                "program, with amanda.apply or `amanda run -t remat`"
            )
        if context.namespace not in self._passed:
            self._passed.add(context.namespace)
            instead = "; mark what is computed again with jax.checkpoint" * context.namespace.matches("jax")
            logger.warning(
                "remat is for PyTorch's eager mode; ops of %s run as they are%s", context.namespace, instead
            )

    def _before_write(self, *values: Any) -> None:
        if self._store is not None:
            self._store.before_write(self._store.torch.tensors(values))

    def _run(self, *inputs: Any, kind: Rerun, counts: OpCounts, compute: _pytorch.Compute) -> Any:
        """Run and record the op; return NotImplemented for an op without a backward pass."""
        if self._store is None:
            self._store = Store(self._totals, self._budget, self._heuristic, self._strict)
        store, key = self._store, None
        tensors = store.torch.tensors(inputs)
        if not store.torch.records(tensors):
            return NotImplemented
        with store.lock:
            operation = store.begin(counts, compute, inputs, tensors, kind.scratch)
            if self._budget is not None:
                key = (counts.type, _signature(inputs))
                need = self._sizes.get(key)
                guess = store.torch.expected(compute, inputs) or 0 if need is None else need
                store.eviction.make_room(guess, counts, certain=need is not None)
        before = store.torch.state(inputs, tensors, kind.random)
        begin = perf_counter()
        try:
            with store.saving(operation):
                result = compute(inputs)
        except BaseException:
            operation.forget()
            raise
        seconds = perf_counter() - begin
        with store.lock:
            operation.cost = 1.0 if self._unit else seconds
            after = store.torch.state(inputs, tensors, kind.random)
            store.finish(operation, result, pure=before == after)
            if key is not None:
                if len(self._sizes) >= _KNOWN:  # numbers among the inputs may be others each time
                    self._sizes.clear()
                self._sizes[key] = operation.size
            store.eviction.make_room(0, counts)
        return result


def _signature(value: Any) -> Hashable:
    """Return a key of the inputs on which the bytes that an op makes depend."""
    if type(value) in (list, tuple):
        return tuple(map(_signature, value))
    if hasattr(value, "requires_grad"):
        return tuple(value.shape), value.dtype, value.requires_grad
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def _bytes(budget: int | str | None) -> int | None:
    """Return a budget as a number of bytes."""
    if isinstance(budget, str) and (found := _AMOUNT.fullmatch(budget)) is not None:
        power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if budget is None or isinstance(budget, int):
        return budget
    raise OptionError(f'budget is {budget!r}; give a number of bytes, or a text such as "2GiB" or "512 MB"')

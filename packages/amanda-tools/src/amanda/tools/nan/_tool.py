"""The tool: looks at what goes into each op and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import UNINITIALISED, StandardMapping
from amanda.tools.nan._result import Finding, NanResult
from amanda.tools.nan._summary import Summary, is_finite

_FLOATING = ("float", "bfloat", "half", "complex")


class NotFiniteError(AmandaError, ArithmeticError):
    """An op made NaN or Inf of finite values; `finding` tells which."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(f"the first NaN or Inf comes from {finding}")
        self.finding = finding


class NanTool(amanda.Tool):
    """Finds the ops at which NaN or Inf begins: all they were given is finite, what they give is not.

    stop: raise NotFiniteError at the first.  inf: look for Inf as well as for NaN.  backward: look at
    backward ops too.  limit: so many ops are kept.  `result` tells, `clear` starts anew.
    """

    def __init__(self, stop: bool = False, inf: bool = True, backward: bool = True, limit: int = 20) -> None:
        super().__init__()
        self._stop, self._inf, self._limit = stop, inf, limit
        self.clear()
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._forward)
        if backward:
            self.add_inst_for_op(self._backward, backward=True)

    @property
    def result(self) -> NanResult:
        """What was found so far."""
        return NanResult(self._findings, self._executions, self._passed_on, self._dropped)

    def clear(self) -> None:
        """Forget what was found; what was analysed stays."""
        self._findings: list[Finding] = []
        self._executions = self._passed_on = self._dropped = 0

    # ---- analysis ----

    def _forward(self, context: amanda.OpContext) -> None:
        if context["type"] in UNINITIALISED:
            return
        place = (context["phase"], context["type"], context.get_scope(), context.get_source())
        context.insert_before_op(
            self._entering, dtype=context["dtype"], side="forward", copied=context["in_place"]
        )
        context.insert_after_op(self._leaving, dtype=context["dtype"], side="forward", place=place)

    def _backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind == "accumulate_grad":
            return
        place = ("backward", kind, context.get_scope(), context.get_source())
        side = str(context.get_backward_op_id())
        context.insert_before_backward_op(self._entering, dtype=context["dtype"], side=side, copied=False)
        context.insert_after_backward_op(self._leaving, dtype=context["dtype"], side=side, place=place)

    # ---- execution ----

    @amanda.observer
    def _entering(self, *values: Any, dtype: Any, side: str, copied: bool, run: dict[str, Any]) -> None:
        tensors = _floating(values, dtype)
        if not all(self._is_good(tensor) for tensor in tensors.values()):
            run[side] = None
        elif copied:  # the op is about to write into one of them
            run[side] = {i: Summary.of(tensor, dtype(tensor)) for i, tensor in tensors.items()}
        else:
            run[side] = tensors

    @amanda.observer
    def _leaving(
        self, *values: Any, dtype: Any, side: str, place: tuple[str, str, str, str], run: dict[str, Any]
    ) -> None:
        given = run.pop(side, None)
        execution, self._executions = self._executions, self._executions + 1
        bad = {i: one for i, one in _floating(values, dtype).items() if not self._is_good(one)}
        if not bad:
            return
        if given is None:
            self._passed_on += 1
            return
        if len(self._findings) >= self._limit:
            self._dropped += 1
            return
        inputs = {
            i: one if isinstance(one, Summary) else Summary.of(one, dtype(one)) for i, one in given.items()
        }
        outputs = {i: Summary.of(one, dtype(one)) for i, one in bad.items()}
        finding = Finding(*place, execution, inputs, outputs)
        self._findings.append(finding)
        if self._stop:
            raise NotFiniteError(finding)

    def _is_good(self, tensor: Any) -> bool:
        if is_finite(tensor):
            return True
        return not self._inf and not Summary.of(tensor, "float32").nan


def _floating(values: Sequence[Any], dtype: Any) -> dict[int, Any]:
    """The tensors of floating or complex numbers among values, also in lists."""
    flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else (value,))]
    return {
        i: one
        for i, one in enumerate(flat)
        if (name := dtype(one)) is not None and name.startswith(_FLOATING)
    }

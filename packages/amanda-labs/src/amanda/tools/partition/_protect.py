"""The tool for protected parts: selected ops run in another process, which alone holds their parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.errors import ToolError
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.partition import _pytorch_protection, _pytorch_stand_ins
from amanda.tools.partition._ipc import ProtectError
from amanda.tools.partition._parts import PartsResult
from amanda.tools.results import Column, Result, amount, shortened
from amanda.tools.select import Selection, as_remarks

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch_protection import Protection

logger = logging.getLogger("amanda")


class ProtectedResult(Result):
    """A row for each op in the protected process, with the tensors and bytes that crossed for it.

    model: after `finalize`, the model that has its parameters back.
    """

    name: ClassVar[str] = "partition_protected"
    model: Any = None
    columns: ClassVar[Sequence[Column]] = (
        Column("phase"), Column("type"), Column("module", show=partial(shortened, width=32)),
        Column("source", show=partial(shortened, width=32)),
        Column("calls", show="{:,}".format, total=True, merge="sum"),
        Column("crossed", show=partial(amount, unit="B"), total=True, unit="B", merge="sum"),
        Column("sent > received", show=partial(shortened, width=60)),
    )  # fmt: skip

    def __init__(self, protection: Protection | None, text: str, remarks: Sequence[str]) -> None:
        self.traffic = [] if protection is None else list(protection.traffic.values())
        self.pid = None if protection is None else protection.pid
        self._selection_text, self.remarks = text, remarks

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the answer: how many parameters are protected, and what crossed."""
        parameter_records = [record for record in self.traffic if record.phase == "hold"]
        size = amount(sum(record.bytes for record in self.traffic), unit="B")
        if not parameter_records:
            return f"No parameter is protected by {self._selection_text}"
        return (
            f"{len(parameter_records)} parameters and buffers of {self._selection_text} are in process "
            f"{self.pid} alone; {size} crossed"
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, and for each parameter and optimizer."""
        return [
            (record.phase, record.type, record.module, record.source, record.calls, record.bytes,
             "; ".join(record.headers))
            for record in self.traffic
        ]  # fmt: skip

    def facts(self) -> Mapping[str, Any]:
        """Return the selection, and each op with the tensors that were declared."""
        return {
            "protect": self._selection_text,
            "declared": [
                {"phase": record.phase, "type": record.type, "module": record.module,
                 "forms": list(record.headers)}
                for record in self.traffic
            ],
        }  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return which values cross, and what the process does not defend against."""
        return [
            "Inputs, outputs and gradients of each selected op cross; values of parameters cross once, "
            "to the process. The program sees NaN in their place. This separates processes; it is no defence "
            "against programs of the same user.",
        ]


class ProtectTool(amanda.Tool):
    """Runs selected ops in a process of their own, which alone holds the parameters that they read.

    This separates processes; it is no defence against programs of the same user, which can read their memory.

    protect: "module=a|b.*", "type=linear", "exclude=a.b" or several of them, apart by a space; see
    `amanda.tools.select.Selection`.
    `finalize` brings the parameters back.  Raises ToolError for another text; ProtectError where an op
    cannot run there.
    """

    def __init__(self, protect: str) -> None:
        super().__init__()
        self._selection_text = protect
        self._selection = _parse_selection(protect)
        self._protection: Protection | None = None
        self.depends_on(
            StandardMapping(), MappingTool([["pytorch/*/eager", _pytorch_protection.provide_protection]])
        )
        self.add_inst_for_op(self._replace_op)

    @property
    def result(self) -> ProtectedResult:
        """Return the protected parameters, and the traffic of each op."""
        return ProtectedResult(
            self._protection, self._selection_text, as_remarks(self._selection.unmatched())
        )

    def write_onnx(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> PartsResult:
        """Write files of protected and public ops of an ONNX file; see `PartitionTool.write_parts`."""
        from amanda.tools.partition._onnx_files import write_protected

        return write_protected(
            _parse_selection(self._selection_text), self._selection_text, source, folder, analyse, about
        )

    def clear(self) -> None:
        """Reset the counts of traffic; parameters stay in the process."""
        if self._protection is not None:
            for record in self._protection.traffic.values():
                record.calls = record.bytes = 0

    def finalize(self, model: Any) -> ProtectedResult:
        """Bring the parameters back into a model, see `PartitionTool.finalize`."""
        if self._protection is not None and not self._protection.is_of(model):
            raise ProtectError(
                f"PartitionTool.finalize was given a {type(model).__name__} that has none of the protected "
                "parameters; give the model that ran in the scope"
            )
        result = self.result
        self.end()
        result.model = model
        return result

    def end(self) -> None:
        """Bring the parameters back into the program, and end the process, with its optimizers' state."""
        protection, self._protection = self._protection, None
        if protection is not None:
            self.load_state_dict({})  # drops the plans, which call the process
            protection.release()

    def _replace_op(self, context: amanda.OpContext) -> None:
        """Replace a selected op by its execution in the process; check that no other op reads a stand-in."""
        if context["phase"] != "forward":
            return
        if self._protection is None and "protection" in context:
            self._protection = context["protection"]()
        protection = self._protection
        if not self._selection(context):
            if protection is not None and "protection" in context:
                protection.stand_ins.check(context)
            return
        op_text = f"{context['type']} at {context.get_source() or context.get_op_type()}"
        if protection is None or "protection" not in context:
            raise ToolError(
                f"protect runs ops of PyTorch's eager mode in another process; {op_text} is of "
                f"{context.namespace}"
            )
        if _pytorch_stand_ins.shares_memory(context) and not protection.stand_ins.are_read_by(context):
            return  # a view of a tensor of the program is made in the program, where writes reach the tensor
        op = _pytorch_stand_ins.callable_of(context)
        protection.adopt(context)
        key, module = context.get_op_id(), context.get_scope()
        record = protection.traffic_record("forward", key, context["type"], module, context.get_source())
        logger.info("protect: %s in module %r runs in process %s", op_text, module, protection.pid)
        in_place, random = context["in_place"], _pytorch_stand_ins.is_random(context)
        first = context.get_inputs()[0] if in_place else None
        target = None if first is None or protection.stand_ins.find(first) is None else first
        context.replace_op(
            protection.run_in_process, record=record, op=op, in_place=in_place, random=random, key=key,
            target=target,
        )  # fmt: skip


def _parse_selection(text: str) -> Selection:
    """Return the selection that a text asks for.  Raises ToolError for another text."""
    form = "module=NAME|NAME, type=NAME|NAME or exclude=NAME|NAME, or several, apart by a space"
    if not isinstance(text, str):
        raise ToolError(f"protect is {text!r}; it is a text such as 'module=NAME|NAME' or 'type=NAME|NAME'")
    patterns_by_name: dict[str, list[str]] = {}
    for part in text.split():
        name, _, patterns = part.partition("=")
        if name not in ("module", "type", "exclude") or not patterns:
            raise ToolError(f"protect is {text!r}; it is {form}")
        patterns_by_name[name] = patterns.split("|")
    if not patterns_by_name:
        raise ToolError("protect is empty; give module=NAME|NAME or type=NAME|NAME")
    types, modules = patterns_by_name.get("type"), patterns_by_name.get("module")
    return Selection(types, modules, exclude=patterns_by_name.get("exclude"))

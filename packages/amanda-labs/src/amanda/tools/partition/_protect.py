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
from amanda.tools.partition import _pytorch, _pytorch_ops
from amanda.tools.partition._channel import ProtectError
from amanda.tools.partition._parts import PartsResult
from amanda.tools.results import Column, Result, amount, shortened
from amanda.tools.select import Selection, as_remarks

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch import Protection

logger = logging.getLogger("amanda")


class ProtectedResult(Result):
    """A row for each op in the protected process, and what crossed for it.

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
        self.crossed = [] if protection is None else list(protection.crossed.values())
        self.pid = None if protection is None else protection.pid
        self._text, self.remarks = text, remarks

    @property
    def title(self) -> str:  # type: ignore[override]
        """Return the answer: how many parameters are protected, and what crossed."""
        held = [one for one in self.crossed if one.phase == "hold"]
        size = amount(sum(one.bytes for one in self.crossed), unit="B")
        return (
            f"{len(held)} parameters and buffers of {self._text} are in process {self.pid} alone; "
            f"{size} crossed"
            if held
            else f"No parameter is protected by {self._text}"
        )

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each op, and for each parameter and optimizer."""
        return [
            (one.phase, one.type, one.module, one.source, one.calls, one.bytes, "; ".join(one.forms))
            for one in self.crossed
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return the selection, and each op with the tensors that were declared."""
        return {
            "protect": self._text,
            "declared": [
                {"phase": one.phase, "type": one.type, "module": one.module, "forms": list(one.forms)}
                for one in self.crossed
            ],
        }

    def notes(self) -> Sequence[str]:
        """Return what the process keeps, and what it does not."""
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
        self._text = protect
        self._selection = _selection(protect)
        self._protection: Protection | None = None
        self.depends_on(StandardMapping(), MappingTool([["pytorch/*/eager", _pytorch.rule]]))
        self.add_inst_for_op(self._analyse)

    @property
    def result(self) -> ProtectedResult:
        """Return what is protected, and what crossed."""
        return ProtectedResult(self._protection, self._text, as_remarks(self._selection.unmatched()))

    def write_onnx(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> PartsResult:
        """Write files of protected and public ops of an ONNX file; see `PartitionTool.write_parts`."""
        from amanda.tools.partition._onnx import write_protected

        return write_protected(_selection(self._text), self._text, source, folder, analyse, about)

    def clear(self) -> None:
        """Forget what crossed; parameters stay where they are."""
        if self._protection is not None:
            for one in self._protection.crossed.values():
                one.calls = one.bytes = 0

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
            self.load_state_dict({})
            protection.release()

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] != "forward":
            return
        if self._protection is None and "protection" in context:
            self._protection = context["protection"]()
        protection = self._protection
        if not self._selection(context):
            if protection is not None and "protection" in context:
                protection.stand_ins.check(context)
            return
        where = f"{context['type']} at {context.get_source() or context.get_op_type()}"
        if protection is None or "protection" not in context:
            raise ToolError(
                f"protect runs ops of PyTorch's eager mode in another process; {where} is of "
                f"{context.namespace}"
            )
        if _pytorch_ops.shares_memory(context) and not protection.stand_ins.are_read_by(context):
            return  # what is written into a view reaches the tensor of the program that it is a view of
        op = _pytorch_ops.callable_of(context)
        protection.adopt(context)
        key, module = context.get_op_id(), context.get_scope()
        place = protection.place("forward", key, context["type"], module, context.get_source())
        logger.info("protect: %s in module %r runs in process %s", where, module, protection.pid)
        in_place, random = context["in_place"], _pytorch_ops.is_random(context)
        first = context.get_inputs()[0] if in_place else None
        target = None if first is None or protection.stand_ins.of(first) is None else first
        context.replace_op(
            protection.run, place=place, op=op, in_place=in_place, random=random, key=key, target=target
        )


def _selection(text: str) -> Selection:
    """Return the selection that a text asks for.  Raises ToolError for another text."""
    form = "module=NAME|NAME, type=NAME|NAME or exclude=NAME|NAME, or several, apart by a space"
    if not isinstance(text, str):
        raise ToolError(f"protect is {text!r}; it is a text such as 'module=NAME|NAME' or 'type=NAME|NAME'")
    found: dict[str, list[str]] = {}
    for part in text.split():
        name, _, patterns = part.partition("=")
        if name not in ("module", "type", "exclude") or not patterns:
            raise ToolError(f"protect is {text!r}; it is {form}")
        found[name] = patterns.split("|")
    if not found:
        raise ToolError("protect is empty; give module=NAME|NAME or type=NAME|NAME")
    return Selection(found.get("type"), found.get("module"), exclude=found.get("exclude"))

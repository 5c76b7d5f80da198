"""Follows the channels of a model through one call of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import amanda
from amanda.tools._libraries import numpy as np
from amanda.tools.kit import TensorMap, leaves
from amanda.tools.mapping import StandardMapping
from amanda.tools.prune.channels._call import Call, Notes
from amanda.tools.prune.channels._labels import Families, Family, Part
from amanda.tools.prune.channels._rules import MOVES, RULES, fresh, unknown


@dataclass(frozen=True)
class Step:
    """An executed op: its word, its module's path, and families and extents of its tensors.

    moved: of an op that only moves elements, see `Call.moved`.
    """

    type: str
    module: str
    source: str
    read: Sequence[Part]
    made: Sequence[Part]
    moved: Callable[[Family], list[Family]] | None = None

    @property
    def place(self) -> str:
        """Return the op in words."""
        return f"{self.type} of {self.module or 'the model'}"


class Tracing(amanda.Tool):
    """Follows channels from op to op.

    steps: the ops in their order.  channels: families of parameters and buffers, by their names.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.notes = Notes()
        self.steps: list[Step] = []
        self.channels: dict[str, Families] = {}
        self.result: Any = None
        self._names: TensorMap[str] = TensorMap()
        self._known: TensorMap[Families] = TensorMap()
        for name, tensor in reversed(
            [*model.named_buffers(), *model.named_parameters(remove_duplicate=False)]
        ):
            self._names[tensor] = name
        self._given: list[tuple[Sequence[Any], list[Part]]] = []
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._analyse)

    def follow(self, model: Any, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a model, and keep whole what it returns; return that."""
        import torch

        with torch.enable_grad(), amanda.apply(self):  # without gradients, layers of attention are one op
            self.result = model(*example, **named)
        for value in tensors_in(self.result):
            self.notes.labels.leave(self._families(value), "the model returns them")
        self.notes.labels.settle()
        return self.result

    def _analyse(self, context: amanda.OpContext) -> None:
        if context["phase"] == "forward":
            facts = {
                "type": context["type"], "op_id": context.get_op_id(), "names": context.get_input_names(),
                "module": context.get_scope(), "source": context.get_source(),
                "compute": context.get_computation(),
            }  # fmt: skip
            context.insert_before_op(self._before, within=facts["type"])
            context.insert_after_op(self._after, **facts)

    @amanda.observer
    def _before(self, *inputs: Any, within: str) -> None:
        if within in ("batch_norm", "instance_norm"):
            for average in inputs[3:5]:
                self._families(average, is_followed=True)
        read = [(self._families(one), tuple(one.shape)) for one in leaves(inputs) if _is_tensor(one)]
        self._given.append((inputs, read))

    @amanda.observer
    def _after(
        self,
        *outputs: Any,
        type: str,
        op_id: int,
        names: Sequence[str],
        module: str,
        source: str,
        compute: Callable[[Sequence[Any]], Any],
    ) -> None:
        inputs, read = self._given.pop()
        made = [one for one in leaves(outputs) if _is_tensor(one)]
        place = f"{type} of {module or 'the model'}"
        call = Call(type, place, op_id, inputs, names, made, self._families, compute, self.notes, self.name)
        if any(families for families, _ in read):
            rule = RULES.get(type, unknown)
        else:
            rule = fresh
        found = rule(call) if made else unknown(call)
        for output, families in zip(made, found, strict=True):
            if families or self._known.get(output):
                self._known[output] = families
        parts = [(self._known.get(one) or (), tuple(one.shape)) for one in made]
        moved = call.moved if RULES.get(type) in MOVES else None
        self.steps.append(Step(type, module, source, read, parts, moved))

    def _families(self, tensor: Any, is_followed: bool = False) -> Families:
        """Return the families of a tensor; a parameter, or what is followed, has new ones at first."""
        found = self._known.get(tensor)
        if found is None and isinstance(tensor, _parameter()) | is_followed and _is_tensor(tensor):
            labels = self.notes.labels
            found = tuple(
                labels.fresh(extent).reshape([-1 if i == axis else 1 for i in range(tensor.ndim)])
                for axis, extent in enumerate(tensor.shape) if extent > 1
            )  # fmt: skip
            self._known[tensor] = found
            name = self._names.get(tensor)
            if name is not None:
                self.channels[name] = found
        return found or ()

    def name(self, tensor: Any) -> str | None:
        """Return the path of a parameter or buffer."""
        return self._names.get(tensor) if _is_tensor(tensor) else None

    def extents(self, part: Part, kept: Any) -> tuple[int, ...]:
        """Return the extents of a tensor when those labels are kept alone.  kept: a truth for each label."""
        families, shape = part
        found = list(shape)
        for family in families:
            alive = kept[family]
            for axis, extent in enumerate(family.shape):
                if extent > 1:
                    others = tuple(i for i in range(family.ndim) if i != axis)
                    found[axis] = int(np.any(alive, axis=others).sum())
        return tuple(found)


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors of what a model returns."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif _is_tensor(value):
        yield value


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _parameter() -> Any:
    import torch

    return torch.nn.Parameter

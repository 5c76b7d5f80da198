"""One execution of a protected op, as a function that PyTorch's autograd knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.partition._channel import ProtectError
from amanda.tools.partition._crossed import Crossed
from amanda.tools.partition._pytorch_bytes import packed, unpacked
from amanda.tools.partition._pytorch_ops import PLAIN
from amanda.tools.partition._pytorch_stand_ins import StandIns

if TYPE_CHECKING:
    from amanda.tools.partition._pytorch import Protection


class Inputs:
    """The inputs of an op as a message tells them.

    given: tensors that are sent.  held: tensors whose values the process has.
    Raises ProtectError for an input that cannot be sent.
    """

    def __init__(self, values: Sequence[Any], stand_ins: StandIns, where: str) -> None:
        self._stand_ins, self._where = stand_ins, where
        self.given: list[Any] = []
        self.held: list[Any] = []
        self.told = [self._tell(one) for one in values]

    def _tell(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            stand_in = self._stand_ins.of(value)
            if stand_in is not None:
                stand_in.check(value, self._where)
                self.held.append(value)
                return {"held": stand_in.path}
            self.given.append(value)
            return {"given": len(self.given) - 1}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop, value.step]}
        if isinstance(value, tuple):
            return {"tuple": [self._tell(one) for one in value]}
        if isinstance(value, list):
            return [self._tell(one) for one in value]
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, PLAIN):
            return value
        raise ProtectError(
            f"{self._where} was given a {type(value).__name__}, which is not sent to the protected process: "
            "tensors, numbers, texts, types and lists of these are"
        )


def run(
    protection: Protection, *inputs: Any, key: int, place: Crossed, op: str, in_place: bool, random: bool,
    target: Any,
) -> Any:  # fmt: skip
    """Run an op in the process.  target: the stand-in that the op writes; None where it writes none."""
    import torch

    if target is not None:
        inputs = (target, *inputs[1:])
    sent = Inputs(inputs, protection.stand_ins, f"{place.type} at {place.source}")
    records = torch.is_grad_enabled() and any(one.requires_grad for one in (*sent.given, *sent.held))
    backward = protection.place("backward", key, place.type, place.module, place.source)
    call = Call(protection, place, backward, random)
    header = {
        "kind": "forward", "op": op, "inputs": sent.told, "in_place": in_place, "random": random,
        "trained": [one.requires_grad for one in sent.given], "records": records,
    }  # fmt: skip
    made = _function().apply(call, header, len(sent.given), *sent.given, *sent.held)
    return inputs[0] if call.is_held else made if call.several else made[0]


@dataclass(eq=False)
class Call:
    """One execution of a protected op.  several: outputs; is_held: the output is a stand-in.

    trained: whether each output needs a gradient.
    """

    protection: Protection
    place: Crossed
    backward: Crossed
    random: bool
    number: int = -1
    several: bool = False
    is_held: bool = False
    trained: Sequence[bool] = ()

    def forward(self, header: dict[str, Any], given: Sequence[Any]) -> tuple[Any, ...]:
        """Return the outputs."""
        import torch

        protection = self.protection
        self.number = protection.number()
        tensors = [packed(one) for one in given]
        if self.random:
            tensors.append(packed(torch.get_rng_state()))
        header = {**header, "number": self.number, **protection.ended()}
        answer, made, size = protection.link.call(header, tensors)
        self.place.add([form for form, _ in tensors], [form for form, _ in made], size)
        if "other" in answer:
            raise ProtectError(
                f"{self.place.type} at {self.place.source} in module {self.place.module!r} gives a "
                f"{answer['other']}, and tensors alone leave the protected process: read numbers outside of "
                "the protected modules, or protect by type="
            )
        outputs = [unpacked(*one) for one in made]
        if self.random:
            torch.set_rng_state(outputs.pop())
        self.several, self.is_held, self.trained = answer["several"], answer["held"], answer["trained"]
        return tuple(outputs)

    def gradients(self, gradients: Sequence[Any]) -> Iterator[Any]:
        """Yield the gradients of what was given that needs one."""
        import torch

        protection = self.protection
        there = [i for i, one in enumerate(gradients) if one is not None]
        tensors = [packed(gradients[i]) for i in there]
        now = torch._C._current_graph_task_id()
        protection.passes.enter(now, protection)
        header = {"kind": "backward", "number": self.number, "outputs": there, "backward_pass": now}
        answer, made, size = protection.link.call(header, tensors)
        self.backward.add([form for form, _ in tensors], [form for form, _ in made], size)
        protection.passes.note(now, answer["parameters"])
        found = iter(made)
        for is_there in answer["there"]:
            yield unpacked(*next(found)) if is_there else None

    def __del__(self) -> None:
        self.protection.dropped.append(self.number)


@cache
def _function() -> Any:
    """Return the autograd function of a protected op."""
    import torch

    class Protected(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Call, header: dict[str, Any], count: int, *tensors: Any) -> Any:
            ctx.call, ctx.count = call, count
            ctx.wanted = header["trained"]
            outputs = call.forward(header, tensors[:count])
            pairs = zip(outputs, call.trained, strict=False)
            ctx.mark_non_differentiable(*(one for one, is_trained in pairs if not is_trained))
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            with amanda.disabled():
                found = list(ctx.call.gradients(gradients))[::-1]
            made = [found.pop() if is_wanted else None for is_wanted in ctx.wanted]
            return None, None, None, *made, *[None] * (len(ctx.needs_input_grad) - 3 - len(made))

    return Protected

"""Models of PyTorch, whose channels are removed in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar

import amanda
from amanda.backend import TensorMap
from amanda.tools.kit import leaves
from amanda.tools.libraries import numpy as np
from amanda.tools.prune.channels._call import Call
from amanda.tools.prune.channels._labels import Families, Family
from amanda.tools.prune.channels._plan import Plan
from amanda.tools.prune.channels._removal import ModuleRemoval, sizes_of
from amanda.tools.prune.channels._rules import RULES, Rule, fresh, unknown
from amanda.tools.prune.channels._simulation import over_kept, selected
from amanda.tools.prune.channels._subject import Axes, Masks, Subject
from amanda.tools.prune.channels._tracing import Tracing, tensors_in

UNREGISTERED = "a parameter that it reads is of no module of the model, as of a module in a plain list"


class Module(Subject):
    """A `torch.nn.Module`."""

    has_gradients = True
    selected, over_kept = staticmethod(selected), staticmethod(over_kept)

    def __call__(self, *example: Any, **named: Any) -> Any:
        """Call the module."""
        return self.model(*example, **named)

    def tracing(self) -> Tracing:
        """Return a tool that follows a call."""
        return ModuleTracing(self.model)

    def tensors(self) -> Mapping[str, Any]:
        """Return parameters and buffers, tied ones by each of their paths."""
        return {
            **dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())
        }  # fmt: skip

    def parameters(self) -> Mapping[str, Any]:
        """Return parameters."""
        return dict(self.model.named_parameters())

    def masks(self, axes: Axes) -> Masks:
        """Return masks of parameters, found by the tensor."""
        import torch

        found: TensorMap[Any] = TensorMap()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, axis, kept in axes:
            parameter = parameters.get(name)
            if parameter is not None:
                extents = [-1 if i == axis else 1 for i in range(parameter.ndim)]
                own = torch.from_numpy(kept).to(parameter.device).reshape(extents)
                former = found.get(parameter)
                found[parameter] = own if former is None else former & own
        return lambda value: found.get(value) if _is_tensor(value) else None

    def removal(self, plan: Plan, optimizer: Any = None) -> ModuleRemoval:
        """Return what removes channels, and shortens the state of an optimizer."""
        sizes = sizes_of(self.model, plan.tracing, plan.alive)
        kept = {(name, axis): own for name, axis, own in plan.axes()}
        whole = frozenset(plan.tracing.notes.whole_groups)
        return ModuleRemoval(self.model, kept, sizes, whole, optimizer)

    def smaller(self, plan: Plan, optimizer: Any) -> Any:
        """Remove channels of the module; return it."""
        removal = self.removal(plan, optimizer)
        try:
            removal.apply()
        except BaseException:
            removal.undo()
            raise
        return self.model

    def with_zeros(self, masks: Masks) -> Any:
        """Write masks into the parameters; return the module."""
        import torch

        with torch.no_grad(), amanda.disabled():
            for parameter in self.model.parameters():
                mask = masks(parameter)
                if mask is not None:
                    parameter.mul_(mask)
        return self.model

    def floats(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point tensors."""
        import torch

        for one in tensors_in(result):
            if one.is_floating_point():
                yield one.detach().double().cpu().numpy(), float(torch.finfo(one.dtype).eps)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the module is in evaluation mode, without gradients."""
        import torch

        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, mode in modes:
                module.training = mode

    def simulating(self) -> AbstractContextManager[None]:
        """Return a context in which layers of attention are the ops that they consist of."""
        return _fast_path.off()

    def time(self, *example: Any, **named: Any) -> None:
        """Call the module, and wait for its GPUs."""
        import torch

        self.model(*example, **named)
        for device in {one.device for one in self.model.parameters() if one.device.type == "cuda"}:
            torch.cuda.synchronize(device)


class FastPath:
    """PyTorch's switch for the fused ops of `TransformerEncoderLayer` and `MultiheadAttention`.

    A fused op normalises within itself over all channels, also those that are masked.
    """

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context without fused ops; the switch is as it was when the last of several ends."""
        import torch

        with self._lock:
            if not self._count:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    torch.backends.mha.set_fastpath_enabled(self._before)


_fast_path = FastPath()


class ModuleTracing(Tracing):
    """Follows channels through a call of a module, where tensors are objects.

    returned: why channels of results stay whole.
    """

    returned: ClassVar[str] = "the model returns them"

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model
        self._names: TensorMap[str] = TensorMap()
        self._known: TensorMap[Families] = TensorMap()
        for name, tensor in reversed(
            [*model.named_buffers(), *model.named_parameters(remove_duplicate=False)]
        ):
            self._names[tensor] = name
        self._given: list[tuple[Sequence[Any], list[Any]]] = []

    def follow(self, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call the module, and keep whole what it returns; return that."""
        import torch

        with torch.enable_grad(), _fast_path.off(), amanda.apply(self):
            self.result = self._model(*example, **named)
        for value in tensors_in(self.result):
            self.notes.labels.leave(self._families(value), self.returned)
        self.notes.labels.settle()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the module that has a parameter."""
        return name.rpartition(".")[0]

    def rule(self, type: str) -> Rule:
        """Return the rule for an op's word."""
        return RULES.get(type, unknown)

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
        tensors = (one for one in leaves(inputs) if _is_tensor(one))
        self._given.append((inputs, [(self._families(one), tuple(one.shape)) for one in tensors]))

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
        import torch

        inputs, read = self._given.pop()
        for one in leaves(inputs):
            if isinstance(one, torch.nn.Parameter) and self._name(one) is None:
                self.unfollowed[module or "the model"] = UNREGISTERED
        made = [one for one in leaves(outputs) if _is_tensor(one)]
        place = f"{type} of {module or 'the model'}"
        value = inputs[0] if inputs and _is_tensor(inputs[0]) else torch.empty(0)
        moved = partial(_moved, compute, inputs[1:], tuple(value.shape), value.stride())
        call = Call(type, place, op_id, inputs, names, made, self._families, moved, self.notes, self._name)
        own = self.rule(type)
        rule = own if any(families for families, _ in read) else fresh
        found = rule(call) if made else self.rule("")(call)
        for output, families in zip(made, found, strict=True):
            if families or self._known.get(output):
                self._known[output] = families
        known = [self._known.get(one) or () for one in made]
        self.step(call, own, module, source, read, known)

    def _families(self, tensor: Any, is_followed: bool = False) -> Families:
        """Return the families of a tensor; a parameter, or what is followed, has new ones at first."""
        import torch

        found = self._known.get(tensor)
        is_new = isinstance(tensor, torch.nn.Parameter) or (is_followed and _is_tensor(tensor))
        if found is None and is_new:
            name = self._names.get(tensor)
            found = self._known[tensor] = self.fresh(name, tuple(tensor.shape))
            if name is None:
                self.notes.labels.leave(found, UNREGISTERED)
        return found or ()

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(tensor) if _is_tensor(tensor) else None


def _moved(
    compute: Callable[[Sequence[Any]], Any], rest: Sequence[Any], shape: Any, strides: Any, family: Family
) -> list[Family]:
    """Return what an op makes of labels in the place of its first input: an array for each output."""
    import torch

    whole = torch.from_numpy(np.ascontiguousarray(family)).expand(shape)
    if 0 not in strides:  # a view may want the strides that the tensor has
        whole = torch.empty_strided(shape, strides, dtype=whole.dtype).copy_(whole)
    made = compute([whole, *rest])
    return [one.numpy() for one in leaves([made])]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)

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
from amanda.tools.prune.channels._labels import Families, Family, FollowedOp
from amanda.tools.prune.channels._plan import RemovalPlan
from amanda.tools.prune.channels._prunable_model import (
    Axes,
    Masks,
    PrunableModel,
    Tracing,
    compute_over_kept,
    selected,
    tensors_in,
)
from amanda.tools.prune.channels._removal import ModuleRemoval, extents_of, new_size_attributes
from amanda.tools.prune.channels._rules import RULES, Rule, fresh, unknown

UNREGISTERED = "a parameter that it reads is of no module of the model, as of a module in a plain list"


class TorchModel(PrunableModel):
    """A `torch.nn.Module`."""

    has_gradients = True
    selected, compute_over_kept = staticmethod(selected), staticmethod(compute_over_kept)

    def __call__(self, *example: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.model(*example, **kwargs)

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
        """Return masks of parameters, found by the tensor; buffers have none."""
        import torch

        # By tensor and not by name: tied parameters are one tensor under several names.
        masks: TensorMap[Any] = TensorMap()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, axis, keep_mask in axes:
            parameter = parameters.get(name)
            if parameter is not None:
                extents = [-1 if i == axis else 1 for i in range(parameter.ndim)]
                axis_mask = torch.from_numpy(keep_mask).to(parameter.device).reshape(extents)
                mask = masks.get(parameter)  # of axes before
                masks[parameter] = axis_mask if mask is None else mask & axis_mask
        return lambda value: masks.get(value) if _is_tensor(value) else None

    def removal(self, plan: RemovalPlan, optimizer: Any = None) -> ModuleRemoval:
        """Return a removal that also shortens the state of an optimizer."""
        sizes = new_size_attributes(self.model, plan.tracing, plan.kept_label_mask)
        keep_masks = {(name, axis): keep_mask for name, axis, keep_mask in plan.axes()}
        whole_groups = frozenset(plan.tracing.notes.whole_groups)
        return ModuleRemoval(self.model, keep_masks, sizes, whole_groups, optimizer)

    def make_smaller(self, plan: RemovalPlan, optimizer: Any) -> Any:
        """Remove channels of the module and the optimizer's state, or none on an error; return the module."""
        removal = self.removal(plan, optimizer)
        try:
            removal.apply()
        except BaseException:
            removal.undo()
            raise
        return self.model

    def extents(self) -> Mapping[str, Any]:
        """Return shapes of parameters and buffers, and attributes of modules that are sizes."""
        return extents_of(self.model)

    def write_masks(self, masks: Masks) -> Any:
        """Write masks into the parameters; return the module."""
        import torch

        with torch.no_grad(), amanda.disabled():
            for parameter in self.model.parameters():
                mask = masks(parameter)
                if mask is not None:
                    parameter.mul_(mask)
        return self.model

    def float_arrays(self, result: Any) -> Iterator[tuple[Any, float]]:
        """Yield floating-point tensors."""
        import torch

        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                yield tensor.detach().double().cpu().numpy(), float(torch.finfo(tensor.dtype).eps)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context with the module in evaluation mode, without gradients; its end restores modes."""
        import torch

        # Each module by itself: frozen parts of a model are in evaluation mode while the rest trains.
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

    def run_to_completion(self, *example: Any, **kwargs: Any) -> None:
        """Call the module, and wait for its GPUs."""
        import torch

        self.model(*example, **kwargs)
        for device in {
            parameter.device for parameter in self.model.parameters() if parameter.device.type == "cuda"
        }:
            torch.cuda.synchronize(device)


class FastPath:
    """PyTorch's switch for the fused ops of `TransformerEncoderLayer` and `MultiheadAttention`.

    A fused op normalises within itself over all channels, also those that are masked.
    """

    def __init__(self) -> None:
        # The switch is global to the process: scopes of several threads overlap, and the last one restores
        # it.  _count: of open scopes.  _before: the switch as the first of them found it.
        self._lock, self._count, self._before = threading.Lock(), 0, True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context without fused ops; the last of several that overlap restores the switch."""
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
        self._families_of: TensorMap[Families] = TensorMap()
        # Reversed, so that the first name of a tied parameter wins.
        for name, tensor in reversed(
            [*model.named_buffers(), *model.named_parameters(remove_duplicate=False)]
        ):
            self._names[tensor] = name
        # Inputs, and families and extents of their tensors, of ops that have begun, the innermost last.
        self._open_inputs: list[tuple[Sequence[Any], list[Any]]] = []

    def follow(self, example: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the model, keep the channels of its result whole, and return the result."""
        import torch

        # Without fused ops, in which channels cannot be followed.
        with torch.enable_grad(), _fast_path.off(), amanda.apply(self):
            self.result = self._model(*example, **kwargs)
        for value in tensors_in(self.result):
            self.notes.labels.leave_whole(self._families(value), self.returned)
        self.notes.labels.settle_blocks()
        return self.result

    def layer(self, name: str) -> str:
        """Return the path of the module that has a parameter."""
        return name.rpartition(".")[0]

    def rule(self, type: str) -> Rule:
        """Return the rule for an op's word."""
        return RULES.get(type, unknown)

    def _analyse(self, context: amanda.OpContext) -> None:
        """Insert the routines before and after a forward op."""
        if context["phase"] == "forward":
            facts = {
                "type": context["type"], "op_id": context.get_op_id(), "names": context.get_input_names(),
                "module": context.get_scope(), "source": context.get_source(),
                "compute": context.get_computation(),
            }  # fmt: skip
            # Families are read before the op: an op in place changes its input's.
            context.insert_before_op(self._push_inputs, op_type=facts["type"])
            context.insert_after_op(self._follow_channels, **facts)

    @amanda.observer
    def _push_inputs(self, *inputs: Any, op_type: str) -> None:
        """Push an op's inputs, with families and extents of tensors, for `_follow_channels`.

        Running averages of a norm get labels first.
        """
        if op_type in ("batch_norm", "instance_norm"):
            # Running averages are buffers, which have channels though they are not parameters.
            for average in inputs[3:5]:
                self._families(average, is_followed=True)
        tensors = (tensor for tensor in leaves(inputs) if _is_tensor(tensor))
        self._open_inputs.append(
            (inputs, [(self._families(tensor), tuple(tensor.shape)) for tensor in tensors])
        )

    @amanda.observer
    def _follow_channels(
        self,
        *outputs: Any,
        type: str,
        op_id: int,
        names: Sequence[str],
        module: str,
        source: str,
        compute: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Follow an op by its rule; store the families of its outputs, and append it to `traced_ops`.

        Pops the inputs that `_push_inputs` pushed, and notes in `unfollowed` a module that reads a parameter
        without a name in the model.
        """
        import torch

        # A stack: ops of a composite run between the two routines of the outer one.
        inputs, input_parts = self._open_inputs.pop()
        self._note_unregistered(inputs, module)
        output_tensors = [tensor for tensor in leaves(outputs) if _is_tensor(tensor)]
        place = f"{type} of {module or 'the model'}"
        # With its strides, on which it depends whether the op can make a view.
        moved_tensor = inputs[0] if inputs and _is_tensor(inputs[0]) else torch.empty(0)
        move = partial(_move_labels, compute, inputs[1:], tuple(moved_tensor.shape), moved_tensor.stride())
        call = FollowedOp(
            type=type, place=place, key=op_id, inputs=inputs, names=names, outputs=output_tensors,
            find_families=self._families, move=move, notes=self.notes, name_of=self._name,
        )  # fmt: skip
        op_rule = self.rule(type)
        # Most ops of a model compute sizes and masks without channels.
        rule = op_rule if any(families for families, _ in input_parts) else fresh
        if not output_tensors:  # nothing shows what becomes of the channels, as for an op without a rule
            rule = self.rule("")
        output_families = rule(call)
        for output, families in zip(output_tensors, output_families, strict=True):
            # An op in place without channels overwrites those that the tensor had.
            if families or self._families_of.get(output):
                self._families_of[output] = families
        present_families = [self._families_of.get(tensor) or () for tensor in output_tensors]
        self.note_op(call, op_rule, module, source, input_parts, present_families)

    def _note_unregistered(self, inputs: Sequence[Any], module: str) -> None:
        """Note in `unfollowed` a module whose op reads a parameter without a name in the model."""
        import torch

        for tensor in leaves(inputs):
            if isinstance(tensor, torch.nn.Parameter) and self._name(tensor) is None:
                self.unfollowed[module or "the model"] = UNREGISTERED

    def _families(self, tensor: Any, is_followed: bool = False) -> Families:
        """Return the families of a tensor, () for an unknown one; a new parameter gets new labels.

        is_followed: True to give new labels to another new tensor too.  A tensor that the model does not name
        is left whole.
        """
        import torch

        families = self._families_of.get(tensor)
        is_new = isinstance(tensor, torch.nn.Parameter) or (is_followed and _is_tensor(tensor))
        if families is None and is_new:
            name = self._names.get(tensor)
            families = self._families_of[tensor] = self.new_families(name, tuple(tensor.shape))
            if name is None:
                self.notes.labels.leave_whole(families, UNREGISTERED)
        return families or ()

    def _name(self, tensor: Any) -> str | None:
        return self._names.get(tensor) if _is_tensor(tensor) else None


def _move_labels(
    compute: Callable[[Sequence[Any]], Any],
    other_inputs: Sequence[Any],
    shape: Any,
    strides: Any,
    family: Family,
) -> list[Family]:
    """Return a family of an op's first input, moved as the op moves elements, for each output.

    shape, strides: of the first input.
    """
    import torch

    labels = torch.from_numpy(np.ascontiguousarray(family)).expand(shape)
    # A view may need the strides that the tensor has; those of an expanded tensor need no copy.
    is_expanded = 0 in strides
    if not is_expanded:
        labels = torch.empty_strided(shape, strides, dtype=labels.dtype).copy_(labels)
    outputs = compute([labels, *other_inputs])
    return [tensor.numpy() for tensor in leaves([outputs])]


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)

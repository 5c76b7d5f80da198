"""Parameters of PyTorch, of which ops read views, and whose values may lie elsewhere.

The values may be in memory, in shards on several ranks (FSDP2, tensor parallelism), or on the host or the
disk, from where accelerate brings them for each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import RequiredNames
from amanda.tools.weights._parameters import (
    ParameterError,
    StoredParameter,
    StridedLayout,
    StridedStore,
    Undo,
    ValueUpdate,
    tensor_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Part = StridedLayout | None
_REQUIRED = RequiredNames("amanda.tools.weights", "torch", "torch:Tensor._base")


class TorchParameters(StridedStore):
    """Parameters and other leaves of autograd; a part is a view by extents, strides and offset."""

    def __init__(self) -> None:
        _REQUIRED.check()

    def owner(self, tensor: Tensor) -> Tensor | None:
        """Return the parameter or leaf that a tensor is, or is a view of; None for a computed tensor."""
        import torch

        base = tensor if tensor._base is None else tensor._base
        # `_base` is private, but the only way from a view to its tensor. A frozen parameter is one too; a
        # plain tensor counts as a parameter if it is trained.
        is_leaf = isinstance(base, torch.nn.Parameter) or (base.requires_grad and base.is_leaf)
        return base if is_leaf else None

    def read(self, parameter: Any, part: Part) -> Tensor:
        """Return a view of a part, outside autograd."""
        values: Tensor = tensor_of(parameter).detach()
        return values if part is None else values.as_strided(*part)

    def overlaps(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if two parts have elements in common."""
        first, second = part or whole, other_part or whole
        # Disjoint ranges of memory need no comparison of elements, which is slow.
        are_disjoint = min(first.end, second.end) <= max(first.offset, second.offset)
        return not are_disjoint and bool(self._shared_element_mask(first, second).any())

    def covers(self, part: Part, other_part: Part, whole: StridedLayout) -> bool:
        """Return True if a part has every element of another."""
        return part is None or bool(self._shared_element_mask(part, other_part or whole).all())

    def _shared_element_mask(self, part: StridedLayout, other_part: StridedLayout) -> Tensor:
        """Return a mask of another part, True at elements that a part has too."""
        import torch

        all_true = torch.ones((), dtype=torch.bool).expand(tuple(part.extents))
        return self.transfer([(all_true, part)], other_part, other_part, fill=False)

    def transfer(
        self, pieces: Sequence[tuple[Tensor, Part]], part: Part, whole: StridedLayout, fill: Any
    ) -> Tensor:
        """Return the values of a part, from values of other parts; `fill` where no piece has an element.

        pieces: values, each with the part that they are of; the last counts.  whole: layout of the parameter.
        """
        import torch

        parts = (part, *(piece_part for _, piece_part in pieces))
        layouts = [whole if layout is None else layout for layout in parts]
        # The memory spans the parts alone: a slice of an embedding of gigabytes costs what the slice has.
        start = min(layout.offset for layout in layouts)
        end = max(layout.end for layout in layouts)
        part_layout, *piece_layouts = [layout._replace(offset=layout.offset - start) for layout in layouts]
        # State that is created in inference mode could not be used in training afterwards.
        with torch.inference_mode(False):
            like, _ = pieces[0]
            memory = torch.full((end - start,), fill, dtype=like.dtype, device=like.device)
            for layout, (values, _) in zip(piece_layouts, pieces, strict=True):
                view = memory.as_strided(*layout)
                for axis, stride in enumerate(layout.strides):
                    if stride == 0:  # of an expanded parameter: all places along the axis are one element
                        view, values = view.narrow(axis, 0, 1), values.narrow(axis, 0, 1)
                view.copy_(values)
            return memory.as_strided(*part_layout).clone()

    def sum_repeats(self, gradient: Tensor, part: Part) -> Tensor:
        """Return the gradient of a part in which elements of an expanded parameter come once each."""
        axes = [axis for axis, stride in enumerate(part.strides if part else ()) if stride == 0]
        return gradient.sum(axes, keepdim=True).expand_as(gradient) if axes else gradient

    def parameters(self, model: Any) -> Iterator[TorchParameter]:
        """Yield each parameter of a module once, or each entry of a list; raise ParameterError for others."""
        import torch

        if isinstance(model, torch.nn.Module):
            # Modules are walked instead of `named_parameters`, as an offloaded parameter is found by its
            # module; tied parameters come once.
            yielded: set[int] = set()
            for module in model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in yielded:
                        yielded.add(id(parameter))
                        yield TorchParameter(parameter, module, name)
        elif isinstance(model, Iterable) and not isinstance(model, torch.Tensor):
            yield from map(TorchParameter, model)
        else:
            raise ParameterError(
                f"{type(model).__name__} has no parameters; give a module, or a list of parameters"
            )


class TorchParameter(StoredParameter):
    """A parameter of a module; its identity is that of `amanda.Tool.identity_of`."""

    def __init__(self, parameter: Tensor, module: Module | None = None, name: str = "") -> None:
        super().__init__(amanda.Tool.identity_of(parameter, module), parameter)
        self._module, self._name = module, name

    def read(self) -> Tensor:
        """Return the values of the whole parameter, in its own shape and type, without autograd.

        Writing into them may not change the parameter.  Of a distributed one every rank has to call this.
        Raises ParameterError for one that has no values.
        """
        # accelerate leaves parameters on the meta device between calls, and their numbers in a mapping of its
        # hook.
        if self._parameter.is_meta:
            values, key = _find_offloaded(self._module, self._name)
            offloaded: Tensor = values[key]
            return offloaded
        detached: Any = self._parameter.detach()
        # By attribute and not by class, which would import torch.distributed.tensor for models without
        # shards.
        whole: Tensor = detached.full_tensor() if hasattr(detached, "full_tensor") else detached
        return whole

    def change(self, update: ValueUpdate, part: Part = None, undo: Undo | None = None) -> None:
        """Write the values that `update` returns for the present values of a part, see StoredParameter.

        Raises ParameterError as `write` does, and for a parameter that is packed.
        """
        import torch

        # The way back is registered before the write, so that an interrupt in between is undone too.
        undo = [] if undo is None else undo
        with torch.no_grad():
            # Neither offloaded by accelerate nor in shards.
            is_plain = not self._parameter.is_meta and not hasattr(self._parameter, "full_tensor")
            if is_plain and hasattr(self._parameter, "__tensor_flatten__"):
                class_name = type(self._parameter.data).__name__
                raise ParameterError(
                    f"parameter {self._name} is a {class_name}, which is packed: write the model before"
                )
            # A part may span several ranks: shards are gathered, changed and distributed again.
            whole = self._parameter if is_plain else self.read().clone()
            view = whole if part is None else whole.as_strided(*part)
            new = update(view.detach())
            if self._parameter.is_meta:
                undo.append(partial(self.write, whole.clone()))
            else:
                local = view if is_plain else self._parameter.to_local()
                undo.append(partial(_copy_into, local, local.detach().clone()))
            view.copy_(new)
            if not is_plain:
                self.write(whole)

    def write(self, values: Tensor) -> None:
        """Write values of the whole parameter, in its own shape.

        Of a distributed parameter each rank writes its part, so every rank has to call this.
        Raises ParameterError for one that lies in a file of safetensors, which accelerate only reads.
        """
        import torch

        with torch.no_grad():
            if self._parameter.is_meta:
                _write_offloaded(*_find_offloaded(self._module, self._name), values)
            elif hasattr(self._parameter, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                mesh, placements = self._parameter.device_mesh, self._parameter.placements
                self._parameter.copy_(distribute_tensor(values, mesh, placements))
            else:
                self._parameter.copy_(values)


def _copy_into(tensor: Tensor, values: Tensor) -> None:
    """Write values into a tensor, outside autograd."""
    import torch

    with torch.no_grad():
        tensor.copy_(values)


def _find_offloaded(module: Module | None, name: str) -> tuple[Any, str]:
    """Return the mapping in which accelerate keeps a parameter's values, and the key; else ParameterError."""
    # Private to accelerate, which has no function that returns the values of an offloaded parameter.
    hook: Any = getattr(module, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", [hook]):
        values, key = getattr(candidate, "weights_map", None), name
        if values is not None:
            # Hooks of inner modules wrap the mapping of the model, one prefix each.
            while hasattr(values, "prefix"):
                values, key = values.dataset, values.prefix + key
            return values, key
    raise ParameterError(
        f"parameter {name} of {type(module).__name__} is on the meta device, so it has no values"
    )


def _write_offloaded(values: Any, key: str, new: Tensor) -> None:
    """Write values where accelerate keeps them, in memory or on disk; ParameterError for safetensors."""
    # accelerate's loader has a dict of what stays in memory, beside the index of its files on disk.
    in_memory = values if isinstance(values, dict) else values.state_dict
    if key in in_memory:
        in_memory[key].copy_(new)
        return
    from accelerate.utils import offload_weight

    file = values.index[key].get("safetensors_file")
    if file is not None:
        raise ParameterError(
            f"{key} lies in {file}, which accelerate only reads; load the model without offloading"
        )
    offload_weight(new.to(values[key].dtype), key, values.save_folder, values.index)

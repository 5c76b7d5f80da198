"""Removes channels of the parameters of a PyTorch model, in place, and can put them back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._prunable_model import Tracing

_EXTENTS = {
    "out_channels": 0, "in_channels": 1, "out_features": 0, "in_features": 1, "num_features": 0,
    "num_channels": 0, "embedding_dim": 1, "nx": 0, "nf": 1,
}  # fmt: skip
"""Attributes of layers that say how long an axis of `weight` is; of running averages where there is none."""
_SIZE_NAMES = re.compile(
    r"head|dim|size|shape|(^|_)chs?($|_)|channel|feature|width|hidden|plane|inner|embed|filter|num_groups"
)
_HEAD_COUNT_NAMES = re.compile(r"head(?!.*(dim|size))")
_RATIO_NAMES = re.compile(r"num_key_value_groups|n_rep|kv_groups|scale")
"""Names of attributes with sizes; of these, with a number of heads; and with no size, such as a ratio."""


def _is_size_name(name: str) -> bool:
    """Return True for the name of an attribute that a removal of channels may set anew."""
    is_extent = name in _EXTENTS or name in ("groups", "normalized_shape")
    return is_extent or bool(_SIZE_NAMES.search(name) and not _RATIO_NAMES.search(name))


def size_attributes(module: Any) -> dict[str, Any]:
    """Return the attributes of a module that a removal may set anew: extents, and tuples of extents."""
    return {
        name: value
        for name, value in vars(module).items()
        if _is_size_name(name)
        # `type` and not isinstance: True is an int.
        and (type(value) is int or (type(value) is tuple and all(type(extent) is int for extent in value)))
    }


def extents_of(model: Any) -> dict[str, Any]:
    """Return shapes of parameters and buffers, and attributes that are sizes, by all their names."""
    extents: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        tensors = {**module._parameters, **module._buffers}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
        prefix = f"{path}." if path else ""
        extents |= {prefix + name: extent for name, extent in (size_attributes(module) | shapes).items()}
    return extents


class ModuleRemoval:
    """Removes what is not kept, of parameters, buffers, gradients, attributes and an optimizer's state.

    model: the module.  keep_masks: places that are kept, by parameter or buffer and axis.  sizes: new values
    of attributes, by a module's path.  whole_groups: weights whose number of groups changes.
    """

    def __init__(
        self,
        model: Any,
        keep_masks: Mapping[tuple[str, int], Any],
        sizes: Mapping[str, Mapping[str, Any]],
        whole_groups: frozenset[str],
        optimizer: Any = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._keep_masks, self._sizes, self._whole_groups = keep_masks, sizes, whole_groups
        self._before: list[tuple[Any, str, Any]] = []  # owner, attribute or key, and former value, in order

    def apply(self) -> None:
        """Remove channels from the model.

        Raises PruneError for an optimizer with state of other shapes than its parameters.
        """
        _check_state_shapes(self._optimizer)  # first, as it raises before anything changes
        model = self._model
        # All axes of a tensor at once: a change of the data costs a copy.
        kept_indices: dict[str, dict[int, Any]] = {}  # by name and axis
        for (name, axis), keep_mask in self._keep_masks.items():
            kept_indices.setdefault(name, {})[axis] = np.flatnonzero(keep_mask)
        shortened_tensors: dict[int, Any] = {}
        for name, indices_by_axis in kept_indices.items():
            path, _, attribute = name.rpartition(".")
            tensor = getattr(model.get_submodule(path), attribute)
            self._shorten(tensor, indices_by_axis)
            shortened_tensors[id(tensor)] = tensor
        for path, module in model.named_modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if any(id(tensor) in shortened_tensors for tensor in tensors):
                self._update_extents(path, module)
        for path, sizes in self._sizes.items():
            for attribute, size in sizes.items():
                self._set_attribute(model.get_submodule(path), attribute, size)

    def undo(self) -> None:
        """Restore all values, those that changed last first."""
        import torch

        for owner, attribute, value in reversed(self._before):
            if isinstance(owner, dict):
                owner[attribute] = value
            elif attribute == "data":
                _set_data(owner, value)
            elif isinstance(owner, torch.Tensor):
                owner.grad = value
            else:
                setattr(owner, attribute, value)
        self._before.clear()

    def _shorten(self, tensor: Any, indices_by_axis: Mapping[int, Any]) -> None:
        """Keep these places of a tensor, its gradient and optimizer's state; store old ones for `undo`."""
        import torch

        def select_kept(whole: Any) -> Any:
            """Return a tensor with the places that are kept."""
            for axis, indices in indices_by_axis.items():
                whole = whole.index_select(axis, torch.from_numpy(indices).to(whole.device))
            return whole

        shape, gradient = tensor.shape, tensor.grad
        # In the order of the changes; `undo` goes backwards.
        self._before += [(tensor, "grad", gradient), (tensor, "data", tensor.data)]
        # A gradient has to have the shape of its tensor, so that it is taken off while the data change.
        tensor.grad = None
        _set_data(tensor, select_kept(tensor.data))
        if gradient is not None:
            tensor.grad = select_kept(gradient.detach())
        state = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        for name, value in state.items():
            # Moments have the parameter's shape; counters of steps have none.
            if isinstance(value, torch.Tensor) and value.shape == shape:
                self._before.append((state, name, value))
                state[name] = select_kept(value)

    def _update_extents(self, path: str, module: Any) -> None:
        """Set the attributes that say how long a layer's axes are, such as `out_channels`, from its weight.

        Does nothing for a module without a weight or running averages.
        """
        import torch

        weight = getattr(module, "weight", None)
        if weight is None:  # a batch norm without weights has averages
            weight = getattr(module, "running_mean", None)
        if weight is None:
            return
        # Read before they are set anew below.
        groups = getattr(module, "groups", getattr(module, "num_groups", 1))
        name = f"{path}.weight" if path else "weight"
        if name in self._whole_groups and (name, 0) in self._keep_masks:
            keep_mask = self._keep_masks[name, 0]
            groups = groups * int(keep_mask.sum()) // len(keep_mask)
            self._set_attribute(module, "groups" if hasattr(module, "groups") else "num_groups", groups)
        nn = torch.nn
        # Their weight has inputs first.
        has_inputs_first = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
        for attribute, axis in _EXTENTS.items():
            if isinstance(getattr(module, attribute, None), int) and axis < weight.ndim:
                axis = 1 - axis if has_inputs_first else axis
                extent = weight.shape[axis]
                # A grouped convolution's weight has the inputs of one group.
                if axis == 1 and isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                    extent *= groups
                self._set_attribute(module, attribute, extent)
        if isinstance(getattr(module, "normalized_shape", None), tuple):
            self._set_attribute(module, "normalized_shape", tuple(weight.shape))

    def _set_attribute(self, owner: Any, attribute: str, value: Any) -> None:
        """Set an attribute, and store the old value for `undo`."""
        old_value = getattr(owner, attribute)
        setattr(owner, attribute, value)
        self._before.append((owner, attribute, old_value))


def _check_state_shapes(optimizer: Any) -> None:
    """Raise PruneError for an optimizer whose state of a parameter has another shape."""
    import torch

    for parameter, state in () if optimizer is None else optimizer.state.items():
        for name, value in state.items():
            is_per_element = isinstance(value, torch.Tensor) and value.numel() > 1
            if is_per_element and value.shape != parameter.shape:
                raise PruneError(
                    f"{type(optimizer).__name__} keeps {name} of shape {tuple(value.shape)} for a parameter "
                    f"of shape {tuple(parameter.shape)}, which cannot follow the removal: make another "
                    "optimizer after it"
                )


def _set_data(tensor: Any, data: Any) -> None:
    """Give a tensor other memory; the tensor stays the same object, for optimizers and tied layers.

    Autograd keeps the old extents in a node of its own, which a change of the type renews.
    """
    import torch

    other_dtype = torch.float32 if data.dtype == torch.float64 else torch.float64
    tensor.data = torch.empty(0, dtype=other_dtype, device=data.device)
    tensor.data = data


def new_size_attributes(model: Any, tracing: Tracing, kept_label_mask: Any) -> dict[str, dict[str, Any]]:
    """Return new values for attributes that modules reshape by, such as the number of heads.

    An attribute is such if its name speaks of sizes and it has the extent of an axis that changes, but of no
    axis that stays, unless it is the number of heads.  Ops of a module that `forward` makes anew, and that is
    no part of the model, count as ops of the module that calls it.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    new_extents_by_path, unchanged_by_path = _changes_of_extents(modules, tracing, kept_label_mask)
    sizes: dict[str, dict[str, Any]] = {}
    for path, new_extents_by_old in new_extents_by_path.items():
        for name, value in vars(modules[path]).items():
            speaks_of_size = _SIZE_NAMES.search(name) and not _RATIO_NAMES.search(name)
            if not speaks_of_size or name in _EXTENTS:  # those are set with the layer's weight
                continue
            unchanged = set() if _HEAD_COUNT_NAMES.search(name) else unchanged_by_path.get(path, set())
            # Where one extent becomes two different ones, no attribute says which it means.
            new_sizes = {
                old: next(iter(new_extents))
                for old, new_extents in new_extents_by_old.items()
                if len(new_extents) == 1 and old not in unchanged
            }
            # `type` and not isinstance: True is an int, and an attribute such as `use_head` no size.
            if type(value) is int and value in new_sizes:
                sizes.setdefault(path, {})[name] = new_sizes[value]
            elif type(value) is tuple and any(type(size) is int and size in new_sizes for size in value):
                sizes.setdefault(path, {})[name] = tuple(new_sizes.get(size, size) for size in value)
    return sizes


def _changes_of_extents(
    modules: Mapping[str, Any], tracing: Tracing, kept_label_mask: Any
) -> tuple[dict[str, dict[int, set[int]]], dict[str, set[int]]]:
    """Return the new extents for each old one, and extents of reshapes that stay, by a module's path."""
    new_extents_by_path: dict[str, dict[int, set[int]]] = {}
    unchanged_by_path: dict[str, set[int]] = {}
    for op in tracing.traced_ops:
        path = op.module
        # An op of a module that `forward` has made belongs to the module around it.
        while path not in modules:
            path = path.rpartition(".")[0]
        for families, shape in (*op.inputs, *op.outputs):
            new_shape = tracing.kept_extents((families, shape), kept_label_mask)
            for family in families:
                for axis, extent in enumerate(family.shape):  # 1 where the family does not vary
                    if extent > 1 and new_shape[axis] != extent:
                        new_extents_by_old = new_extents_by_path.setdefault(path, {})
                        new_extents_by_old.setdefault(extent, set()).add(new_shape[axis])
            if op.type in ("reshape", "expand"):
                # An extent that also stays, such as a number of classes that equals a width, is left.
                unchanged = {old for old, new in zip(shape, new_shape, strict=True) if old == new}
                unchanged_by_path.setdefault(path, set()).update(unchanged)
    return new_extents_by_path, unchanged_by_path

"""The parameters of a PyTorch model, and how to read and write them wherever their values lie.

The values may be in memory, in shards on several ranks (FSDP2, tensor parallelism), or on the host or the
disk, from where accelerate brings them for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit._holders import HeldError, Undo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


class Held:
    """One parameter of a model.

    identity: the number by which tools know it, see `amanda.Tool.identity_of`.
    """

    def __init__(self, parameter: Tensor, module: Module | None = None, name: str = "") -> None:
        self.identity = amanda.Tool.identity_of(parameter, module)
        self._parameter, self._module, self._name = parameter, module, name

    def read(self) -> Tensor:
        """Return the values of the whole parameter, in its own shape and type, without autograd.

        Writing into them may not change the parameter.  Of a distributed one every rank has to call this.
        Raises HeldError for one that has no values.
        """
        if self._parameter.is_meta:
            values, key = _offloaded(self._module, self._name)
            found: Tensor = values[key]
            return found
        held: Any = self._parameter.detach()
        whole: Tensor = held.full_tensor() if hasattr(held, "full_tensor") else held
        return whole

    def change(
        self,
        changed: Callable[[Tensor], Tensor],
        form: tuple[Sequence[int], Sequence[int], int] | None = None,
        undo: Undo | None = None,
    ) -> None:
        """Give the parameter the values that `changed` makes of its present ones.

        form: extents, strides and offset of the part of the parameter that is given to `changed`.
        undo: gets a function that gives back what this process had, before that is written.
        Raises HeldError as `write` does, and for a parameter that is packed.
        """
        import torch

        undo = [] if undo is None else undo
        with torch.no_grad():
            plain = not self._parameter.is_meta and not hasattr(self._parameter, "full_tensor")
            if plain and hasattr(self._parameter, "__tensor_flatten__"):
                kind = type(self._parameter.data).__name__
                raise HeldError(
                    f"parameter {self._name} is a {kind}, which is packed: write the model before"
                )
            whole = self._parameter if plain else self.read().clone()
            part = whole if form is None else whole.as_strided(*form)
            new = changed(part.detach())
            if self._parameter.is_meta:
                undo.append(partial(self.write, whole.clone()))
            else:
                own = part if plain else self._parameter.to_local()  # type: ignore[attr-defined]
                undo.append(partial(_copy, own, own.detach().clone()))
            part.copy_(new)
            if not plain:
                self.write(whole)

    def write(self, values: Tensor) -> None:
        """Give the parameter these values, in its own shape.

        Of a distributed parameter each rank writes its part, so every rank has to call this.
        Raises HeldError for one that lies in a file of safetensors, which accelerate only reads.
        """
        import torch

        with torch.no_grad():
            if self._parameter.is_meta:
                _write_offloaded(*_offloaded(self._module, self._name), values)
            elif hasattr(self._parameter, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                mesh, placements = self._parameter.device_mesh, self._parameter.placements  # type: ignore[attr-defined]
                self._parameter.copy_(distribute_tensor(values, mesh, placements))
            else:
                self._parameter.copy_(values)


def _copy(tensor: Tensor, values: Tensor) -> None:
    import torch

    with torch.no_grad():
        tensor.copy_(values)


def parameters(model: Any) -> Iterator[Held]:
    """Yield each parameter of a PyTorch module, or of a list of parameters, once.

    Raises HeldError for another value.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        met: set[int] = set()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in met:
                    met.add(id(parameter))
                    yield Held(parameter, module, name)
    elif isinstance(model, Iterable) and not isinstance(model, torch.Tensor):
        yield from map(Held, model)
    else:
        raise HeldError(f"{type(model).__name__} has no parameters; give a module, or a list of parameters")


def _offloaded(module: Module | None, name: str) -> tuple[Any, str]:
    """Return the mapping in which accelerate keeps the values of a module's parameter, and the key."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        values, key = getattr(one, "weights_map", None), name
        if values is not None:
            while hasattr(values, "prefix"):
                values, key = values.dataset, values.prefix + key
            return values, key
    raise HeldError(f"parameter {name} of {type(module).__name__} is on the meta device, so it has no values")


def _write_offloaded(values: Any, key: str, new: Tensor) -> None:
    in_memory = values if isinstance(values, dict) else values.state_dict
    if key in in_memory:
        in_memory[key].copy_(new)
        return
    from accelerate.utils import offload_weight

    file = values.index[key].get("safetensors_file")
    if file is not None:
        raise HeldError(
            f"{key} lies in {file}, which accelerate only reads; load the model without offloading"
        )
    offload_weight(new.to(values[key].dtype), key, values.save_folder, values.index)

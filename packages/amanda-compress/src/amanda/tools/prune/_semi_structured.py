"""Compression of 2:4 weights of PyTorch for GPUs that multiply them faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._weight import PrunedWeight
from amanda.tools.weights import parameter_store

_TYPES = ("float16", "bfloat16")  # CUTLASS stores float32 as 1:2, not 2:4
_DEVICE, _CAPABILITY = "cuda", (8, 0)


class SemiStructured:
    """The linear layers of a model whose weights are pruned 2:4.

    dense: weights that stay dense, by path, and the reasons.
    Raises PruneError where all weights stay dense.
    """

    def __init__(self, model: Any, weights: Iterable[PrunedWeight]) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise PruneError(
                f"finalize was given a {type(model).__name__}; semi_structured=True is for a torch.nn.Module"
            )
        self.dense: dict[str, str] = {}
        self._layers = list(
            self._suitable_layers(model, {weight.holder: weight for weight in weights if weight.is_ready})
        )
        self._check_any_layer()

    def _suitable_layers(self, model: Any, weights: dict[Any, PrunedWeight]) -> Iterator[tuple[str, Any]]:
        """Yield paths of weights that can be compressed, and their layers; write the others to `dense`."""
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                weight = weights.get(parameter_store(parameter).identity(parameter))
                if weight is None:
                    continue
                parameter_path = f"{path}.{name}" if path else name
                reason = _why_dense(module, name, parameter, weight)
                if reason is None:
                    yield parameter_path, module
                else:
                    self.dense[parameter_path] = reason

    def _check_any_layer(self) -> None:
        """Raise PruneError, with the reasons, if no layer is left."""
        if not self._layers:
            first = {why: path for path, why in reversed(self.dense.items())}
            counts = Counter(self.dense.values())
            reasons = "; ".join(f"{first[why]} ({count} so): {why}" for why, count in counts.items())
            raise PruneError(
                "semi_structured=True makes torch.sparse.to_sparse_semi_structured weights of linear layers, "
                f"and none of this model can be one: {reasons or 'none of them is pruned'}"
            )

    def compress(self) -> None:
        """Replace the weights, into which masks are written, by compressed ones for inference.

        Raises PruneError where PyTorch refuses all weights; the model keeps its dense weights with zeros.
        """
        import torch

        compressed = []
        for path, module in self._layers:
            try:
                sparse = torch.sparse.to_sparse_semi_structured(module.weight.detach())
            except (RuntimeError, ValueError, NotImplementedError) as error:  # extents, or a missing library
                self.dense[path] = str(error)
            else:
                module.weight = torch.nn.Parameter(sparse, requires_grad=False)
                compressed.append((path, module))
        self._layers = compressed
        self._check_any_layer()


def _why_dense(module: Any, name: str, parameter: Any, weight: PrunedWeight) -> str | None:
    """Return why a weight stays dense; None if it can be compressed."""
    import torch

    if not isinstance(module, torch.nn.Linear) or name != "weight" or weight.part is not None:
        return f"it is a weight of {type(module).__name__}, not the whole one of a linear layer"
    if parameter.device.type != _DEVICE:
        return (
            f"it is on {parameter.device}; GPUs of NVIDIA multiply 2:4 weights, from compute capability "
            f"{_CAPABILITY[0]}.{_CAPABILITY[1]} (Ampere): model.to('cuda')"
        )
    capability = torch.cuda.get_device_capability(parameter.device)
    if capability < _CAPABILITY:
        return f"its GPU has compute capability {capability[0]}.{capability[1]}; it takes 8.0 (Ampere)"
    kind = str(parameter.dtype).removeprefix("torch.")
    return None if kind in _TYPES else f"it is {kind}; give {' or '.join(_TYPES)}, as by model.half()"

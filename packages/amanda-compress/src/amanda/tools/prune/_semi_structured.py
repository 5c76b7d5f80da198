"""Weights of PyTorch that a GPU keeps, and multiplies, in the form of 2:4."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._weight import PrunedWeight
from amanda.tools.weights import parameter_store

_TYPES = ("float16", "bfloat16")  # of float32 CUTLASS keeps 1:2
_DEVICE, _CAPABILITY = "cuda", (8, 0)


class SemiStructured:
    """The linear layers of a model whose weights are pruned 2:4.

    dense: weights that stay dense, by path, and why.
    Raises PruneError where all of them do.
    """

    def __init__(self, model: Any, weights: Iterable[PrunedWeight]) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise PruneError(
                f"finalize was given a {type(model).__name__}; semi_structured=True is for a torch.nn.Module"
            )
        self.dense: dict[str, str] = {}
        self._found = list(self._suited(model, {one.holder: one for one in weights if one.is_ready}))
        self._check()

    def _suited(self, model: Any, weights: dict[Any, PrunedWeight]) -> Iterator[tuple[str, Any]]:
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                weight = weights.get(parameter_store(parameter).identity(parameter))
                if weight is None:
                    continue
                own = f"{path}.{name}" if path else name
                reason = _misfit(module, name, parameter, weight)
                if reason is None:
                    yield own, module
                else:
                    self.dense[own] = reason

    def _check(self) -> None:
        if not self._found:
            first = {why: path for path, why in reversed(self.dense.items())}
            counts = Counter(self.dense.values())
            reasons = "; ".join(f"{first[why]} ({count} so): {why}" for why, count in counts.items())
            raise PruneError(
                "semi_structured=True makes torch.sparse.to_sparse_semi_structured weights of linear layers, "
                f"and none of this model can be one: {reasons or 'none of them is pruned'}"
            )

    def compress(self) -> None:
        """Replace the weights, which have zeros by now; they are for inference and are not trained on.

        Raises PruneError where PyTorch refuses all of them; the model has its zeros then.
        """
        import torch

        compressed = []
        for path, module in self._found:
            try:
                made = torch.sparse.to_sparse_semi_structured(module.weight.detach())
            except (RuntimeError, ValueError, NotImplementedError) as error:  # extents, or a missing library
                self.dense[path] = str(error)
            else:
                module.weight = torch.nn.Parameter(made, requires_grad=False)
                compressed.append((path, module))
        self._found = compressed
        self._check()


def _misfit(module: Any, name: str, parameter: Any, weight: PrunedWeight) -> str | None:
    """Return why a weight stays dense; None where it may be 2:4 for a GPU."""
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

"""Result of PruneTool, and the compression of 2:4 weights for GPUs that multiply these faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.tools.prune._masks import PruneError
from amanda.tools.prune._weight import PrunedWeight
from amanda.tools.results import Column
from amanda.tools.weights import WeightResult, parameter_store

if TYPE_CHECKING:
    from amanda.tools.prune._tool import PruneTool


class PruneResult(WeightResult):
    """The pruned weights, and the share of each that is dropped.

    zeros: number of dropped elements of pruned weights.  importance: the option of PruneTool.
    dense: weights that `finalize(model, semi_structured=True)` left dense, by path, and the reasons.
    """

    name: ClassVar[str] = "prune"
    title = "Pruned weights"
    state: ClassVar[tuple[str, str]] = ("masks", "/mask")
    columns: ClassVar[Sequence[Column]] = (
        *WeightResult.columns, Column("zeros", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"), Column("pattern"),
    )  # fmt: skip

    def __init__(self, tool: PruneTool) -> None:
        self._pattern, self.importance = tool.pattern, tool.importance
        # After the pattern: the base class asks for rows, which have it.
        super().__init__(tool)
        self.dense: dict[str, str] = {}
        self.zeros: int = sum(weight.zeros for weight in tool.weights)

    def row(self, weight: Any) -> tuple[Any, ...]:
        """Return the values of the columns for a weight."""
        # Counted when asked for, and not at each update: a sum over a mask waits for a GPU.
        zeros = weight.zeros
        return *super().row(weight), zeros, zeros / max(weight.size, 1), self._pattern

    @property
    def sparsity(self) -> float:
        """The dropped share of the elements of pruned weights."""
        return self.zeros / max(self.elements, 1)

    @property
    def share(self) -> float:
        """The dropped share of all selected elements, those of skipped weights included."""
        return self.zeros / max(self.elements + self.elements_left, 1)

    def _facts(self) -> Mapping[str, Any]:
        """Return totals, and the skipped weights with the reasons."""
        return {
            **super()._facts(),
            "zeros": self.zeros,
            "sparsity": self.sparsity,
            "share": self.share,
            "importance": self.importance,
        }

    def notes(self) -> Sequence[str]:
        """Return sentences on totals, and on weights that were skipped."""
        notes = [f"Pruned {self.counted}, sparsity {self.sparsity:.4f}."]
        if self.elements_left:
            notes.insert(
                0,
                f"{self.share:.4f} of the {self.elements + self.elements_left:,} selected elements are zero; "
                f"skipped weights have {self.elements_left:,} of them.",
            )
        notes += [f"{path} stays dense: {why}." for path, why in self.dense.items()]
        return notes + self.notes_on_skipped()


_TYPES = ("float16", "bfloat16")  # CUTLASS stores float32 as 1:2, not 2:4
_DEVICE, _CAPABILITY = "cuda", (8, 0)


class SemiStructured:
    """The linear layers of a model whose weights are pruned 2:4, and can be compressed.

    dense: weights that stay dense, by path, and the reasons.
    Raises PruneError where all weights stay dense, and for what is no module of PyTorch.
    """

    def __init__(self, model: Any, weights: Iterable[PrunedWeight]) -> None:
        import torch

        if not isinstance(model, torch.nn.Module):
            raise PruneError(
                f"finalize was given a {type(model).__name__}; semi_structured=True is for a torch.nn.Module"
            )
        self.dense: dict[str, str] = {}
        weight_by_identity = {weight.holder: weight for weight in weights if weight.is_ready}
        self._layers = list(self._suitable_layers(model, weight_by_identity))
        # Before any weight is written: a model that cannot be compressed stays unpruned as well.
        self._check_any_layer()

    def _suitable_layers(
        self, model: Any, weight_by_identity: dict[Any, PrunedWeight]
    ) -> Iterator[tuple[str, Any]]:
        """Yield paths of weights that can be compressed, and their layers; write the others to `dense`."""
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                weight = weight_by_identity.get(parameter_store(parameter).identity(parameter))
                if weight is None:  # not pruned
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
            # One path for each reason: models have hundreds of layers that stay dense for the same one.
            path_of_reason = {why: path for path, why in reversed(self.dense.items())}
            counts = Counter(self.dense.values())
            reasons = "; ".join(f"{path_of_reason[why]} ({count} so): {why}" for why, count in counts.items())
            raise PruneError(
                "semi_structured=True makes torch.sparse.to_sparse_semi_structured weights of linear layers, "
                f"and none of this model can be one: {reasons or 'none of them is pruned'}"
            )

    def compress(self) -> None:
        """Replace the weights, into which masks are written, by compressed ones for inference.

        A weight that PyTorch refuses stays dense with its zeros, see `dense`; PruneError if it refuses all.
        """
        import torch

        compressed = []
        for path, module in self._layers:
            try:
                sparse = torch.sparse.to_sparse_semi_structured(module.weight.detach())
            # Which extents a GPU's kernels support changes from version to version of PyTorch, so that
            # PyTorch is asked and not a table.
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

"""The tool: each weight is projected onto its most important directions."""

from __future__ import annotations

from typing import Any

import numpy as np
from autoray import do

import amanda
from amanda.tools.weights import Weight, WeightTool


class LowRankTool(WeightTool[Weight]):
    """Gives linear layers weights of a low rank: each is projected onto its leading left singular vectors.

    rank: of the new weights; a weight of no higher rank is left.  module, exclude: globs of module paths.
    At first the new weight is the best approximation of that rank; what is trained stays in its space.
    Source: Eckart & Young 1936, "The approximation of one matrix by another of lower rank".
    """

    def __init__(
        self, rank: int = 8, module: list[str] | str | None = None, exclude: list[str] | str | None = None
    ) -> None:
        super().__init__(["linear", "matmul", "addmm"], module, exclude)
        self.rank = rank

    def on_weight(self, weight: Weight) -> str | None:
        """Keep a basis of the space of outputs, (outputs, rank)."""
        outputs, inputs = weight.canonical_shape
        if self.rank >= min(outputs, inputs):
            return f"its rank is {min(outputs, inputs)} at most"
        weight.keep("basis", np.zeros((outputs, self.rank), np.float32))
        return None

    def update(self, weight: Weight, value: Any) -> None:
        """Take the leading left singular vectors of the weight."""
        left, _, _ = np.linalg.svd(weight.to_numpy(value), full_matrices=False)
        weight["basis"] = left[:, : self.rank]

    @amanda.traceable
    def transform(self, value: Any, basis: Any) -> Any:
        """Return a weight (outputs, inputs) in the space of the basis."""
        return basis @ (do("transpose", basis) @ value)

    def transform_gradient(self, gradient: Any, basis: Any) -> Any:
        """Return the gradient in that space, too."""
        return self.transform(gradient, basis)

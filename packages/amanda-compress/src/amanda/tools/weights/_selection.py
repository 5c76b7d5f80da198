"""Selection of weights: globs of types, of module paths, and of what is excluded."""

from __future__ import annotations

from typing import TypedDict

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS
from amanda.tools.select import Globs, Selection, listed
from amanda.tools.weights._shared_state import is_adapter
from amanda.tools.weights._weight_input import WeightReads

LOOKUPS = frozenset({"embedding", "embedding_bag", "ResourceGather", "ResourceGatherNd"})
"""Ops that look rows of a weight up."""


class SelectionOptions(TypedDict, total=False):
    """Options of a tool by which weights are selected, as keywords that a subclass passes on.

    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    """

    type: Globs
    module: Globs
    exclude: Globs


class WeightSelection(Selection):
    """Ops that read weights: convolutions and products unless types are given, and no op that makes a weight.

    Without paths, LoRA adapters are left.  type, module, exclude: see `amanda.tools.select.Selection`.
    Raises `error` for what is no list of names.
    """

    def __init__(self, type: Globs, module: Globs, exclude: Globs, error: type[AmandaError]) -> None:
        self._options = {"type": type, "module": module, "exclude": exclude}
        super().__init__(
            listed("type", type, error), listed("module", module, error),
            exclude=listed("exclude", exclude, error),
        )  # fmt: skip

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the weight of an op is selected."""
        if not self.has_modules and (WeightReads.computes_weight(context) or is_adapter(context)):
            return False
        return self.fits(context)

    def leaves_adapter(self, context: amanda.OpContext) -> bool:
        """Return True if the op is left because it is of an adapter, and no path asks for that."""
        return not self.has_modules and is_adapter(context) and self.fits(context)

    def fits(self, context: amanda.OpContext, *names: str) -> bool:
        """Return True if type and modules of an op are selected."""
        kind = context["type"]
        if not self.has_types and kind not in PRODUCTS and kind not in SEVERAL_WEIGHTS:
            return False
        return super().fits(context, *names)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value is not None)

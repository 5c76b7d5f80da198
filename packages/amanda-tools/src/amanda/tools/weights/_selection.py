"""Selection of weights: globs of types, of module paths, and of what is excluded."""

from __future__ import annotations

from typing import TypedDict

import amanda
from amanda.errors import AmandaError
from amanda.tools.mapping import SEVERAL_WEIGHTS
from amanda.tools.select import Globs, Paths, Patterns, listed, unmatched
from amanda.tools.weights._shared_state import is_adapter
from amanda.tools.weights._weight_input import WeightReads

PRODUCTS = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
     "depthwise_conv2d", "depthwise_conv3d", "linear", "matmul", "addmm", "baddbmm", "bilinear"}
)  # fmt: skip
"""Convolutions and products; not embeddings and normalisations."""

LOOKUPS = frozenset({"embedding", "embedding_bag", "ResourceGather", "ResourceGatherNd"})
"""Ops that look rows of a weight up."""


class SelectionOptions(TypedDict, total=False):
    """Options of a tool by which weights are selected, as keywords that a subclass passes on.

    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    """

    type: Globs
    module: Globs
    exclude: Globs


class WeightSelection:
    """Ops by globs of their words or the framework's names, and of module paths.

    A path selects what lies in the module too.  Without paths, LoRA adapters are left.
    Raises `error` for what is no list of names.
    """

    def __init__(self, type: Globs, module: Globs, exclude: Globs, error: type[AmandaError]) -> None:
        self._told = {"type": type, "module": module, "exclude": exclude}
        names = {option: listed(option, value, error) for option, value in self._told.items()}
        self._types = Patterns("type", names["type"])
        self._modules = Paths("module", names["module"])
        self._exclude = Paths("exclude", names["exclude"] or ())

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the weight of an op is selected."""
        if self._modules.patterns is None and (WeightReads.computes_weight(context) or is_adapter(context)):
            return False
        return self._fits(context)

    def leaves_adapter(self, context: amanda.OpContext) -> bool:
        """Return True if the op is left because it is of an adapter, and no path asks for that."""
        return self._modules.patterns is None and is_adapter(context) and self._fits(context)

    def _fits(self, context: amanda.OpContext) -> bool:
        if self._types.patterns is None:
            typed = context["type"] in PRODUCTS | SEVERAL_WEIGHTS | {"einsum"}
        else:
            typed = self._types(context["type"], context.get_op_type())
        paths = context.get_scopes()
        return typed and self._modules(*paths) and not self._exclude(*paths)

    def unmatched(self) -> list[str]:
        """Return a sentence for each option that no op fitted."""
        excluded = unmatched([self._exclude], "excluded") if self._exclude.patterns else []
        return [*unmatched([self._types, self._modules]), *excluded]

    def __str__(self) -> str:
        return ", ".join(f"{name}={given!r}" for name, given in self._told.items() if given is not None)

"""Which weights are pruned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import amanda
from amanda.tools.mapping import SEVERAL_WEIGHTS, is_adapter, makes_a_weight
from amanda.tools.prune._errors import PruneError
from amanda.tools.select import Paths, Patterns, unmatched

TYPES = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
     "depthwise_conv2d", "depthwise_conv3d", "linear", "matmul", "addmm", "baddbmm", "bilinear"}
)  # fmt: skip
"""Convolutions and products; not embeddings and normalisations."""

LOOKUPS = frozenset({"embedding", "embedding_bag", "ResourceGather", "ResourceGatherNd"})
"""What reads rows of a weight: one that a product shares is left as it is."""

Globs = list[str] | str | None


class Selection:
    """Ops by globs of their words or the framework's names, and of module paths.

    A path selects what lies in the module too.  Without paths, adapters are left.
    Raises PruneError for what is no list of names.
    """

    def __init__(self, type: Globs, module: Globs, exclude: Globs) -> None:
        self._told = {"type": type, "module": module, "exclude": exclude}
        self._types = Patterns("type", _listed("type", type))
        self._modules = Paths("module", _listed("module", module))
        self._exclude = Paths("exclude", _listed("exclude", exclude) or ())

    def __call__(self, context: amanda.OpContext) -> bool:
        """Whether the weight of an op is pruned."""
        if self._modules.patterns is None and (makes_a_weight(context) or is_adapter(context)):
            return False
        return self._fits(context)

    def leaves_adapter(self, context: amanda.OpContext) -> bool:
        """Whether the op is left because it is of an adapter, and no path asks for that."""
        return self._modules.patterns is None and is_adapter(context) and self._fits(context)

    def _fits(self, context: amanda.OpContext) -> bool:
        if self._types.patterns is None:
            typed = context["type"] in TYPES | SEVERAL_WEIGHTS
        else:
            typed = self._types(context["type"], context.get_op_type())
        paths = context.get_scopes()
        return typed and self._modules(*paths) and not self._exclude(*paths)

    def unmatched(self) -> list[str]:
        """Say which options no op fitted."""
        excluded = unmatched([self._exclude], "excluded") if self._exclude.patterns else []
        return [*unmatched([self._types, self._modules]), *excluded]

    def __str__(self) -> str:
        return ", ".join(f"{name}={given!r}" for name, given in self._told.items() if given is not None)


def _listed(option: str, given: Globs) -> Sequence[str] | None:
    if given is None:
        return None
    if not isinstance(given, (str, Iterable)):
        raise PruneError(f"{option} is {given!r}; give a name or a list of names")
    listed = [given] if isinstance(given, str) else list(given)
    for one in listed:
        if not isinstance(one, str) or not one:
            raise PruneError(f"{option} has {one!r}; give names, or patterns with * and ?")
    return listed

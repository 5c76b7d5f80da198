"""Which weights are pruned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import amanda
from amanda.tools.mapping import makes_a_weight
from amanda.tools.prune._errors import PruneError

TYPES = frozenset(
    {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
     "depthwise_conv2d", "depthwise_conv3d", "linear", "matmul", "addmm", "baddbmm", "bilinear"}
)  # fmt: skip
"""Convolutions and products; not embeddings and normalisations."""

LOOKUPS = frozenset({"embedding", "embedding_bag", "ResourceGather", "ResourceGatherNd"})
"""What reads rows of a weight: one that a product shares is left as it is."""

WITHIN = frozenset(
    {"rnn_tanh", "rnn_relu", "lstm", "gru", "CudnnRNN", "CudnnRNNV2", "CudnnRNNV3",
     "_transformer_encoder_layer_fwd", "_native_multi_head_attention", "_grouped_mm", "grouped_mm"}
)  # fmt: skip
"""Ops that multiply by several weights each, which are left: noted where they would be selected."""

Globs = list[str] | str | None


class Selection:
    """Ops by globs of their words or the framework's names, and of module paths.

    A path selects what lies in the module too.  Raises PruneError for what is no list of names.
    """

    def __init__(self, type: Globs, module: Globs, exclude: Globs) -> None:
        self._told = {"type": type, "module": module, "exclude": exclude}
        self._types = _listed("type", type)
        self._modules = _listed("module", module)
        self._exclude = _listed("exclude", exclude) or ()

    def __call__(self, context: amanda.OpContext) -> bool:
        """Whether the weight of an op is pruned."""
        if self._modules is None and makes_a_weight(context):
            return False
        names = (context["type"], context.get_op_type())
        if self._types is None:
            typed = context["type"] in TYPES | WITHIN
        else:
            typed = any(fnmatchcase(name, glob) for name in names for glob in self._types)
        paths = [one.replace("/", ".") for one in context.get_scopes()]
        inside = self._modules is None or _matches(paths, self._modules)
        return typed and inside and not _matches(paths, self._exclude)

    def __str__(self) -> str:
        return ", ".join(f"{name}={given!r}" for name, given in self._told.items() if given is not None)


def _matches(paths: Sequence[str], globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) or fnmatchcase(path, f"{glob}.*") for path in paths for glob in globs)


def _listed(option: str, given: Globs) -> Sequence[str] | None:
    if given is None:
        return None
    if not isinstance(given, (str, Iterable)):
        raise PruneError(f"{option} is {given!r}; give a name or a list of names")
    listed = [given] if isinstance(given, str) else list(given)
    for one in listed:
        if not isinstance(one, str) or not one:
            raise PruneError(f"{option} has {one!r}; give names, or patterns with * and ?")
    return [one.replace("/", ".") for one in listed]

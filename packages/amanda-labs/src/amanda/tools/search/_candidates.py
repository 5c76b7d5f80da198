"""Candidates without a weight of their own: what may stand in the place of an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.kit import windows_of
from amanda.tools.mapping import MATRIX_PRODUCTS, product_of

if TYPE_CHECKING:
    from amanda.tools.search._site import Site

ACTIVATIONS = ("relu", "relu6", "gelu", "silu", "tanh", "sigmoid", "elu", "softplus")
"""Words of StandardMapping, with the frameworks' usual settings."""

_KEEPS_SHAPE = {*ACTIVATIONS, "dropout", "layer_norm", "softmax"}

Original = Callable[..., Any]


class Candidate:
    """One way to compute an op.

    label: its name in architectures.  skips: whether the op's branch of a residual block is not needed.
    """

    skips = False

    def __init__(self, label: str) -> None:
        self.label = label

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Make the candidate's state at an op; return why the op cannot have the candidate, or ""."""
        return ""

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the output of the op."""
        raise NotImplementedError

    def shares(self, site: Site) -> tuple[float, float]:
        """Return FLOPs and bytes of the weight, as shares of those of the op itself."""
        return 1.0, 1.0


class Keep(Candidate):
    """The op itself."""

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops in place that have no equal which is not."""
        is_known = site.type == "add" or site.type in ACTIVATIONS
        return "" if is_known or not context["in_place"] else f"{site.type} writes into its input"

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the op's output; an op in place, which PyTorch alone has, writes into a copy."""
        return original(inputs[0].clone(), *inputs[1:]) if site.in_place else original(*inputs)


class Skip(Candidate):
    """The op's input, or of an addition that ends a residual block the input of the block."""

    skips = True

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse ops whose output may have another shape than their input."""
        if site.type == "add":
            return "" if site.shortcut is not None else "it does not add a branch to what the branch reads"
        shape = context["shape"](context.get_inputs()[0])
        if site.type in _KEEPS_SHAPE or (site.weight is not None and self._keeps(context, site, shape)):
            return ""
        return "its output may have another shape than its input"

    @staticmethod
    def _keeps(context: amanda.OpContext, site: Site, shape: Sequence[int | None]) -> bool:
        extents = site.weight_shape
        product = product_of(context)
        if product is None or product.factors != (0, site.weight):  # the first input takes the op's place
            return False
        if site.type in MATRIX_PRODUCTS:
            return len(extents) == 2 and extents[0] == extents[1]
        layout: str | None = context["layout"]
        if layout is None or None in shape:
            return False
        sizes = [shape[i] or 0 for i, axis in enumerate(layout) if axis not in "NC"]
        windows = windows_of(context.get_attrs(), layout, extents[2:])
        is_same = all(one.places(size) == size for one, size in zip(windows, sizes, strict=True))
        return is_same and shape[layout.index("C")] == extents[0]

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the input."""
        return inputs[site.shortcut or 0]

    def shares(self, site: Site) -> tuple[float, float]:
        """Return nothing."""
        return 0.0, 0.0


class Activation(Candidate):
    """Another activation."""

    def fit(self, context: amanda.OpContext, site: Site) -> str:
        """Refuse what is no activation."""
        return "" if site.type in ACTIVATIONS else f"{site.type} is no activation"

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return the activation of the first input."""
        return site.library.activation(self.label)(inputs[0])


class Function(Candidate):
    """A function of the user, of all inputs of the op."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "__name__", str(function)))
        self._function = function

    def compute(self, inputs: Sequence[Any], site: Site, original: Original) -> Any:
        """Return what the function does."""
        return self._function(*inputs)

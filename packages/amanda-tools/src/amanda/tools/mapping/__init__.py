"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._mapping import (
    CALLING_OPS,
    UNINITIALISED,
    VOCABULARY,
    InstalledEntries,
    MappingRule,
    MappingTool,
    RuleError,
    StandardMapping,
    weight_gradient,
)
from amanda.tools.mapping._phases import in_construction
from amanda.tools.mapping._products import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    SEVERAL_WEIGHTS,
    TRANSPOSED_CONVOLUTIONS,
    Product,
    are_transposed,
    product_of,
    spatial_axes,
)
from amanda.tools.mapping._pytorch import dtype as torch_dtype
from amanda.tools.mapping._pytorch import shape as torch_shape
from amanda.tools.mapping._pytorch import word as torch_word
from amanda.tools.mapping._tensorflow import HANDLES as TENSORFLOW_HANDLES
from amanda.tools.mapping._tensorflow import PASSES as TENSORFLOW_PASSES
from amanda.tools.mapping._tensorflow import READS as TENSORFLOW_READS
from amanda.tools.mapping._tensors import backend_of, distributed, is_partial, itemsize, local, share, whole

__all__ = [
    "CALLING_OPS", "CONVOLUTIONS", "MATRIX_PRODUCTS", "PRODUCTS", "SEVERAL_WEIGHTS", "TENSORFLOW_HANDLES",
    "TENSORFLOW_PASSES", "TENSORFLOW_READS", "TRANSPOSED_CONVOLUTIONS", "UNINITIALISED", "VOCABULARY",
    "InstalledEntries", "MappingRule", "MappingTool", "Product", "RuleError", "StandardMapping",
    "are_transposed", "backend_of", "distributed", "in_construction", "is_partial", "itemsize", "local",
    "product_of", "share", "spatial_axes", "torch_dtype", "torch_shape", "torch_word", "weight_gradient",
    "whole",
]  # fmt: skip

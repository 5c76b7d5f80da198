"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._backend import backend_of
from amanda.tools.mapping._gradient import weight_gradient
from amanda.tools.mapping._itemsize import itemsize
from amanda.tools.mapping._local import distributed, is_partial, local, share, whole
from amanda.tools.mapping._products import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    TRANSPOSED_CONVOLUTIONS,
    Product,
    are_transposed,
    product_of,
)
from amanda.tools.mapping._rules import MappingTool, Rule, RuleError
from amanda.tools.mapping._standard import UNINITIALISED, StandardMapping
from amanda.tools.mapping._vocabulary import SEVERAL_WEIGHTS, VOCABULARY

__all__ = [
    "CONVOLUTIONS", "MATRIX_PRODUCTS", "PRODUCTS", "SEVERAL_WEIGHTS", "TRANSPOSED_CONVOLUTIONS",
    "UNINITIALISED", "VOCABULARY", "MappingTool", "Product", "Rule", "RuleError", "StandardMapping",
    "are_transposed", "backend_of", "distributed", "is_partial", "itemsize", "local", "product_of", "share",
    "weight_gradient", "whole",
]  # fmt: skip

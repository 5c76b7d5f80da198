"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._backend import backend_of
from amanda.tools.mapping._gradient import weight_gradient
from amanda.tools.mapping._itemsize import itemsize
from amanda.tools.mapping._local import distributed, is_partial, local, share, whole
from amanda.tools.mapping._rules import MappingTool, Rule, RuleError
from amanda.tools.mapping._standard import UNINITIALISED, StandardMapping
from amanda.tools.mapping._vocabulary import SEVERAL_WEIGHTS, VOCABULARY
from amanda.tools.mapping._weight_axes import FACTORS

__all__ = [
    "FACTORS", "SEVERAL_WEIGHTS", "UNINITIALISED", "VOCABULARY", "MappingTool", "Rule", "RuleError",
    "StandardMapping", "backend_of", "distributed", "is_partial", "itemsize", "local", "share",
    "weight_gradient", "whole",
]  # fmt: skip

"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._backend import backend_of
from amanda.tools.mapping._gradient import weight_gradient
from amanda.tools.mapping._itemsize import itemsize
from amanda.tools.mapping._local import is_partial, local, share
from amanda.tools.mapping._rules import MappingTool, Rule, RuleError
from amanda.tools.mapping._standard import UNINITIALISED, StandardMapping
from amanda.tools.mapping._vocabulary import SEVERAL_WEIGHTS, VOCABULARY

__all__ = [
    "SEVERAL_WEIGHTS", "UNINITIALISED", "VOCABULARY", "MappingTool", "Rule", "RuleError", "StandardMapping",
    "backend_of", "is_partial", "itemsize", "local", "share", "weight_gradient",
]  # fmt: skip

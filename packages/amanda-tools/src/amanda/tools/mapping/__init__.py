"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._backend import backend_of
from amanda.tools.mapping._gradient import weight_gradient
from amanda.tools.mapping._itemsize import itemsize
from amanda.tools.mapping._local import is_partial, local, share
from amanda.tools.mapping._moved import MOVED, Moved
from amanda.tools.mapping._origins import Origin
from amanda.tools.mapping._parts import (
    Form,
    Parts,
    form_of,
    holder_of,
    in_memory_order,
    is_adapter,
    makes_a_weight,
    may_vary,
)
from amanda.tools.mapping._rules import MappingTool, Rule, RuleError
from amanda.tools.mapping._standard import UNINITIALISED, StandardMapping
from amanda.tools.mapping._vocabulary import SEVERAL_WEIGHTS, VOCABULARY

__all__ = [
    "MOVED", "SEVERAL_WEIGHTS", "UNINITIALISED", "VOCABULARY", "Form", "MappingTool", "Moved", "Origin",
    "Parts", "Rule", "RuleError", "StandardMapping", "backend_of", "form_of", "holder_of",
    "in_memory_order", "is_adapter", "is_partial", "itemsize", "local", "makes_a_weight", "may_vary", "share",
    "weight_gradient",
]  # fmt: skip

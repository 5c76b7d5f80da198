"""Context mapping: what a driver says of an op, in words that every framework shares."""

from amanda.tools.mapping._rules import MappingTool, Rule, RuleError
from amanda.tools.mapping._standard import StandardMapping

__all__ = ["MappingTool", "Rule", "RuleError", "StandardMapping"]

"""OpContext: what an analysis routine sees of one op, and where it records actions."""

from amanda.plan.checks import Selection
from amanda.plan.context import STANDARD_KEYS, OpContext
from amanda.plan.facts import OpFacts

__all__ = ["STANDARD_KEYS", "OpContext", "OpFacts", "Selection"]

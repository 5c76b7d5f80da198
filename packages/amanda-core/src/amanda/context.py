"""OpContext: what an analysis routine sees of one op, and where it records actions."""

from amanda.plan.context import STANDARD_KEYS, OpContext
from amanda.plan.facts import OpFacts, Selection

__all__ = ["STANDARD_KEYS", "OpContext", "OpFacts", "Selection"]

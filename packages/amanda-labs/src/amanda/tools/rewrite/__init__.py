"""Subgraph rewriting: rules replace each match of a pattern of ops by another computation.

rewrite = RewriteTool(["fold_batch_norm"])
with amanda.apply(rewrite):
    model(x)
    y = model(x)
print(rewrite.result)
"""

from amanda.tools.rewrite._program import Match, OpCall, Rewritten
from amanda.tools.rewrite._rules import (
    Capture,
    Maybe,
    Op,
    PatternError,
    Rule,
    fold_batch_norm,
    fuse_attention,
    insert_after,
    remove,
)
from amanda.tools.rewrite._tool import RewriteResult, RewriteTool

__all__ = [
    "Capture", "Match", "Maybe", "Op", "OpCall", "PatternError", "RewriteResult", "RewriteTool", "Rewritten",
    "Rule", "fold_batch_norm", "fuse_attention", "insert_after", "remove",
]  # fmt: skip

"""Subgraph rewriting: each match of a pattern of ops is replaced as one.

rewrite = RewriteTool(["fold_batch_norm"])
with amanda.apply(rewrite):
    model(x)
    y = model(x)
print(rewrite.result)
"""

from amanda.tools.rewrite._attention import fuse_attention
from amanda.tools.rewrite._batch_norm import fold_batch_norm
from amanda.tools.rewrite._match import Match, OpCall
from amanda.tools.rewrite._named import insert_after, remove
from amanda.tools.rewrite._pattern import Capture, Maybe, Op, PatternError, Rule
from amanda.tools.rewrite._result import RewriteResult, Rewritten
from amanda.tools.rewrite._tool import RewriteTool

__all__ = [
    "Capture", "Match", "Maybe", "Op", "OpCall", "PatternError", "RewriteResult", "RewriteTool", "Rewritten",
    "Rule", "fold_batch_norm", "fuse_attention", "insert_after", "remove",
]  # fmt: skip

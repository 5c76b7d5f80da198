"""Low-rank compression of linear layers.

tool = LowRankTool(rank=8)
with amanda.apply(tool):
    train(model)
tool.finalize(model)
"""

from amanda.tools.low_rank._tool import LowRankTool

__all__ = ["LowRankTool"]

"""Count effective MACs and bit operations of pruned and quantised models, op by op.

print(effective(flops.result, prune.result, quantize.result))
"""

from amanda.tools.effective_flops._effective import Effective, EffectiveResult, effective

__all__ = ["Effective", "EffectiveResult", "effective"]

"""Multiply-accumulates and bit operations that pruning and quantisation leave, op by op.

left = effective(flops.result, prune.result, quantize.result)
print(left)
"""

from amanda.tools.effective_flops._effective import Effective, EffectiveResult, effective

__all__ = ["Effective", "EffectiveResult", "effective"]

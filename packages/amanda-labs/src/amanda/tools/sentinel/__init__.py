"""Detection of silent data corruption, NaN, spikes and diverging ranks in long training, within a budget.

sentinel = SentinelTool(budget=0.01)
with amanda.apply(sentinel):
    train()
print(sentinel.result)
"""

from amanda.tools.sentinel._result import Alarm, SentinelError, SentinelResult
from amanda.tools.sentinel._tool import SentinelTool

__all__ = ["Alarm", "SentinelError", "SentinelResult", "SentinelTool"]

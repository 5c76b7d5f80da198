"""Trials of variants of a model: what each costs, and which no other dominates.

In: metrics and costs, as sweeps and searches measure them.  Out: a result with the Pareto front.
Called by `amanda.tools.sweep` and `amanda.tools.search`.
"""

from amanda.tools.trials._costs import OpCosts, WeightSize
from amanda.tools.trials._result import SearchResult, Trial, dominates

__all__ = ["OpCosts", "SearchResult", "Trial", "WeightSize", "dominates"]

"""Results of tools that try a model many times: trials, and those that no other dominates.

result = SearchResult(trials, "accuracy", ["flops"], "")
print(result.best, result.front)
"""

from amanda.tools.trials._result import SearchResult, Trial, dominates

__all__ = ["SearchResult", "Trial", "dominates"]

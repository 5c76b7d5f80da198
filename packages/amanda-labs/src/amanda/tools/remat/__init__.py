"""Dynamic tensor rematerialisation: a memory budget for saved tensors, and recomputation of evicted ones.

remat = RematTool(budget="2GiB")
with amanda.apply(remat):
    model(x).sum().backward()
print(remat.result)
"""

from amanda.tools.remat._storage import HEURISTICS, BudgetError, RematError
from amanda.tools.remat._tool import RematResult, RematTool

__all__ = ["HEURISTICS", "BudgetError", "RematError", "RematResult", "RematTool"]

"""Dynamic tensor rematerialisation: a budget for what autograd keeps, and ops run again for what was evicted.

remat = RematTool(budget="2GiB")
with amanda.apply(remat):
    model(x).sum().backward()
print(remat.result)
"""

from amanda.tools.remat._heuristics import HEURISTICS
from amanda.tools.remat._records import BudgetError, RematError
from amanda.tools.remat._result import RematResult
from amanda.tools.remat._tool import RematTool

__all__ = ["HEURISTICS", "BudgetError", "RematError", "RematResult", "RematTool"]

"""Tools that try a model many times: trials in this process or in workers, their file, progress and result.

for outcome in run_trials(partial(load, "model.pt"), seeds, jobs=2):
    print(outcome.trial, outcome.value, outcome.error)
result = SearchResult(trials, "accuracy", ["flops"], "")
print(result.best, result.front)
"""

from amanda.tools.trials._progress import Progress, TrialFile, check_number
from amanda.tools.trials._result import SearchResult, Trial, dominates
from amanda.tools.trials._run import Outcome, PerProcess, run_trials

__all__ = [
    "Outcome", "PerProcess", "Progress", "SearchResult", "Trial", "TrialFile", "check_number", "dominates",
    "run_trials",
]  # fmt: skip

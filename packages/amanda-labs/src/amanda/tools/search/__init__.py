"""Neural architecture search on unmodified models: ops with a choice of candidates, and searches over them.

tool = SearchTool([Choice(["keep", "conv5", "conv3g2"], type="conv2d")])
tool.prepare(model, x)
print(Search(tool, accuracy, "evolution", costs=["flops"]).run(trials=50))
found = tool.finalize(model)
"""

from amanda.tools.search._candidates import Choice, SearchError
from amanda.tools.search._controllers import Controller, Evolution, OptunaController, PolicyGradient, Random
from amanda.tools.search._search import Search
from amanda.tools.search._site import Site
from amanda.tools.search._tool import ChoicesResult, SearchTool
from amanda.tools.trials import SearchResult, Trial

__all__ = [
    "Choice",
    "ChoicesResult",
    "Controller",
    "Evolution",
    "OptunaController",
    "PolicyGradient",
    "Random",
    "Search",
    "SearchError",
    "SearchResult",
    "SearchTool",
    "Site",
    "Trial",
]

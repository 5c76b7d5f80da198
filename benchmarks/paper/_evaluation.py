"""The page docs/paper-evaluation.md, made from its raw results."""

from typing import Any

import _evaluated
from _beside import beside
from _drawn import PLOTS
from _evaluated import Results, by_figure
from _pages import Page
from _tables import table


def values(found: Results) -> dict[str, Any]:
    """Return the facts that differ from the paper, and the functions of tables."""
    figures = by_figure(found)
    one = next(iter(found.values()))
    return {
        **vars(_evaluated),
        "missing": _evaluated.unmeasured(found),
        "processor": one["machine"]["processor"].partition(" (")[0],
        "versions": one["versions"],
        "beside": table(["figure", "what", "in the paper", "here", ""], beside(figures), words=True),
        "figures": figures,
    }


PAGE = Page("paper-evaluation", 1, "measured", values, PLOTS, by_figure)
read, text = PAGE.read, PAGE.text

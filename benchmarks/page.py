"""Make the page of benchmarks from raw results.

python benchmarks/page.py docs/benchmarks.json [--out FOLDER]
"""

import argparse
import re
from pathlib import Path
from typing import Any

import _sections
from _figures import figures, held, worth
from _pages import Page, settings
from _plots import PLOTS
from _tables import table

__all__ = ["PAGE", "read", "settings", "text"]


def values(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures, and the functions of tables."""
    judged = list(figures(found))
    missed = [figure.what for figure in judged if "not met" in figure.met]
    return {
        **vars(_sections),
        "held": held,
        "worth": worth,
        "figures": table(["", "figure", "measured", ""], judged),
        "is_missed": lambda pattern: any(re.search(pattern, what) for what in missed),
        "found": found,
    }


PAGE = Page("benchmarks", 3, "benchmarks", values, PLOTS)
read, text = PAGE.read, PAGE.text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("results", type=Path, help="benchmarks.json of a run")
    parser.add_argument("--out", type=Path, help="folder of the page; that of the results, if not given")
    options = parser.parse_args()
    print(PAGE.write(read(options.results), options.out or options.results.parent))


if __name__ == "__main__":
    main()

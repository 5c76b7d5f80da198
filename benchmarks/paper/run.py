"""Measure the figures of the paper's evaluation and write docs/paper-evaluation.md.

    python benchmarks/paper/run.py [FIGURE ...] [--quick] [--missing] [--page] [--out FOLDER]

FIGURE is 8, 9, 10, 11, 12 or 13; without any, all of them, in about 40 minutes.  Each script is kept in
FOLDER/paper-evaluation.json as soon as it is done, and the page is made from that.  Without a figure,
docs/paper-tables.md is written anew too.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
import paper_tables
from _evaluated import NEEDED
from _evaluation import PAGE
from _machine import machine, versions
from _measure import progress
from _pages import DOCS
from _running import measured

HERE = Path(__file__).parent
SCRIPTS = tuple(dict.fromkeys(name for names in NEEDED.values() for name in names.values()))


def main() -> int:
    """Run each script in a process of its own, then make the page; 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(NEEDED)}")
    parser.add_argument("--quick", action="store_true", help="everything once, small models: does it run?")
    parser.add_argument("--missing", action="store_true", help="leave what has been measured here")
    parser.add_argument("--page", action="store_true", help="make the page from the results alone")
    parser.add_argument("--out", type=Path, help="folder of the page and its results")
    options = parser.parse_args()
    if unknown := set(options.figures) - set(NEEDED):
        parser.error(f"no figure {', '.join(sorted(unknown))}; there are {', '.join(NEEDED)}")
    folder = options.out or (DOCS.parent / "build/paper" if options.quick else DOCS)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{PAGE.name}.json"
    results = PAGE.read(file) if file.exists() else {"schema": PAGE.schema, "quick": options.quick}
    if results["quick"] != options.quick and not options.page:
        kind = "a quick run" if results["quick"] else "real runs"
        parser.error(f"{file} is of {kind}: another --out, please")
    found = results.setdefault("measured", {})
    wanted = {name for figure in options.figures or NEEDED for name in NEEDED[figure].values()}
    failed = False
    for name in SCRIPTS if not options.page else ():
        if name not in wanted or (options.missing and is_here(found.get(name))):
            continue
        try:
            found[name] = measured(HERE / f"{name}.py", options.quick)
        except subprocess.CalledProcessError as error:
            progress(f"{name}: {error}")
            failed = True
            continue
        results["measured"] = found = {one: found[one] for one in SCRIPTS if one in found}
        PAGE.write(results, folder)
    if found:
        progress(f"{file}, {PAGE.write(results, folder)}")
    if not (options.figures or options.quick or options.out):
        paper_tables.PAGE.write_text(paper_tables.page())
    return int(failed)


def is_here(one: dict[str, Any] | None) -> bool:
    """Return True if results are of this machine and these versions."""
    return one is not None and (one["machine"], one["versions"]) == (machine(), versions())


if __name__ == "__main__":
    sys.exit(main())

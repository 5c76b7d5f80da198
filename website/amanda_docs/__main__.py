"""`python -m amanda_docs`, with website/ on the path: build the site; 1 if anything is wrong with it."""

from __future__ import annotations

import argparse
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from amanda_docs.checks import problems, undocumented
from amanda_docs.navigation import unlisted
from amanda_docs.notebooks import write_notebooks
from amanda_docs.pages import BUILD, PAGES, ROOT, write_api, write_pages

logger = logging.getLogger("amanda_docs")


def main() -> int:
    """Build everything, and look for what is wrong with it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(prog="amanda_docs", description=main.__doc__)
    parser.add_argument(
        "--no-notebooks",
        action="store_true",
        help="take what they gave the last time, or the outputs that are in them",
    )
    options = parser.parse_args()
    if missing := unlisted():
        return failed(missing)
    executed = BUILD / "notebooks"
    if not options.no_notebooks:
        shutil.rmtree(executed, ignore_errors=True)
    write_pages()
    write_api()
    write_notebooks(executed, run=not options.no_notebooks)
    shutil.rmtree(ROOT / ".cache", ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--strict"], cwd=ROOT, check=False)
    if done.returncode:
        return done.returncode
    site = BUILD / "site"
    return failed(problems(site) + undocumented(site, PAGES, BUILD / "api"))


def failed(found: list[str]) -> int:
    """Tell each problem; the exit status."""
    for problem in found:
        logger.error(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

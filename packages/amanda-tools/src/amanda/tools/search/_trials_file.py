"""The file in which a search keeps its trials."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from amanda.tools.search._errors import SearchError
from amanda.tools.search._result import Trial

Space = Mapping[str, tuple[str, ...]]


def write_trials(path: Path, space: Space, trials: Sequence[Trial]) -> None:
    """Write all trials, so that the file is whole at any time."""
    rows = [vars(one) for one in trials]
    found = {"schema": "amanda.search_trials", "version": 1, "space": space, "trials": rows}
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(found, indent=1), encoding="utf-8")
    part.replace(path)


def read_trials(path: Path, space: Space, costs: Sequence[str]) -> list[Trial]:
    """Return the trials of a file; raise SearchError for one that is of another search, or of none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        known = {name: tuple(labels) for name, labels in found["space"].items()}
        trials = [Trial(**one) for one in found["trials"]]
        others = [list(one.costs) for one in trials if list(one.costs) != list(costs)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SearchError(f"Search: {path} holds no trials of a search: {error!r}") from error
    if known != space:
        raise SearchError(f"Search: {path} is of a search over {known}, not over {space}")
    if others:
        raise SearchError(f"Search: {path} has costs {others[0]}, not {list(costs)}")
    return trials

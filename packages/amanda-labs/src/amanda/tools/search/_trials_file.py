"""The file in which a search keeps its trials, and which several processes may share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.files import write_file
from amanda.tools.results import check_schema, locked, number_of, read_json, to_json
from amanda.tools.search._errors import SearchError
from amanda.tools.trials import Trial

Space = Mapping[str, tuple[str, ...]]
_NAME, _VERSION = "search_trials", 1


class TrialsFile:
    """A file of trials of one space; costs: their names.

    Searches in several processes may add to one file: each gets the others' trials as it adds its own.
    """

    def __init__(self, path: Path, space: Space, costs: Sequence[str]) -> None:
        self.path, self._space, self._costs = path, space, list(costs)

    def read(self) -> list[Trial]:
        """Return the trials; raise SearchError for a file that is of another search, or of none."""
        if not self.path.exists():
            return []
        return read_json(self.path, "file of trials of a search", self._trials, SearchError)

    def add(self, trials: Sequence[Trial], number: int) -> list[Trial]:
        """Write trials after those of others; return all, with those of others in the place where they are.

        number: how many of the trials were in the file before, the rest is new.
        Raises FileError where the file cannot be written, and SearchError where it is of another search.
        """
        with locked(self.path):
            there = self.read()
            whole = [*there, *trials[number:]] if len(there) >= number else list(trials)
            rows = [vars(one) for one in whole]
            found = {"schema": f"amanda.{_NAME}", "version": _VERSION, "space": self._space, "trials": rows}
            write_file(self.path, to_json(found, indent=1) + "\n")
        return whole

    def _trials(self, found: Any) -> list[Trial]:
        check_schema(found, _NAME, _VERSION)
        known = {name: tuple(labels) for name, labels in found["space"].items()}
        trials = [self._trial(one) for one in found["trials"]]
        if known != self._space:
            raise SearchError(f"Search: {self.path} is of a search over {known}, not over {self._space}")
        for one in trials:
            if list(one.costs) != self._costs:
                raise SearchError(f"Search: {self.path} has costs {list(one.costs)}, not {self._costs}")
            if one.architecture.keys() != known.keys() or not all(
                label in known[name] for name, label in one.architecture.items()
            ):
                raise ValueError(f"it has an architecture {one.architecture}")
        return trials

    @staticmethod
    def _trial(found: Any) -> Trial:
        metric, costs = number_of(found["metric"]), dict(found["costs"])
        return Trial(
            dict(found["architecture"]), None if metric is None else float(metric),
            {str(name): float(number_of(cost)) for name, cost in costs.items()}, float(found["seconds"]),
            str(found["error"]),
        )  # fmt: skip

"""The trials of a search: a program with an architecture of its tool, in this process or in a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from math import isfinite, nan
from typing import Any, Literal, NamedTuple

import amanda
from amanda.errors import AmandaError, ToolError
from amanda.tools.search._candidates import SearchError
from amanda.tools.search._tool import SearchTool
from amanda.tools.trials import check_number

_COPIED_MODEL = (
    "A worker has a copy of the model with which the tool was prepared; evaluate has to run that copy, and "
    "other models under amanda.disabled(). An imported module makes a model of its own there: call "
    "cloudpickle.register_pickle_by_value(module) first"
)


class Measurements(NamedTuple):
    """The metric and the costs of an architecture by name; NaN for what an error left unmeasured."""

    numbers: Mapping[str, float]
    error: str = ""


class SearchProgram:
    """Evaluates architectures of a tool; a pickled copy does so in a worker.

    costs: functions without arguments, or names of methods of the tool, by name.
    """

    def __init__(
        self,
        tool: SearchTool,
        evaluate: Callable[[], Any],
        train: Callable[[], Any] | None,
        costs: Mapping[str, Callable[[], Any] | str],
        metric: str,
        compiled: Literal["eager", "instrument"],
    ) -> None:
        self._tool, self._evaluate, self._train = tool, evaluate, train
        self._costs, self._metric = costs, metric
        self._compiled: Literal["eager", "instrument"] = compiled
        self._report, self._space, self._is_copy = amanda.Report(), tool.space, False

    def __getstate__(self) -> dict[str, Any]:
        # With the report, a worker does not log again what this process has logged.
        return {name: value for name, value in vars(self).items() if name != "_scope"} | {"_is_copy": True}

    @cached_property
    def _scope(self) -> amanda.Scope:
        """One scope for all trials, since a scope logs each warning once."""
        scope = amanda.apply(self._tool, compiled=self._compiled)
        scope.report = self._report
        return scope

    def load(self) -> Callable[[Mapping[str, str]], Measurements]:
        """Return `measure`; in a worker, raise SearchError if the tool has other choices there."""
        self._check_space()
        return self.measure

    def measure(self, architecture: Mapping[str, str]) -> Measurements:
        """Train, evaluate and measure costs; an exception that is not Amanda's is the error."""
        self._tool.architecture = architecture
        numbers = dict.fromkeys((self._metric, *self._costs), nan)
        try:
            # Each evaluation enters the scope again, so that between trials the program runs without the
            # tool.
            with self._scope:
                if self._train is not None:
                    self._train()
                numbers[self._metric] = check_number(self._evaluate(), self._evaluate, SearchError)
                for name, cost in self._costs.items():
                    function = getattr(self._tool, cost) if isinstance(cost, str) else cost
                    numbers[name] = check_number(function(), function, SearchError)
        except ToolError as error:
            # Most likely the tool lacks values for an op of another model, ahead of `_check_space`.
            if self._is_copy:
                raise SearchError(f"Search: in a worker {error}. {_COPIED_MODEL}") from error
            raise
        except AmandaError:
            raise
        except Exception as error:
            return Measurements(numbers, f"{type(error).__name__}: {error}")
        self._check_space()
        for name, number in numbers.items():
            if not isfinite(number):
                return Measurements(numbers, f"ValueError: {name} is {number}")
        return Measurements(numbers)

    def _check_space(self) -> None:
        """Raise SearchError in a worker whose tool meets other ops than that of the search."""
        if self._is_copy and self._tool.space != self._space:
            raise SearchError(
                f"Search: in a worker the tool has the choices {self._tool.space}, and not {self._space}. "
                f"{_COPIED_MODEL}"
            )

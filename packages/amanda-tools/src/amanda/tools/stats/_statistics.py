"""Statistics of numbers, and of two sets of numbers together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda.tools.results import made_of


@dataclass(frozen=True)
class Statistics:
    """Of the finite ones among some numbers; of complex ones their magnitudes.

    count: how many are finite.  m2: sum of the squared distances from the mean.  absolute: sum of the
    magnitudes.  least, most: inf and -inf where count is 0.  nan, inf, negative_inf: how many are not
    finite.  zeros: how many are 0.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    absolute: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    nan: int = 0
    inf: int = 0
    negative_inf: int = 0
    zeros: int = 0

    @classmethod
    def of_vector(cls, vector: Sequence[float]) -> Statistics:
        """Of the ten numbers in this order."""
        count, mean, m2, absolute, least, most, *counts = vector
        return cls(int(count), mean, m2, absolute, least, most, *map(int, counts))

    def merged(self, other: Statistics) -> Statistics:
        """Of both sets together.  Source: Chan, Golub, LeVeque 1979, eq. 2.1."""
        count = self.count + other.count
        share = other.count / count if count else 0.0
        distance = other.mean - self.mean
        apart = distance * distance * self.count * share if self.count and other.count else 0.0
        mean = self.mean + distance * share
        if math.isinf(distance):
            mean = self.mean * (1 - share) + other.mean * share
        return Statistics(
            count,
            mean,
            self.m2 + other.m2 + apart,
            self.absolute + other.absolute,
            min(self.least, other.least), max(self.most, other.most),
            self.nan + other.nan, self.inf + other.inf, self.negative_inf + other.negative_inf,
            self.zeros + other.zeros,
        )  # fmt: skip

    @property
    def elements(self) -> int:
        """All numbers, those that are not finite too."""
        return self.count + self.nan + self.inf + self.negative_inf

    @property
    def std(self) -> float:
        """Standard deviation of the population, as numpy's default is."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    @property
    def l1(self) -> float:
        """Sum of magnitudes."""
        return self.absolute

    @property
    def l2(self) -> float:
        """Root of the sum of squares."""
        return math.sqrt(self.m2 + self.count * self.mean * self.mean)

    @property
    def largest(self) -> float:
        """Largest magnitude, the maximum norm."""
        return max(abs(self.least), abs(self.most)) if self.count else 0.0

    @property
    def sparsity(self) -> float:
        """Share of zeros among all numbers."""
        return self.zeros / self.elements if self.elements else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields; None for what JSON cannot say."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Statistics:
        """Return the statistics that `to_dict` described."""
        given = {name: value[name] for name in cls.__dataclass_fields__ if value[name] is not None}
        found = made_of(cls, given)
        if min(getattr(found, name) for name in ("count", "nan", "inf", "negative_inf", "zeros", "m2")) < 0:
            raise ValueError(f"its statistics are {dict(value)}")
        return found

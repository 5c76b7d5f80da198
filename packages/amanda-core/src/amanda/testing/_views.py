"""The suite for drivers of frameworks in which tensors share memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import pytest

from amanda.scope.scope import apply
from amanda.testing._ladder import Gaps
from amanda.testing._sample import Op, Sample, attached
from amanda.testing._tools import inserter, tool


class ViewSample(Sample):
    """A framework in which some ops return tensors that lie in the memory of what they are given.

    part_name: `__name__` of the op `part`.
    """

    part_name: str

    @abstractmethod
    def part(self, x: Any) -> Any:
        """Return a view of the first two elements of a vector, by one op."""

    @property
    # A framework may have another op than `add_` that writes in place.
    def write(self) -> Op:
        """write(x, number): add a number to a tensor in place."""
        return self.add_


class ViewTests(Gaps):
    """Tests of values that routines give in the place of views; a subclass has a fixture `sample`."""

    @pytest.fixture
    def sample(self) -> ViewSample:
        """The framework under test."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `sample` that gives a ViewSample")

    @pytest.fixture(autouse=True)
    def _attached(self, sample: ViewSample) -> Iterator[None]:
        with attached(sample.driver):
            yield

    def test_a_write_into_a_value_given_for_a_view_reaches_the_base(self, sample: ViewSample) -> None:
        with apply(inserter("insert_after_op", sample.part_name, lambda value: value * 1.0)):
            for _ in range(2):
                base = sample.tensor([1.0, 2.0, 3.0])
                sample.write(sample.part(base), 4.0)
                assert sample.numbers(base) == [5.0, 6.0, 3.0]

    def test_a_write_into_the_base_reaches_a_value_given_for_a_view(self, sample: ViewSample) -> None:
        with apply(inserter("insert_after_op", sample.part_name, lambda value: value * 1.0)):
            base = sample.tensor([1.0, 2.0, 3.0])
            view = sample.part(base)
            sample.write(base, 4.0)
            assert sample.numbers(view) == [5.0, 6.0]

    def test_a_write_reaches_what_the_view_is_of_where_its_input_was_changed(
        self, sample: ViewSample
    ) -> None:
        with apply(inserter("insert_before_op", sample.part_name, lambda value: value * 1.0, [0])):
            base = sample.tensor([1.0, 2.0, 3.0])
            sample.write(sample.part(base), 4.0)
            assert sample.numbers(base) == [5.0, 6.0, 3.0]

    def test_a_changed_view_leaves_its_base_alone(self, sample: ViewSample) -> None:
        base = sample.tensor([1.0, 2.0, 3.0])
        with apply(inserter("insert_after_op", sample.part_name, lambda value: value * 3.0)):
            assert sample.numbers(sample.part(base)) == [3.0, 6.0]
        # A routine changes what the program sees of the view, not the memory that the view lies in.
        assert sample.numbers(base) == [1.0, 2.0, 3.0]

    def test_writes_are_seen_that_tools_have_no_plan_for(self, sample: ViewSample) -> None:
        base = sample.tensor([1.0, 2.0, 3.0])
        with apply(tool(lambda context: None)):
            sample.write(base, 1.0)
            with apply(inserter("insert_after_op", sample.part_name, lambda value: value * 1.0)):
                for _ in range(3):
                    sample.write(sample.part(base), 1.0)
        # One write outside, then three through the view of the first two elements.
        assert sample.numbers(base) == [5.0, 6.0, 4.0]

"""Parts that several drivers share: operators by name, maps of tensors, names that a framework lacks."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

from amanda.backend import Operation, TensorMap, UnwrittenTensors, check_private_names, lacking
from amanda.errors import DriverError, RoutineError
from amanda.testing import fake


class Other(Operation):
    """An operator of another class."""


def test_an_operation_equals_another_of_its_class_name_and_key() -> None:
    operation = Operation("conv", 1)
    assert operation == Operation("conv", 1)
    assert hash(operation) == hash(Operation("conv", 1))
    assert operation not in (Operation("conv", 2), Operation("conv"), Other("conv", 1), "conv")
    assert (str(operation), repr(operation), operation.__name__) == ("conv", "<conv>", "conv")
    assert pickle.loads(pickle.dumps(operation)) == copy.deepcopy(operation) == operation


def test_names_that_are_not_there_are_lacking() -> None:
    absent = ["json:dumped", "json:JSONDecoder.encoded", "no_module_of_this_name:dumps"]
    assert lacking(["json:dumps", absent[0], "json:JSONDecoder.decode", *absent[1:]]) == absent


@pytest.mark.parametrize(
    ("newest_tested", "fix"),
    [
        ("1.2", r'up to 1\.2: pip install "json==1\.2\.\*", or a newer driver'),
        ("", "an earlier release, or a newer driver"),
    ],
)
def test_the_error_of_a_driver_names_what_its_framework_lacks(newest_tested: str, fix: str) -> None:
    check_private_names(["json:dumps"], "graph mode", "json", newest_tested)
    with pytest.raises(DriverError, match=rf"json .* lacks json\.dumped, .*graph mode cannot .*{fix}"):
        check_private_names(["json:dumps", "json:dumped"], "graph mode", "json", newest_tested)


def test_a_map_of_tensors_keeps_none_of_them() -> None:
    tensor_map: TensorMap[str] = TensorMap()
    first, second = (fake.tensor([1.0]) for _ in range(2))
    tensor_map[first] = "first"
    assert (tensor_map.get(first), tensor_map.get(second)) == ("first", None)
    tensor_map[first] = "second"
    assert tensor_map.get(first) == "second"
    del first
    gc.collect()
    assert not tensor_map._entries


def test_a_tensor_that_nothing_writes_into_refuses_a_value() -> None:
    class Ops(UnwrittenTensors):
        """Numbers."""

        def is_tensor(self, value: Any) -> bool:
            return isinstance(value, float)

        def signature(self, inputs: Any) -> Any:
            return ()

        def shapes(self, inputs: Any) -> Any:
            return ()

        def straight_through(self, original: Any, value: Any) -> Any:
            return value

    ops, value = Ops(), 1.0
    with ops.isolated(), pytest.raises(RoutineError, match="a float cannot be written into"):
        ops.write(value, 2.0, True)
    assert (ops.version(value), ops.storable(value), ops.copied(value)) == (None, value, value)

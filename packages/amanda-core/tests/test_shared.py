"""Parts that several drivers share: operators by name, maps of tensors, names that a framework lacks."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest

from amanda.backend import Operation, TensorMap, UnwrittenTensors, lacking
from amanda.errors import RoutineError
from amanda.testing import fake


class Other(Operation):
    """An operator of another class."""


def test_an_operation_equals_another_of_its_class_name_and_key() -> None:
    one = Operation("conv", 1)
    assert one == Operation("conv", 1)
    assert hash(one) == hash(Operation("conv", 1))
    assert one not in (Operation("conv", 2), Operation("conv"), Other("conv", 1), "conv")
    assert (str(one), repr(one), one.__name__) == ("conv", "<conv>", "conv")
    assert pickle.loads(pickle.dumps(one)) == copy.deepcopy(one) == one


def test_names_that_are_not_there_are_lacking() -> None:
    absent = ["json:dumped", "json:JSONDecoder.encoded", "no_module_of_this_name:dumps"]
    assert lacking(["json:dumps", absent[0], "json:JSONDecoder.decode", *absent[1:]]) == absent


def test_a_map_of_tensors_keeps_none_of_them() -> None:
    tensor_map: TensorMap[str] = TensorMap()
    one, other = (fake.tensor([1.0]) for _ in range(2))
    tensor_map[one] = "first"
    assert (tensor_map.get(one), tensor_map.get(other)) == ("first", None)
    tensor_map[one] = "second"
    assert tensor_map.get(one) == "second"
    del one
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

"""Number formats that faults change, and memory that a campaign puts back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import amanda
from amanda.tools.inject import MemorySnapshot, bits_of, from_bytes, to_bytes


@pytest.mark.parametrize(
    ("dtype", "mantissa", "exponent", "sign"),
    [("float32", 23, 8, 1), ("bfloat16", 7, 8, 1), ("float8_e4m3fn", 3, 4, 1), ("float8_e8m0fnu", 0, 8, 0),
     ("int16", 15, 0, 1), ("uint8", 8, 0, 0), ("bool", 1, 0, 0), ("string", 0, 0, 0), (None, 0, 0, 0)],
)  # fmt: skip
def test_the_bits_of_a_type_are_mantissa_then_exponent_then_sign(
    dtype: Any, mantissa: int, exponent: int, sign: int
) -> None:
    fields = bits_of(dtype, "mantissa"), bits_of(dtype, "exponent"), bits_of(dtype, "sign")
    assert tuple(map(len, fields)) == (mantissa, exponent, sign)
    assert sum(fields, ()) == bits_of(dtype) == tuple(range(mantissa + exponent + sign))


def test_a_complex_number_has_the_bits_of_its_real_part_first() -> None:
    assert bits_of("complex64", "sign") == (31, 63)
    assert from_bytes(to_bytes(np.array([1 - 2j]), "complex64", None), "complex64").tolist() == [1 - 2j]


def test_numbers_are_rounded_as_their_library_rounds() -> None:
    numbers = np.array([0.1, 1000.0, -3.3])
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        like = torch.zeros(1, dtype=getattr(torch, name))
        expected = torch.from_numpy(numbers).to(like.dtype).double().tolist()
        assert from_bytes(to_bytes(numbers, name, like), name).tolist() == expected
        array = np.zeros(1, getattr(ml_dtypes, name))
        rounded = from_bytes(to_bytes(numbers, name, array), name)
        np.testing.assert_array_equal(rounded, numbers.astype(array.dtype).astype(np.float64))
    clipped = to_bytes(np.array([2.5, -1e30, np.inf]), "int64", None)
    assert from_bytes(clipped, "int64").tolist() == [2, -(1 << 63), (1 << 63) - 1]


def test_found_memory_is_put_back_also_where_a_view_was_written() -> None:
    norm, whole = nn.BatchNorm1d(3), torch.arange(6.0)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    memory = MemorySnapshot()
    with amanda.apply(memory):
        norm(torch.rand(4, 3))
        whole.view(2, 3)[0].mul_(5)
        kept = memory.outlasting({"whole": [whole]})
    memory.restore()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert kept["whole"][0].tolist() == [0, 5, 10, 3, 4, 5]
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())

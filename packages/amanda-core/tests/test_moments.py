"""Statistics of numbers in memory, which native code reads in one pass."""

import math
import random
import struct
import threading
from array import array
from typing import Any

import pytest

from amanda import interceptor

pytestmark = pytest.mark.skipif(not interceptor.NATIVE, reason=interceptor.REASON or "")
KINDS = pytest.mark.parametrize("kind", ["f", "d"])


def numbers(kind: str, count: int) -> Any:
    chance = random.Random(count)
    return array(kind, [chance.gauss(2, 1) * 10.0 ** chance.randrange(-20, 20) for _ in range(count)])


def bins_by_hand(values: Any, bits: int) -> dict[int, int]:
    """Return how many numbers are in each bin, by the logarithm."""
    counts: dict[int, int] = {}
    side = (128 << bits) + 2
    for number in values:
        place = 0
        if number:
            fraction, exponent = math.frexp(abs(number))
            octave, part = exponent - 1 + 88, int((2 * fraction - 1) * (1 << bits))
            place = 1 if octave < 0 else side if octave >= 128 else (octave << bits) + part + 2
        bin = side + (place if number > 0 else -place)
        counts[bin] = counts.get(bin, 0) + 1
    return counts


@KINDS
@pytest.mark.parametrize("count", [1, 3, 4096, 4099, 40_000])
@pytest.mark.parametrize("bits", [0, 4, 7])
def test_they_are_those_of_exact_sums(kind: str, count: int, bits: int) -> None:
    values = numbers(kind, count)
    moments = interceptor.Moments(bits)
    assert moments.add(values)
    measured = moments.numbers
    mean = math.fsum(values) / count
    squares, magnitudes = math.fsum((x - mean) ** 2 for x in values), math.fsum(map(abs, values))
    expected = (count, mean, squares, magnitudes, min(values), max(values))
    assert measured[:6] == pytest.approx(expected, rel=1e-12, abs=1e-12 * max(map(abs, values)))
    assert measured[6:] == (0, 0, 0, 0)
    counts = struct.unpack(f"{2 * ((128 << bits) + 2) + 1}q", moments.counts or b"")
    assert {i: count for i, count in enumerate(counts) if count} == bins_by_hand(values, bits)


@KINDS
@pytest.mark.parametrize("count", [1, 2, 4095, 4097, 40_000])
@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -0.1, 1e-45, 3e38])
def test_equal_numbers_are_measured_as_others_are(kind: str, count: int, number: float) -> None:
    values = array(kind, [number] * count)
    moments, mixed, others = (interceptor.Moments(4) for _ in range(3))
    assert moments.add(values)
    mean, magnitude = values[0], abs(values[0])
    expected = (count, mean, 0.0, count * magnitude, mean, mean, 0, 0, 0, count * (not number))
    assert moments.numbers == pytest.approx(expected, rel=1e-12, abs=1e-20 * magnitude * magnitude)
    # A block in which a last number differs counts each of its numbers.
    assert mixed.add(array(kind, [*values, 7.0] * 2))
    assert others.add(array(kind, [7.0] * 2))
    counts, mixed_counts, other_counts = (
        struct.unpack("4101q", measured.counts or b"") for measured in (moments, mixed, others)
    )
    assert [2 * x + y for x, y in zip(counts, other_counts, strict=True)] == list(mixed_counts)
    # Non-finite numbers are dropped from a block before the rest are compared.
    assert others.add(array(kind, [math.nan, *values]))
    assert others.numbers[6] == 1
    assert [x + y for x, y in zip(counts, other_counts, strict=True)] == [
        *struct.unpack("4101q", others.counts or b"")
    ]


@KINDS
def test_what_is_not_finite_is_counted_apart(kind: str) -> None:
    moments = interceptor.Moments(0)
    assert moments.add(array(kind, [math.nan] * 5000))
    assert moments.numbers == (0, 0.0, 0.0, 0.0, math.inf, -math.inf, 5000, 0, 0, 0)
    assert moments.add(array(kind, [1.0, math.inf, -0.0, math.nan, -math.inf, 3.0, math.inf]))
    assert moments.numbers == pytest.approx((3, 4 / 3, 14 / 3, 4.0, 0.0, 3.0, 5001, 2, 1, 1))
    assert sum(struct.unpack("261q", moments.counts or b"")) == 3


@KINDS
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("count", [1, 2, 4096, 5000, 40_000])
def test_zeros_are_numbers_among_others(kind: str, zero: float, count: int) -> None:
    moments = interceptor.Moments(0)
    assert moments.add(array(kind, [zero] * count))
    assert moments.numbers == (count, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, count)
    assert moments.add(array(kind, [zero] * 4096 + [3.0] + [zero] * 4096 + [-1.0]))
    total = count + 8194
    squares = (3 - 2 / total) ** 2 + (1 + 2 / total) ** 2 + (total - 2) * (2 / total) ** 2
    assert moments.numbers[:6] == pytest.approx((total, 2 / total, squares, 4.0, -1.0, 3.0))
    assert moments.numbers[6:] == (0, 0, 0, total - 2)
    counts = struct.unpack("261q", moments.counts or b"")
    assert (counts[130], sum(counts)) == (total - 2, total)  # zero's bin is the one in the middle


@KINDS
@pytest.mark.parametrize("count", [*range(1, 40), 4095, 4097])
def test_each_place_of_a_block_counts(kind: str, count: int) -> None:
    for place in {0, count // 4, count // 2, count - 1}:
        for number in (5.0, -5.0, 0.0, math.nan, math.inf, -math.inf):
            values = array(kind, [1.0] * count)
            values[place] = number
            finite = [x for x in values if math.isfinite(x)]
            moments = interceptor.Moments(0)
            assert moments.add(values)
            mean = math.fsum(finite) / max(len(finite), 1)
            squares, magnitudes = math.fsum((x - mean) ** 2 for x in finite), math.fsum(map(abs, finite))
            extremes = min(finite, default=math.inf), max(finite, default=-math.inf)
            assert moments.numbers[:6] == pytest.approx((len(finite), mean, squares, magnitudes, *extremes))
            others = (math.isnan(number), number == math.inf, number == -math.inf, number == 0)
            assert moments.numbers[6:] == tuple(map(int, others))


def test_a_mean_stays_finite_where_sums_overflow() -> None:
    for values, mean, squares in (
        ([1e308] * 10_000, 1e308, None),
        ([1e308, -1e308] * 5_000, 0.0, math.inf),
        ([1e200] * 10, 1e200, None),
        ([1.7e308] * 4096 + [-1.7e308] * 4096, 0.0, math.inf),
        ([1.7e308] * 2048 + [-1.7e308] * 2048, 0.0, math.inf),
    ):
        moments = interceptor.Moments(4)
        assert moments.add(array("d", values))
        count, measured_mean, m2, magnitudes, least, most = moments.numbers[:6]
        assert (count, least, most) == (len(values), min(values), max(values))
        assert measured_mean == pytest.approx(mean, rel=1e-12, abs=1e-12 * max(values))
        assert m2 == squares or (squares is None and not math.isnan(m2))
        assert magnitudes == (math.inf if max(values) > 1e300 else pytest.approx(2e201 / 2))


def test_other_memory_is_refused_and_changes_nothing() -> None:
    moments = interceptor.Moments(4)
    before = moments.numbers
    strided = memoryview(array("f", [1.0, 2.0, 3.0]))[::2]
    for memory in (array("i", [1]), b"1234", None, 1.0, [1.0], strided, array("B", [1])):
        assert moments.add(memory) is False
    assert (moments.numbers, moments.counts) == (before, None)
    assert moments.add(array("f"))
    assert (moments.numbers, moments.counts) == (before, None)


def test_both_together_are_those_of_all_numbers() -> None:
    first, second, all_of_them = (interceptor.Moments(4) for _ in range(3))
    for moments, count in ((first, 5000), (second, 40_000)):
        for each in (moments, all_of_them):
            assert each.add(numbers("f", count))
    first.merge(second)
    assert first.numbers == pytest.approx(all_of_them.numbers, rel=1e-12)
    assert first.counts == all_of_them.counts
    first.merge(first)
    assert first.numbers[0] == 90_000
    first.merge(interceptor.Moments(4))
    assert first.numbers[0] == 90_000
    for wrong in (interceptor.Moments(), interceptor.Moments(5), None, 3):
        with pytest.raises(TypeError, match="same bins"):
            first.merge(wrong)


@pytest.mark.parametrize("bits", [-2, 17, 2**31 - 1])
def test_bits_are_checked(bits: int) -> None:
    with pytest.raises(ValueError, match="give -1 to 16"):
        interceptor.Moments(bits)


def test_threads_add_to_one_object() -> None:
    moments, values = interceptor.Moments(4), numbers("f", 100_000)
    threads = [threading.Thread(target=lambda: [moments.add(values) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert moments.numbers[0] == 80 * 100_000
    assert sum(struct.unpack("4101q", moments.counts or b"")) == 80 * 100_000


def test_many_arrays_are_added_as_each_alone_is() -> None:
    arrays = [numbers(kind, count) for kind in "fd" for count in (1, 4097, 20_000, 40_000)]
    integers = [array(kind, [0, 1, 2, 100] * 1500) for kind in "bBhHiIlLqQ"]
    pairs = [(values, values) for values in arrays]
    pairs += [(values, array("d", values)) for values in integers]
    pairs.append((memoryview(bytes([0, 1, 1])).cast("?"), array("d", [0, 1, 1])))
    together = tuple(interceptor.Moments(4) for _ in pairs)
    values = tuple(values for values, _ in pairs)
    assert interceptor.Moments.add_all(together, values, (-1,) * len(pairs)) == []
    for moments, (_, doubles) in zip(together, pairs, strict=True):
        alone = interceptor.Moments(4)
        assert alone.add(doubles)
        assert (moments.numbers, moments.counts) == (alone.numbers, alone.counts)


def test_memory_of_several_arrays_is_added_to_each() -> None:
    values, other = numbers("f", 20_000), numbers("f", 30_000)
    moments = tuple(interceptor.Moments(4) for _ in range(4))
    arrays = (values, memoryview(other), values, memoryview(values)[:17_000])
    for times in (1, 2):
        assert interceptor.Moments.add_all(moments, arrays, (-1,) * 4) == []
        assert [each.numbers[0] for each in moments] == [times * len(each) for each in arrays]
    for each, memory in zip(moments, arrays, strict=True):
        alone = interceptor.Moments(4)
        for _ in range(2):
            alone.add(memory)
        assert each.numbers == pytest.approx(alone.numbers, rel=1e-12)
        assert each.counts == alone.counts


def test_positions_of_arrays_that_are_not_added_are_returned() -> None:
    strided = memoryview(array("f", [1.0, 2.0, 3.0]))[::2]
    arrays = (None, array("f", [1.0]), strided, "text", array("f", [1.0, 2.0]), memoryview(b"a").cast("c"))
    moments = tuple(interceptor.Moments() for _ in arrays)
    assert interceptor.Moments.add_all(moments, arrays, (-1, 1, -1, -1, 3, -1)) == [0, 2, 3, 4, 5]
    assert [each.numbers[0] for each in moments] == [0, 1, 0, 0, 0, 0]
    for wrong in (((), arrays, ()), (moments, arrays, (-1,)), ((None,) * 6, arrays, (-1,) * 6)):
        with pytest.raises(TypeError, match="6 arrays"):
            interceptor.Moments.add_all(*wrong)
    with pytest.raises(TypeError):
        interceptor.Moments.add_all(moments, arrays, (None,) * 6)  # type: ignore[arg-type]


def test_arrays_that_are_not_finite_are_found() -> None:
    strided = memoryview(array("f", [1.0, 2.0, 3.0]))[::2]
    finite = (array("f", [3.4e38, -0.0]), array("d", [1e308]), array("i", [1]), b"", array("f"))
    large = array("f", [1.0] * 99_999)
    for value in (math.nan, math.inf, -math.inf):
        for kind in "fd":
            wrong = array(kind, [*large, value])
            assert interceptor.nonfinite((*finite, large, wrong, None, strided, wrong)) == [6, 7, 8, 9]
    assert interceptor.nonfinite(()) == []
    with pytest.raises(TypeError, match="tuple"):
        interceptor.nonfinite([large])  # type: ignore[arg-type]


def test_numbers_that_lie_anywhere_among_bytes_are_left_to_python() -> None:
    values = struct.pack("3d", 1.0, 2.0, math.inf)
    for start in range(1, 8):
        shifted = memoryview(bytes(start) + values)[start:].cast("d")
        assert interceptor.nonfinite((shifted,)) == [0]
    assert interceptor.nonfinite((memoryview(values).cast("d"), array("d", [1.0]))) == [0]

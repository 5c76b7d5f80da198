"""The cause of each planted difference is named with its line, and nothing where runs compute the same."""

from __future__ import annotations

import linecache

import planted_pairs as planted
import pytest
import torch

from amanda.tools.diff import Comparison, diff

QUICK = {"activation_overwrote_its_input", "stride_of_a_convolution", "adamw_in_another_form"}
BENCHMARKED = {
    "gelu_tanh", "dropout_left_on", "residual_of_the_norm", "mlp_in_chunks", "clipping_to_another_norm",
    "loss_averaged_by_batch", "compiled_against_eager",
}  # fmt: skip
"""Pairs whose kind others have, and which benchmarks/planted.py alone compares: tests have a time budget."""
TESTED = [name for name in planted.PAIRS if name not in BENCHMARKED]


def line(source: str) -> str:
    """Return the text of a "file:line"."""
    name, _, number = source.rpartition(":")
    return linecache.getline(name, int(number)) if number else ""


def is_named(first: Comparison | None, wanted: planted.Pair) -> bool:
    """Return True if the first divergence is the one that was planted."""
    if first is None or wanted.is_equal:
        return first is None and wanted.is_equal
    return (
        (not wanted.types or bool({first.type, first.other_type} & set(wanted.types)))
        and (wanted.module is None or wanted.module in (first.module, first.other_module))
        and any(wanted.line in line(source) for source in (first.source, first.other_source))
        and wanted.phase in ("", first.phase)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in TESTED]
)
def test_the_cause_of_a_planted_difference_is_named(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    wanted = planted.PAIRS[name]()
    result = diff(wanted.a, wanted.b, **wanted.options)
    assert is_named(result.first, wanted), result.sentence


def test_an_op_in_place_is_the_cause_and_not_what_reads_the_tensor() -> None:
    wanted = planted.PAIRS["activation_overwrote_its_input"]()
    result = diff(wanted.a, wanted.b)
    assert result.first is not None
    assert (result.first.type, result.first.only) == ("relu", "b")
    assert "in place in b, it overwrites what add in 2" in result.sentence


def test_two_element_types_at_one_op_are_a_difference_within_the_margin_of_a_control() -> None:
    wanted = planted.PAIRS["softmax_not_upcast"]()
    result = diff(wanted.a, wanted.b, control="float64")
    first = result.first
    assert first is not None
    assert first.is_retyped
    assert first.dtypes == ("float32", "bfloat16")
    assert "it gives float32 in a and bfloat16 in b" in result.sentence


def test_equal_scalars_of_two_ops_are_no_pair() -> None:
    x = torch.randn(3, 4)

    def counted() -> torch.Tensor:
        step = torch.zeros(()) + 1
        return x * step

    def constant() -> torch.Tensor:
        step = torch.tensor(1.0)
        return x * step

    result = diff(counted, constant)
    assert not result
    assert all(one.type == one.other_type for one in result.comparisons)


def test_a_sequence_that_is_shorter_is_compared_with_the_beginning_of_the_other() -> None:
    def positions(length: int) -> torch.Tensor:
        return torch.arange(length)

    result = diff(lambda: positions(14).sum(), lambda: positions(8).sum())
    first = result.first
    assert first is not None
    assert (first.type, first.relative > 0) == ("sum", True)
    assert result.comparisons[0].verdict == "same"

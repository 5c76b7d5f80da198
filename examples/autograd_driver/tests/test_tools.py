"""The shipped tools on Autograd: a mapping rule, arithmetic and parameters are what they need of a driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_driver import AutogradSample

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import StandardMapping
from amanda.tools.nan import NanTool
from amanda.tools.prune import PruneTool


@pytest.fixture
def sample() -> Iterator[AutogradSample]:
    """The sample, recording; its driver is the installed one."""
    sample = AutogradSample()
    with sample.recording_autodiff():
        yield sample


def test_the_mapping_finds_the_weights_of_the_model(sample: AutogradSample) -> None:
    words: list[tuple[str, Any]] = []
    tool = amanda.Tool()
    tool.depends_on(StandardMapping())
    tool.add_inst_for_op(lambda context: words.append((context["type"], context["weight_index"])))
    with amanda.apply(tool):
        sample.model()(sample.input())
    weights = [index for _, index in words if index is not None]
    assert weights == [sample.weight_index] * 2, (
        f"`standard` of mapping.py gave (type, weight_index): {words}"
    )


def test_tensors_go_to_numpy_and_back(sample: AutogradSample) -> None:
    x = sample.tensor([[1.0, -2.0], [3.0, 4.0]])
    tensors = tensors_of(x)
    array = tensors.to_numpy(x)
    assert array.tolist() == [[1.0, -2.0], [3.0, 4.0]]
    assert sample.bits(tensors.cast(array, x)) == sample.bits(x)
    assert tensors.kind(x) != tensors.kind(sample.cast(x, sample.dtypes[1]))


def test_flops_of_the_model_are_counted(sample: AutogradSample) -> None:
    flops = FlopsTool()
    with amanda.apply(flops):
        sample.model()(sample.input())
    # Two layers of 3 x 3 on a batch of 2: a multiplication and an addition for each element of a weight.
    macs = flops.result.total("macs")
    assert macs == 2 * 2 * 3 * 3, f"{macs} multiply-accumulates\n{flops.result}"


def test_the_op_that_produces_nan_is_found(sample: AutogradSample) -> None:
    nan = NanTool()
    x = sample.tensor([float("inf"), 1.0])
    with amanda.apply(nan):
        sample.add(x, sample.tensor([float("-inf"), 1.0]))
    assert len(nan.result.rows()) == 1, f"inf - inf is NaN\n{nan.result}"


def test_a_pruned_model_is_finalized(sample: AutogradSample) -> None:
    model, x, prune = sample.model(), sample.input(), PruneTool(sparsity=0.5)
    with amanda.apply(prune):
        masked = sample.numbers(model(x))
    prune.finalize(model)
    for layer in (model.first, model.second):
        zeros = sample.numbers(layer.weight).count(0.0)
        assert zeros in (4, 5), f"{zeros} of the 9 elements of a weight are zero; half of them are pruned"
    assert sample.numbers(model(x)) == masked, "without the tool the finalized model computes the same"


def test_finalize_of_no_model_says_so(sample: AutogradSample) -> None:
    model, prune = sample.model(), PruneTool(sparsity=0.5)
    with amanda.apply(prune):
        model(sample.input())
    with pytest.raises(prune.error, match="int is no"):
        prune.finalize(3)

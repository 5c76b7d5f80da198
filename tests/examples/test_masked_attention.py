"""The program of the picture in README.md makes NaN where the picture says."""

from __future__ import annotations

import runpy
from pathlib import Path

import amanda
from amanda.tools.nan import NanTool

PROGRAM = Path(__file__).parents[2] / "examples" / "masked_attention.py"


def test_softmax_of_a_row_that_is_all_masked_makes_the_first_nan() -> None:
    nan = NanTool()
    with amanda.apply(nan):
        runpy.run_path(str(PROGRAM))
    first = nan.result.first
    assert first is not None
    assert (first.type, first.module) == ("softmax", "attention")
    assert first.source.endswith("masked_attention.py:18")

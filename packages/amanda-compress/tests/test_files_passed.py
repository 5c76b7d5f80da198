"""The files of this distribution that run between an option of a tool and the effect of the option."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools import prune
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

SOURCES = str(Path(prune.__file__).parents[3])


def files_passed(run: Callable[[], object]) -> set[str]:
    files: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            files.add(frame.f_code.co_filename.removeprefix(SOURCES))

    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.parametrize(("tool", "limit"), [(PruneTool, 9), (QuantizeTool, 8)])
def test_an_option_takes_effect_within_few_files(tool: Callable[..., Any], limit: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(2, 3, 8, 8)
    options = {"sparsity": 0.5} if tool is PruneTool else {"weight_bits": 8, "activation_bits": None}
    results = []

    def run() -> None:
        with amanda.apply(tool(**options)), torch.no_grad():
            results.append(model(x))

    run()  # once before: stores of parameters are looked up once in a process
    files = files_passed(run)
    assert not torch.equal(results[-1], model(x))
    assert 2 < len(files) <= limit, sorted(files)

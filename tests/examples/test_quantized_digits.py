"""The table of digits in integers."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch's export
def test_files_have_the_accuracy_of_the_simulation(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    example("quantized_digits").main(epochs=2, rounds=1)
    lines = [one for one in capsys.readouterr().out.splitlines() if one.startswith(("| ONNX", "| OpenVINO"))]
    rows = [[cell.strip() for cell in line.strip("| ").split(" |")] for line in lines]
    assert len(rows) >= 2
    for float32, integers in zip(rows[::2], rows[1::2], strict=True):
        (name, plain, _, large, _), (_, found, simulated, small, _) = float32, integers
        assert name.endswith("float32")
        assert abs(float(found) - float(simulated)) < 1
        assert abs(float(found) - float(plain)) < 2
        assert float(small) < 0.4 * float(large)

"""The example that searches architectures on digits in PyTorch and Keras."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Torch", "Keras"])
@pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours
def test_found_models_beat_the_start_with_its_flops(
    name: str, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    searching = example("search_digits")
    monkeypatch.setattr(searching, "EPOCHS", 12)
    found = searching.compare(getattr(searching, name), seed=0, epochs=4, trials=12)
    accuracy, flops, _ = found.pop("start")
    assert set(found) == {"darts", "evolution", "random"}
    for method, (mine, cost, architecture) in found.items():
        assert mine > accuracy, method
        assert cost <= flops, method
        assert "keep" not in [label for name, label in architecture.items() if "igmoid" in name], method

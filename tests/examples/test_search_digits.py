"""The example that searches architectures on digits in PyTorch and Keras."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.long
@pytest.mark.parametrize("name", ["Torch", "Keras"])
@pytest.mark.filterwarnings("ignore")  # what Keras warns of is not ours
def test_found_models_have_the_flops_of_the_start_at_most(
    name: str, example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    searching = example("search_digits")
    for option, value in {"EPOCHS": 8, "SEARCHED": 2, "RUNS": 2, "FOLDS": 2, "BEST": 2, "AGAIN": 1}.items():
        monkeypatch.setattr(searching, option, value)
    found = searching.compare(getattr(searching, name), seed=0, trials=4, finals=1)
    accuracy, flops, architecture = found.pop("start")
    assert accuracy > 0.85
    assert set(architecture.values()) == {"keep"}
    assert set(found) == {"darts", "evolution", "random"}
    for method, (mine, cost, architecture) in found.items():
        assert mine > 0.8, method
        assert cost <= flops, method
        assert "all type=relu" in architecture, method

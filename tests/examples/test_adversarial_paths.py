"""The example that tells attacked images by their paths."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_paths_tell_attacked_images_from_others(example: Callable[[str], ModuleType]) -> None:
    accuracy, outcomes = example("adversarial_paths").detected(0, 0.9, epochs=8)
    assert accuracy > 0.9
    assert {(one.attack, one.detector) for one in outcomes} == {
        (attack, detector)
        for attack in ("FGSM", "PGD")
        for detector in ("logistic regression", "random forest")
    }
    assert all(one.success > 0.5 for one in outcomes)
    assert all(one.auc > 0.75 for one in outcomes)

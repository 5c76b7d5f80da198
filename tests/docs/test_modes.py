"""The table of tools by modes and tensor subclasses of PyTorch is what running them shows."""

from __future__ import annotations

import pytest
import torch

from amanda_docs.modes import PAGE, REASONS, SUBJECTS, classes, row, rows_of
from amanda_docs.subjects import MODES, SUBCLASSES

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLE = (
    "torch.utils.checkpoint._CachedTorchDispatchMode", "torch.masked.maskedtensor.core.MaskedTensor",
    "gradients under vmap (`is_grads_batched`)",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in SUBJECTS]
)
def test_tools_read_or_leave_what_the_table_says_and_change_no_result(name: str) -> None:
    assert row(name) in list(rows_of(PAGE.read_text()))


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="other versions have other classes")
def test_every_subclass_and_mode_of_torch_has_a_program_or_a_reason() -> None:
    assert classes() == SUBCLASSES.keys() | MODES.keys()


def test_the_page_gives_the_reason_for_each_class_without_a_program() -> None:
    told = "\n".join(rows_of(PAGE.read_text()))
    assert all(f": {reason}" in told for reason in REASONS.values())

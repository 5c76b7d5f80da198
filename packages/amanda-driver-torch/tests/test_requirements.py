"""What a torch lacks is named when the driver attaches, and nothing misbehaves."""

import logging

import pytest
import torch

import amanda


def test_without_an_essential_name_torch_runs_as_it_is_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op().__name__))
    with amanda.apply(tool) as scope:
        assert torch.equal(torch.relu(torch.ones(2)), torch.ones(2))
    assert seen == []
    (entry,) = scope.report
    assert entry.what == "TorchDriver"
    for part in ("autograd.graph._engine_run_backward", torch.__version__, "tested with torch 2.13"):
        assert part in entry.reason


def test_without_an_optional_name_the_rest_is_instrumented_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    monkeypatch.delattr(torch.compiler, "set_stance")
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.get_op().__name__))
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool):
        torch.relu(torch.ones(2))
    assert seen == ["ones", "relu"]
    assert "_checkpoint_without_reentrant_generator: recomputed ops have ids of their own" in caplog.text
    assert "compiler.set_stance: compiled callables are not seen" in caplog.text

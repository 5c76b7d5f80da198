"""Versions of torch that lack what graphs are instrumented with."""

import logging
import sys
from typing import Literal

import pytest
import torch
import torch._dynamo.eval_frame

import amanda
from amanda.drivers.torch import _requirements


def seen_of(compiled: Literal["eager", "instrument"]) -> tuple[list[str], list[str]]:
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(str(context.namespace).split("/")[-1]))
    function = torch.compile(torch.relu, backend="eager")
    with amanda.apply(tool, compiled=compiled) as scope:
        function(torch.ones(2))
    return names, [str(line) for line in scope.report]


def test_compiled_callables_run_op_by_op_and_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amanda.drivers.torch.graph._compiler", None)
    names, report = seen_of("instrument")
    assert names == ["eager", "eager"]
    assert "run op by op" in "".join(report)
    assert seen_of("eager") == (["eager", "eager"], [])


def test_a_dynamo_without_the_place_to_stand_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch._dynamo.eval_frame, "_callback_from_stance")
    _requirements.log_once.cache_clear()
    tool = amanda.Tool()
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool):
        pass
    assert "run op by op" in caplog.text

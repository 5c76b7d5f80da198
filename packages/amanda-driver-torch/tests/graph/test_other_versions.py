"""Versions of torch, and machines, that lack what graphs are instrumented with."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import children
import pytest
import torch
import torch._dynamo.eval_frame

import amanda
from amanda.drivers.torch import _requirements
from amanda.drivers.torch.graph import _driver as driver


def seen_of(compiled: Literal["eager", "instrument"]) -> tuple[list[str], list[str]]:
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(str(context.namespace).split("/")[-1]))
    function = torch.compile(lambda x: torch.relu(x), backend="eager")
    function(torch.ones(2))
    with amanda.apply(tool, compiled=compiled) as scope:
        function(torch.ones(2))
    return names, [str(line) for line in scope.report]


def without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amanda.drivers.torch.graph._compiler", None)


def without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "missing_for_graphs", lambda: ("_dynamo.guards.install_guard",))


def without_stances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.compiler, "set_stance", raising=False)


@pytest.mark.parametrize("without", [without_the_compiler, without_a_name, without_stances])
def test_compiled_callables_run_op_by_op_and_scopes_that_ask_for_graphs_are_told(
    without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    names, report = seen_of("instrument")
    assert names == ["eager", "eager"]
    assert "run op by op" in "".join(report)
    names, report = seen_of("eager")
    assert names == ["eager", "eager"]
    assert [line.count("ran op by op") for line in report] == [1]


def test_a_dynamo_that_cannot_be_kept_from_its_frames_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _requirements.log_once.cache_clear()
    without_stances(monkeypatch)
    for name in ("set_eval_frame", "_maybe_set_eval_frame"):
        monkeypatch.delattr(torch._dynamo.eval_frame, name, raising=False)
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(amanda.Tool()):
        pass
    assert "compiled callables are not seen" in caplog.text


@pytest.mark.slow
def test_without_the_native_interceptor_compiled_callables_run_op_by_op_and_it_is_said() -> None:
    names = "import test_other_versions as tests; names, report = tests.seen_of('instrument')"
    check = "assert names == ['eager', 'eager'], names; assert 'op by op' in report[0]"
    done = children.run(
        [sys.executable, "-c", f"{names}; {check}; assert len(tests.seen_of('eager')[1]) == 1"],
        env={
            **os.environ,
            "AMANDA_NATIVE": "0",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), children.PLACE]),
        },
    )
    assert done.returncode == 0, done.stderr

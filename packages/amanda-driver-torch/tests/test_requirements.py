"""What a torch lacks is named when the driver attaches, and nothing misbehaves."""

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import amanda
from amanda.drivers.torch import _requirements
from amanda.drivers.torch._targets import missing_paths


def test_without_an_essential_name_torch_runs_as_it_is_and_the_report_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.autograd.graph, "_engine_run_backward")
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    with amanda.apply(tool) as scope:
        assert torch.equal(torch.relu(torch.ones(2)), torch.ones(2))
    assert names == []
    (entry,) = scope.report
    assert entry.what == "TorchDriver"
    for part in ("autograd.graph._engine_run_backward", torch.__version__, "tested with torch up to 2.15"):
        assert part in entry.reason


def test_without_an_optional_name_the_rest_is_instrumented_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.utils.checkpoint, _requirements.CHECKPOINT_GENERATOR)
    _requirements.log_once.cache_clear()
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool):
        torch.relu(torch.ones(2))
    assert names == ["ones", "relu"]
    assert f"{_requirements.CHECKPOINT_GENERATOR}: recomputed ops have ids of their own" in caplog.text
    count = len(caplog.records)
    with amanda.apply(tool):
        pass
    assert len(caplog.records) == count


SOURCE = Path(_requirements.__file__).parent


def private_names(folder: Path = SOURCE) -> Iterator[str]:
    """What a folder's source reads of torch under a name with an underscore, or from `torch._C`."""
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                root, _, name = ast.unparse(node).partition(".")
                if root == "_native":
                    root, name = "torch", f"_C.{name}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                root, _, name = f"{node.module}.{node.names[0].name}".partition(".")
            else:
                continue
            parts = name.split(".")
            if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def test_every_private_name_that_the_driver_reads_is_checked_when_it_attaches() -> None:
    listed = (*_requirements.ESSENTIAL, *_requirements.OPTIONAL, "_C._VariableFunctions", "_VF.vf")
    listed += ("ops._c10d_functional.wait_tensor",)  # there with the collectives that are waited for
    read = {*private_names()}
    assert {name for name in read if not any(f"{path}.".startswith(f"{name}.") for path in listed)} == set()


def test_every_private_name_that_graphs_are_instrumented_with_is_listed() -> None:
    listed = (*_requirements.ESSENTIAL, *_requirements.FOR_GRAPHS)
    read = {*private_names(SOURCE / "graph")}
    assert len(read) > 20
    assert {name for name in read if not any(f"{path}.".startswith(f"{name}.") for path in listed)} == set()


HOOKS = "_C._autograd._top_saved_tensors_default_hooks"
LACKING = {
    "2.4": {HOOKS, "_C._is_torch_function_all_disabled", "fx.experimental.proxy_tensor.get_proxy_mode"},
    "2.5": {HOOKS},
    "2.6": {HOOKS},
    "2.7": {HOOKS},
}
"""What is known to be absent, by version; of torch 2.4 to 2.13 only that."""


def test_the_torch_that_runs_lacks_only_what_is_known() -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    assert missing_paths() == []
    assert [path for path in _requirements.ESSENTIAL if not _requirements.torch_attribute(path)] == []
    absent = {path for path in _requirements.OPTIONAL if not _requirements.torch_attribute(path)}
    assert absent == LACKING.get(minor, set())


@pytest.mark.parametrize("path", [path for path in _requirements.OPTIONAL if path.count(".") > 0])
def test_each_optional_name_may_be_absent(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, name = path.rpartition(".")
    monkeypatch.delattr(_requirements.torch_attribute(owner), name, raising=False)
    names: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: names.append(context.get_op().__name__))
    with amanda.apply(tool) as scope:
        torch.relu(torch.ones(2))
    assert names == ["ones", "relu"]
    assert scope.report == []

"""Dumps: what is in the folder is what the ops had, and nothing besides."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.dump import Dump, DumpTool, Entry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dump"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def dumped(folder: Path, program: Callable[[], Any], **options: Any) -> Dump:
    tool = DumpTool(folder, **options)
    with amanda.apply(tool):
        program()
    assert tool.result
    return Dump(folder)


def entries(dump: Dump, **wanted: Any) -> list[Entry]:
    def value(entry: Entry, key: str) -> Any:
        return getattr(entry if hasattr(entry, key) else dump.ops[entry.op], key)

    return [entry for entry in dump if all(value(entry, key) == wanted[key] for key in wanted)]


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_full_tensors_are_those_that_hooks_see(model: nn.Module, folder: Path, form: Any) -> None:
    seen: list[Tensor] = []
    for layer in model:
        layer.register_forward_hook(lambda module, given, made: seen.append(made.detach().clone()))
    dump = dumped(
        folder, lambda: model(torch.rand(4, 6)).square().sum().backward(), format=form,
        inputs="full", outputs="full", weights="full", gradients="full",
    )  # fmt: skip
    assert [dump.ops[one.op].module for one in entries(dump, role="weight")] == ["0", "2"]
    for name, wanted in zip("012", seen, strict=True):
        output = entries(dump, module=name, role="output")[0]  # behind it are the hook's own
        np.testing.assert_array_equal(dump.array(output), wanted.numpy())
    (gradient,) = entries(dump, module="0", role="weight gradient")
    np.testing.assert_array_equal(dump.array(gradient), model[0].weight.grad.numpy())
    (relu,) = entries(dump, type="relu", role="input")
    np.testing.assert_array_equal(dump.array(relu), seen[0].numpy())
    assert {path.suffix for path in folder.iterdir()} == {".json", f".{form}"}


def test_a_gradient_is_told_of_the_weight_in_the_passes_that_make_it_in_its_shape(folder: Path) -> None:
    weight = nn.Parameter(torch.randn(2, 4, 5))
    dump = dumped(folder, lambda: [(torch.randn(n, 2, 6, 4) @ weight).sum().backward() for n in (1, 3, 3)])
    gradients = [(entry.role, entry.shape) for entry in entries(dump, type="matmul_backward")]
    assert gradients == [("weight gradient", (2, 4, 5)), ("gradient", (6, 4, 5))]


def test_summaries_are_the_default_and_take_no_tensors(model: nn.Module, folder: Path) -> None:
    x = torch.rand(4, 6)
    dump = dumped(folder, lambda: model(x).sum().backward())
    assert [path.name for path in folder.iterdir()] == ["index.json"]
    (output,) = entries(dump, module="0", role="output")
    activations = model[0](x).detach().double().numpy()
    assert dump.array(output) is None
    assert (output.shape, output.dtype) == ((4, 5), "float32")
    assert output.summary.statistics.mean == pytest.approx(activations.mean(), rel=1e-12)
    np.testing.assert_array_equal(output.summary.sample, activations.reshape(-1))


def test_a_sample_is_spread_over_the_tensor(folder: Path) -> None:
    dump = dumped(folder, lambda: torch.arange(3100.0).reshape(50, 62).t().mul(1.0))
    expected = np.arange(3100.0).reshape(50, 62).T.reshape(-1)
    (product,) = entries(dump, type="mul", role="output")
    np.testing.assert_array_equal(product.summary.sample, expected[[i * 3099 // 31 for i in range(32)]])


NAMES = [
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
]  # fmt: skip


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_every_element_type_survives(folder: Path, form: Any) -> None:
    values = {name: (torch.randn(3, 4).abs() * 3).to(getattr(torch, name)) for name in NAMES}
    options: dict[str, Any] = {"outputs": "full", "executions": None, "format": form}
    dump = dumped(folder, lambda: [one.clone() for one in values.values()], **options)
    outputs = entries(dump, type="clone", role="output")
    for (name, value), one in zip(values.items(), outputs, strict=True):
        array = dump.array(one)
        assert array is not None
        assert array.dtype == np.dtype(getattr(ml_dtypes, name, name))
        assert array.tobytes() == bytes(value.view(torch.uint8).flatten().tolist())


def test_other_readers_of_safetensors_see_the_same_types(folder: Path) -> None:
    values = torch.randn(5)
    dumped(folder, lambda: (values.to(torch.bfloat16), values.to(torch.float8_e5m2)), outputs="full")
    tensors = load_file(folder / "tensors-00000.safetensors")
    assert [tensor.dtype for tensor in tensors.values()] == [torch.bfloat16, torch.float8_e5m2]
    assert torch.equal(next(iter(tensors.values())), values.bfloat16())


def test_empty_scalar_sparse_and_strided_tensors_are_dumped(folder: Path) -> None:
    sparse = torch.eye(3).to_sparse()

    def program() -> None:
        torch.zeros(0, 3).neg()
        torch.tensor(2.0).neg()
        torch.ones(2, 3).t()
        sparse.neg()

    dump = dumped(folder, program, outputs="full")
    arrays = [
        dump.array(entry) for entry in entries(dump, role="output") if dump.ops[entry.op].type != "ones"
    ]
    shapes = [() if array is None else array.shape for array in arrays]
    assert (0, 3) in shapes
    assert (3, 2) in shapes
    np.testing.assert_array_equal(arrays[shapes.index((3, 3))], -np.eye(3))


def test_caps_leave_summaries(model: nn.Module, folder: Path) -> None:
    tool = DumpTool(folder, outputs="full", weights="full", gradients="no", max_tensor_bytes=100)
    with amanda.apply(tool):
        model(torch.rand(4, 6))
    omissions = {(entry.role, entry.shape): entry.left_out for entry in Dump(folder)} if tool.result else {}
    assert omissions[("output", (4, 5))] is None
    assert omissions[("weight", (5, 6))] == "max_tensor_bytes"
    assert "summaries only because of max_tensor_bytes" in str(tool.result)

    total = DumpTool(folder.with_name("total"), outputs="full", gradients="no", max_bytes=170)
    with amanda.apply(total):
        model(torch.rand(4, 6))
    outputs = [entry for entry in total.result.entries if entry.role == "output"][-3:]
    assert [entry.left_out for entry in outputs] in (
        ["max_bytes", "max_bytes", None],
        [None, "max_bytes", None],
    )
    assert total.result._facts()["bytes"] <= 170


class Times(nn.Module):
    def forward(self, x: Tensor, factor: int) -> Tensor:
        return x.mul(factor)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [0]), ({"executions": 2}, [0, 1]), ({"executions": None}, list(range(7))),
     ({"executions": 2, "every": 3}, [0, 3]), ({"executions": None, "every": 3}, [0, 3, 6])],
)  # fmt: skip
def test_executions_are_chosen(folder: Path, options: dict[str, Any], expected: list[int]) -> None:
    times = Times()
    dump = dumped(folder, lambda: [times(torch.ones(2), i) for i in range(7)], **options)
    outputs = entries(dump, type="mul", role="output")
    assert [entry.execution for entry in outputs] == expected
    assert [entry.summary.statistics.mean for entry in outputs] == expected


def test_nothing_is_written_outside_the_folder(folder: Path) -> None:
    evil = nn.Sequential()
    evil.add_module("/etc/up", nn.Linear(2, 2))
    folder.mkdir()
    target = folder.parent / "target"
    target.write_text("mine")
    (folder / "tensors-00000.npz").symlink_to(target)
    (folder / "index.json").write_text('{"schema": "amanda.dump", "version": 1, "ops": [], "entries": []}')
    dump = dumped(folder, lambda: evil(torch.ones(2)), outputs="full", format="npz", overwrite=True)
    assert target.read_text() == "mine"
    assert dump.array(entries(dump, type="linear", role="output")[0]) is not None
    assert sorted(path.name for path in folder.parent.iterdir()) == ["dump", "target"]


def test_a_folder_with_other_things_is_refused(folder: Path, model: nn.Module) -> None:
    folder.mkdir()
    (folder / "thesis.txt").touch()
    with pytest.raises(AmandaError, match=r"has thesis\.txt in it"):
        DumpTool(folder)
    with pytest.raises(AmandaError, match="is not a folder"):
        DumpTool(folder / "thesis.txt")
    (folder / "thesis.txt").unlink()
    dumped(folder, lambda: model(torch.rand(1, 6)), outputs="full")
    with pytest.raises(
        AmandaError, match=r"give dump:overwrite \(shell\), overwrite=True \(Python\) or another folder"
    ):
        DumpTool(folder)
    dump = dumped(folder, lambda: torch.ones(2).neg(), overwrite=True, outputs="full")
    assert {op.type for op in dump.ops} <= {"neg", "ones"}
    assert dump.files == [path.name for path in folder.iterdir() if path.name != "index.json"]


def test_processes_of_one_run_keep_the_dumps_of_each_other(
    folder: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMANDA_TOOLS", '{"folder": "/tmp/first"}')
    first = dumped(folder, lambda: model(torch.rand(1, 6)))
    idle = DumpTool(folder)  # of a process that executes no op
    assert not idle.result.rows()
    for overwrite in (False, True):
        tool = DumpTool(folder, overwrite=overwrite)
        with amanda.apply(tool):
            model(torch.rand(1, 6))
        assert tool.result.folder.parent == folder
        assert len(Dump(tool.result.folder)) == len(Dump(folder)) == len(first)
    monkeypatch.setenv("AMANDA_TOOLS", '{"folder": "/tmp/second"}')
    with pytest.raises(AmandaError, match="has a dump in it"):
        DumpTool(folder)
    assert len(dumped(folder, lambda: torch.ones(2).neg(), overwrite=True)) < len(first)


def test_wrong_options_are_told(folder: Path) -> None:
    with pytest.raises(AmandaError, match="outputs is True; give 'no', 'summary' or 'full'"):
        DumpTool(folder, outputs=True)  # type: ignore[arg-type]
    with pytest.raises(AmandaError, match="every is 'often'"):
        DumpTool(folder, every="often")  # type: ignore[arg-type]
    with pytest.raises(AmandaError, match="every is 0"):
        DumpTool(folder, every=0)
    with pytest.raises(AmandaError, match="format is 'pickle'"):
        DumpTool(folder, format="pickle")  # type: ignore[arg-type]
    assert not folder.exists()


PROGRAM = """
import sys, time, torch, amanda
from amanda.tools.dump import DumpTool, _writer
_writer._INTERVAL = 0.0
_writer._INTERVAL_RATIO = 0.0
with amanda.apply(DumpTool(sys.argv[1], outputs="full", executions=None)):
    layer = torch.nn.Linear(3, 3)
    for i in range(1000000):
        layer(torch.full((3,), float(i)))
        if i == 20:
            print("running", flush=True)
"""


def test_the_dump_of_a_killed_program_is_readable(folder: Path) -> None:
    program = [sys.executable, "-c", PROGRAM, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with children.started(program, stdout=subprocess.PIPE, env=environment) as run:
        assert run.stdout is not None
        run.stdout.readline()
        run.send_signal(signal.SIGKILL)
    dump = Dump(folder)
    outputs = entries(dump, type="linear", role="output")
    assert len(outputs) >= 15
    for entry in outputs:
        array = dump.array(entry)
        assert array is not None
        assert np.isfinite(array).all()


def test_what_waits_is_written_at_the_end_of_the_scope(folder: Path, model: nn.Module) -> None:
    with amanda.apply(DumpTool(folder)):
        model(torch.rand(1, 6))
        assert not folder.exists()
    assert entries(Dump(folder), type="relu", role="output")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "has no index.json, so it is no dump of `amanda run dump`"),
        ("[]", "is no index of a dump that can be read"),
        (
            '{"schema": "amanda.dump", "version": 9}',
            "it is version 9 of amanda.dump, and version 1 is read here; it is newer",
        ),
        ("{", "is no index of a dump that can be read"),
    ],
)
def test_what_is_no_dump_is_told(folder: Path, index: str | None, message: str) -> None:
    folder.mkdir()
    if index is not None:
        (folder / "index.json").write_text(index)
    with pytest.raises(AmandaError, match=message):
        Dump(folder)


def test_an_index_that_points_outside_its_folder_is_refused(folder: Path, model: nn.Module) -> None:
    dumped(folder, lambda: model(torch.rand(1, 6)), outputs="full")
    index = json.loads((folder / "index.json").read_text())
    index["entries"][-1]["file"] = "../secret.npz"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(AmandaError, match=r"names '\.\./secret\.npz', which is no file of tensors"):
        Dump(folder)


def test_a_pickle_in_the_place_of_an_array_is_not_loaded(folder: Path, model: nn.Module) -> None:
    dump = dumped(folder, lambda: model(torch.rand(1, 6)), outputs="full", format="npz")
    np.savez(folder / "tensors-00000.npz", allow_pickle=True, **{dump.entries[-1].key: np.array([print])})
    with pytest.raises(AmandaError, match="is no file of tensors that can be read"):
        dump.array(dump.entries[-1])


def test_nan_and_inf_survive_in_the_index(folder: Path) -> None:
    dump = dumped(folder, lambda: torch.tensor([math.nan, math.inf, -math.inf, 1.0]).mul(1.0))
    (product,) = entries(dump, type="mul", role="output")
    assert np.isnan(product.summary.sample[0])
    assert product.summary.sample[1:] == (math.inf, -math.inf, 1.0)
    json.loads((folder / "index.json").read_text(), parse_constant=pytest.fail)


def test_each_rank_has_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    dump = DumpTool(folder)
    with amanda.apply(dump):
        torch.ones(2).neg()
    assert dump.result.folder == folder / "rank1"
    assert len(Dump(folder / "rank1"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_processes_that_were_given_one_folder_do_not_write_over_each_other(
    folder: Path, overwrite: bool
) -> None:
    if overwrite:
        dumped(folder, lambda: torch.ones(2).exp(), outputs="full")
    tools = [DumpTool(folder, outputs="full", overwrite=overwrite) for _ in range(3)]
    for tool, name in zip(tools, ("neg", "abs", "sin"), strict=True):
        with amanda.apply(tool):
            getattr(torch, name)(torch.ones(2))
    folders = [tool.result.folder for tool in tools]
    assert folders[0] == folder
    assert {place.parent for place in folders[1:]} == {folder}
    for place, name in zip(folders, ("neg", "abs", "sin"), strict=True):
        assert entries(Dump(place), type=name, role="output")
        assert {path.suffix for path in place.iterdir() if path.is_file()} == {".json", ".safetensors"}


def test_an_index_is_there_while_it_is_written_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times, tool = Times(), DumpTool(folder, executions=None)
    with amanda.apply(tool):
        times(torch.ones(2), 1)
        assert tool.result
        monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: pytest.fail(f"{path} is removed"))
        times(torch.ones(2), 2)
        assert tool.result
    assert len(entries(Dump(folder), type="mul", role="output")) == 2


def test_clearing_starts_anew(folder: Path) -> None:
    times, tool = Times(), DumpTool(folder, outputs="full")
    with amanda.apply(tool):
        times(torch.ones(2), 3)
        assert tool.result
        tool.clear()
        times(torch.ones(2), 4)
    outputs = [entry for entry in tool.result.entries if entry.role == "output"]
    assert outputs[-1].summary.statistics.mean == 4.0
    assert len(Dump(folder).files) == 1


def test_a_result_goes_to_every_form(folder: Path, model: nn.Module, tmp_path: Path) -> None:
    tool = amanda.load_tool("dump", folder=folder, outputs="full")
    with amanda.apply(tool):
        model(torch.rand(1, 6))
    result = tool.result
    assert "4 of 6 tensors" in str(result)
    assert "tensors-00000.safetensors" in result.to_csv()
    assert json.loads(result.to_json())["schema"] == "amanda.dump"
    assert list(result.to_pandas()["module"])[-1] == "2"


def test_dumping_changes_nothing(folder: Path, model: nn.Module) -> None:
    x = torch.rand(2, 6)
    plain = model(x)
    outputs: list[Tensor] = []
    dumped(folder, lambda: outputs.append(model(x)), inputs="full", outputs="full")
    assert torch.equal(outputs[0], plain)


def test_a_program_that_goes_elsewhere_leaves_the_dump_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tool = DumpTool("tensors", outputs="full")  # type: ignore[arg-type]
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tool.result.folder == tmp_path / "tensors"
    with amanda.apply(tool):
        torch.relu(torch.ones(2))
    assert len([*Dump(tmp_path / "tensors")]) == 4
    assert not (tmp_path / "elsewhere" / "tensors").exists()

"""Files of tools: written whole or not at all, read with one error, shared by processes."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from disk import full_disk
from tool_files import READERS, X, save_each, tools_after_a_run
from torch import nn

import amanda
from amanda.errors import AmandaError, FileError
from amanda.tools.command import merge
from amanda.tools.command._processes import folder_of_ranks
from amanda.tools.diff import diff
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.results import Column, Table, load, locked
from amanda.tools.results import merge as together
from amanda.tools.trace import load as load_trace
from amanda.tools.view import main as view


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)))


@pytest.fixture(scope="module")
def tools(model: nn.Module) -> dict[str, Any]:
    return tools_after_a_run(model)


@pytest.fixture(scope="module")
def saved(tools: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_each(tools, folder)
    return folder


def quiet(command: Callable[[list[str]], int], *arguments: str | Path) -> None:
    assert command(list(map(str, arguments))) == 0


WRITERS: dict[str, Callable[[dict[str, Any], Path, Path], object]] = {
    "flops.json": lambda tools, saved, to: tools["flops"].result.save(to),
    "flops.html": lambda tools, saved, to: tools["flops"].result.save(to),
    "stats.csv": lambda tools, saved, to: tools["stats"].result.save(to),
    "a.trace.json.gz": lambda tools, saved, to: tools["profile"].result.save(to),
    "scales.json": lambda tools, saved, to: tools["quantize"].save(to),
    "scales.safetensors": lambda tools, saved, to: tools["quantize"].save(to),
    "path.npz": lambda tools, saved, to: tools["path"].result.paths[0].save(to),
    "architecture.json": lambda tools, saved, to: tools["search"].save(to),
    "merged.json": lambda tools, saved, to: quiet(merge, saved / "flops.json", "-o", to),
    "page.html": lambda tools, saved, to: quiet(view, saved / "flops.json", "-o", to),
    "a.zip": lambda tools, saved, to: diff(lambda: torch.relu(X), lambda: torch.relu(X), bundle=to),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_leaves_the_file_and_names_it(
    name: str, tools: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    write, path = partial(WRITERS[name], tools, saved), tmp_path / name
    write(path)
    before = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((saved / "flops.json").stat().st_mode)
    told = ""
    if name == "a.zip":  # the dumps of its runs are written, too
        path.unlink()
        path.mkdir()
        with pytest.raises(AmandaError, match=r"bundle is .*a\.zip.*it is a folder"):
            write(path)
        return
    try:
        with full_disk(0):
            write(path)
    except (FileError, AssertionError) as error:
        told = str(error)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [name]
    if name not in ("merged.json", "page.html"):
        assert f"{path} cannot be written" in told


def test_results_with_nan_are_valid_json_and_come_back(tmp_path: Path, tools: dict[str, Any]) -> None:
    columns = [Column("op"), Column("loss", number=True, merge="max")]
    rows = [("a", float("nan")), ("b", float("-inf")), ("c", 1.0)]
    path = Table("losses", 1, columns, rows, facts={"last": float("inf")}).save(tmp_path / "a.json")
    told = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert [row["loss"] for row in told["rows"]] == ["nan", "-inf", 1.0]
    assert told["last"] == "inf"
    values = [row[1] for row in load(path).rows()]
    assert repr(values) == "[nan, -inf, 1.0]"
    assert "nan" in str(load(path))
    together({"a": load(path), "b": load(path)})


def headers(local: int, central: int, value: int) -> Callable[[bytes], bytes]:
    """Set a byte of the headers of a zip archive's first member."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        for mark, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
            changed[changed.find(mark) + offset] = value
        return bytes(changed)

    return change


def with_content(name: str, content: str) -> Callable[[bytes], bytes]:
    """Give a zip archive with one member."""

    def change(_: bytes) -> bytes:
        path = Path("changed.zip")
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, content)
        return path.read_bytes()

    return change


def inner(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[70:90] = b"\xff" * 20
    return bytes(changed)


DEEP = b"[" * 200_000
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "deep": lambda data: DEEP,
    "a list": lambda data: b"[1, 2]",
    "a number": lambda data: b"3",
    "binary": lambda data: bytes(range(256)) * 8,
    "no text": lambda data: b"\xff\xfe{}",
    "gzip that ends early": lambda data: b"\x1f\x8b\x08\x00",
    "inner": inner,
}
ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    "encrypted": headers(6, 8, 1),
    "unknown compression": headers(8, 10, 99),
    "a list of runs": with_content("diff.json", '{"runs": ["a"]}'),
    "deep": with_content("diff.json", "[" * 200_000),
    "a path out": with_content("../diff.json", "{}"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_one_error_that_names_it(
    name: str, tools: dict[str, Any], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, path = partial(READERS[name], tools), tmp_path / "folder" / Path(name).name
    path.parent.mkdir()
    if "/" in name:
        for one in (saved / name).parent.iterdir():
            (path.parent / one.name).write_bytes(one.read_bytes())
    content = b"{}" if name == "partition.json" else (saved / name).read_bytes()
    is_archive = path.suffix in (".zip", ".npz")
    for what, damage in {**DAMAGES, **(ARCHIVES if is_archive else {})}.items():
        if what == "inner" and not is_archive:
            continue
        path.write_bytes(damage(content))
        with pytest.raises(AmandaError) as caught:
            read(path)
        assert path.name in str(caught.value), (what, caught.value)
    path.unlink()
    with pytest.raises(AmandaError, match="folder"):  # whose file is gone
        read(path)


@pytest.mark.parametrize("name", ["flops.json", "coverage.json", "profile.json", "stats.json", "trace.json"])
def test_a_file_with_values_of_other_types_is_refused_where_it_is_read(
    name: str, saved: Path, tmp_path: Path
) -> None:
    content, path = json.loads((saved / name).read_text()), tmp_path / name
    key = next(key for key in ("places", "kept", "ops", "rows") if key in content)
    for value in (None, 3, [], "x"):
        path.write_text(json.dumps({**content, key: value if value != [] else [value]}))
        with pytest.raises(AmandaError, match=name):
            load_trace(path) if name == "trace.json" else load(path)


def test_a_pipe_in_the_place_of_a_tensor_file_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes((saved / "npz" / "index.json").read_bytes())
    os.mkfifo(tmp_path / "tensors-00000.npz")
    dump = Dump(tmp_path)
    with pytest.raises(AmandaError, match="no regular file"):
        dump.array(next(entry for entry in dump if entry.file))


LOCKED = """
import sys, time
from pathlib import Path
from amanda.tools.results import locked
path = Path(sys.argv[1])
for _ in range(50):
    with locked(path):
        number = int(path.read_text())
        path.write_text(str(number + 1))
"""


@pytest.mark.slow
def test_processes_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("0")
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(children.started([sys.executable, "-c", LOCKED, str(path)])) for _ in range(4)
        ]
        assert [one.wait(timeout=100) for one in started] == [0] * 4
    assert path.read_text() == "200"
    assert [one.name for one in tmp_path.iterdir()] == ["number"]
    with locked(path):
        assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_full_disk_does_not_end_the_program_of_a_dump(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("amanda.tools.dump._writer.SHARD", 400)
    folder = tmp_path / "dump"
    tool = DumpTool(folder, outputs="full", executions=None, format=form)
    with amanda.apply(tool):
        for step in range(12):
            with full_disk() if 4 <= step < 8 else contextlib.nullcontext():
                torch.relu(X)
                if step == 7:
                    incomplete = tool.result
        assert Dump(folder).incomplete
    assert f"The folder lacks the last tensors: {folder}" in str(incomplete)
    assert "have summaries only because of a failed write" in str(incomplete)
    assert [f"{folder}" in one.getMessage() for one in caplog.records] == [True]
    dump = Dump(folder)
    outputs = [entry for entry in dump if entry.role == "output"]
    assert len(outputs) == 12
    assert all(entry.file or entry.left_out == "a failed write" for entry in outputs)
    assert sum(dump.array(entry) is not None for entry in outputs) >= 8
    assert dump.incomplete
    assert not tool.result.failure


@pytest.mark.parametrize("name", ["thesis.tex", "index.json", "../thesis.tex", ".hidden"])
def test_overwriting_a_dump_removes_what_dumps_write_alone(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for one in (saved / "safetensors").iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    index = json.loads((folder / "index.json").read_text())
    index["entries"][0]["file"] = name
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "thesis.tex").write_text("three years")
    with pytest.raises(AmandaError, match="no file of tensors"):
        DumpTool(folder, overwrite=True)
    (folder / "index.json").write_bytes((saved / "safetensors" / "index.json").read_bytes())
    (folder / "tensors-00099.npz").touch()
    tool = DumpTool(folder, overwrite=True)
    with amanda.apply(tool):
        torch.relu(X)
    assert tool.result.folder == folder
    assert {one.name for one in folder.iterdir()} == {"index.json", "thesis.tex"}


def test_an_index_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"site": true}')
    with pytest.raises(AmandaError, match=r"index\.json is no index of a dump"):
        DumpTool(tmp_path, overwrite=True)


def test_a_dump_begins_where_a_killed_one_has_left_a_part(tmp_path: Path) -> None:
    (tmp_path / ".index.json.0123abcd.part").touch()
    tool = DumpTool(tmp_path)
    with amanda.apply(tool):
        torch.relu(X)
    assert len(tool.result.entries) == len(Dump(tmp_path)) > 0


@pytest.mark.parametrize("folder", ["/proc/dump", "/dev/null/dump"])
def test_a_folder_that_cannot_be_written_to_is_told_before_the_program_runs(folder: str) -> None:
    with pytest.raises(
        AmandaError, match=rf"folder is .*{folder}.*\((the folder /proc cannot|/dev/null is no)"
    ):
        DumpTool(Path(folder))
    done = children.run([sys.executable, "-m", "amanda", "run", "-t", f"flops:out={folder}/a.json", "x.py"])
    assert done.returncode == 2
    assert f"option out: {folder}/a.json cannot be written" in done.stderr


@pytest.mark.parametrize("what", ["file", "link", "folder of all"])
def test_a_name_that_somebody_else_has_taken_does_not_stop_ranks(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "0")
    folder = Path(folder_of_ranks() or "")
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    if what == "file":
        folder.touch()
    elif what == "link":
        folder.symlink_to("nowhere")
    else:
        folder.mkdir(mode=0o777)
        folder.chmod(0o777)
    assert folder_of_ranks() is None


EVERY = """
import multiprocessing, os, resource, time, torch
def work():
    for step in range(60):
        torch.relu(torch.ones(2))
        time.sleep(0.05)
        if step == 15:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        if step == 30:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    os.kill(os.getpid(), 9)
if __name__ == "__main__":
    torch.relu(torch.ones(2))
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_saving_at_intervals_goes_on_after_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text(EVERY)
    command = ["run", "-q", "-t", "flops:type=relu", "-o", "out", "--every", "0.2", "--", "p.py"]
    children.run([sys.executable, "-m", "amanda", *command], cwd=tmp_path, check=True)
    rows = json.loads((tmp_path / "out" / "flops.json").read_text())["rows"]
    assert sum(row["calls"] for row in rows) >= 45

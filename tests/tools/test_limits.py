"""Files of strangers: read up to a limit, refused in plain words, and shown without steering the terminal."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import numpy as np
import pytest
from safetensors.numpy import save_file

from amanda.errors import AmandaError, printable
from amanda.tools.command import merge
from amanda.tools.command._instrument import read_arrays as read_state
from amanda.tools.dump import Dump, DumpTool
from amanda.tools.effective_path import EffectivePath
from amanda.tools.quantize._result import read_scales
from amanda.tools.results import Table, TooLargeError, load, read_npz, read_text, reading

STEERING = "conv\x1b[2J\x1b]0;own\x07\r\u202e\x9b31m"


def bomb(path: Path, size: int = 1_600_000_000) -> Path:
    """An npz file of little more than a thousandth of what it holds."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("weight.npy", "w", force_zip64=True) as file,
    ):
        header = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(file, header)
        for _ in range(size // 1_000_000):
            file.write(bytes(1_000_000))
    return path


def text_bomb(path: Path) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b" " * 1_000_000)
    return path


def scales(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(1_100_000_000)  # a hole, which takes no room
    return path


@pytest.mark.parametrize(
    ("make", "name", "read"),
    [
        (bomb, "paths.npz", EffectivePath.load),
        (bomb, "state.npz", read_state),
        (bomb, "any.npz", read_npz),
        (text_bomb, "flops.json.gz", load),
        (scales, "scales.safetensors", read_scales),
        (scales, "state.safetensors", read_state),
        (scales, "scales.json", read_scales),
        (scales, "flops.json", load),
    ],
)
def test_a_file_that_comes_to_too_much_is_refused_before_it_is_read(
    make: Callable[[Path], Path], name: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = make(tmp_path / name)
    tracemalloc.start()
    with pytest.raises(
        TooLargeError, match=rf"{name} comes to .*B or more, and at most .*B are read; .*--limit"
    ):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 600_000_000
    tracemalloc.stop()


def test_an_option_and_an_argument_raise_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bomb(tmp_path / "small.npz", 2_000_000)
    with (
        reading(1_000_000),
        pytest.raises(TooLargeError, match=r"small\.npz comes to 2 MB or more, and at most 1 MB"),
    ):
        read_npz(path)
    assert read_npz(path)["weight"].size == 2_000_000
    table = Table("calls", 1, [], [], title="x" * 5000)
    files = [str(table.save(tmp_path / f"rank{rank}.calls.json")) for rank in (0, 1)]
    assert merge([*files, "--limit", "1kB"]) == 1
    assert "rank0.calls.json comes to 5." in capsys.readouterr().err
    assert merge([*files, "--limit", "1 MB"]) == 0
    assert merge([*files, "--limit", "much"]) == 2


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    import amanda

    folder = tmp_path / "dump"
    tool = DumpTool(folder, outputs="full")
    with amanda.apply(tool):
        torch.ones(3).cumsum(0)
    assert tool.result
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**12]}, {"shape": [10**30]}, {"shape": [-3]}, {"dtype": "object"}, {"dtype": "float64"},
        {"dtype": "O8"}, {"dtype": "V99"},
    ],
)  # fmt: skip
def test_an_index_that_says_what_is_not_so_is_told(dump: Path, change: dict[str, Any]) -> None:
    index = json.loads((dump / "index.json").read_text())
    for entry in index["entries"]:
        entry.update(change)
    (dump / "index.json").write_text(json.dumps(index))
    crafted = Dump(dump)
    assert crafted.files
    for entry in crafted:
        if entry.file is not None:
            with pytest.raises(AmandaError, match=r"index\.json disagree|is no element type"):
                crafted.array(entry)


def test_a_member_that_says_what_is_not_so_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lies.npz"
    for header in (
        {"descr": "<f8", "fortran_order": False, "shape": (10**12,)},
        {"descr": "|O", "fortran_order": False, "shape": (2,)},
    ):
        with zipfile.ZipFile(path, "w") as archive, archive.open("a.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.write(bytes(16))
        with pytest.raises(ValueError, match=r"a\.npy (is to have 8000000000000 bytes|holds objects)"):
            read_npz(path)


def test_what_is_within_the_limit_is_read_as_ever(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "b": np.array("text"),
        "c": np.zeros((0, 4)),
        "d": np.array(7),
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    found = read_npz(tmp_path / "x.npz")
    assert found.keys() == arrays.keys()
    assert all(
        np.array_equal(found[name], one) and found[name].dtype == one.dtype for name, one in arrays.items()
    )
    save_file({"a": arrays["a"]}, tmp_path / "x.safetensors")
    assert np.array_equal(read_state(tmp_path / "x.safetensors")["a"], arrays["a"])
    table = Table("calls", 1, [], [], title="calls")
    text = gzip.compress(table.to_json()[:10].encode()) + gzip.compress(table.to_json()[10:].encode())
    (tmp_path / "two members.json.gz").write_bytes(text)
    assert load(tmp_path / "two members.json.gz").title == "calls"
    (tmp_path / "short.json.gz").write_bytes(text[:25])
    with pytest.raises(AmandaError, match="ends too early or is damaged"):
        load(tmp_path / "short.json.gz")


def hostile(path: Path) -> Path:
    """A result whose every text would steer a terminal."""
    told = {
        "schema": "amanda.stranger", "version": 1, "title": STEERING, "notes": [STEERING],
        "columns": [{"name": STEERING}, {"name": "calls", "total": True}],
        "rows": [{STEERING: STEERING, "calls": 1}],
    }  # fmt: skip
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("command", [["merge"], ["merge", "--per-rank"], ["diff"], ["view"]])
def test_names_of_a_strange_file_do_not_steer_the_terminal(tmp_path: Path, command: list[str]) -> None:
    files = [hostile(tmp_path / name).name for name in ("rank0.x.json", "rank1.x.json")]
    done = children.run([sys.executable, "-m", "amanda", *command, *files], cwd=tmp_path)
    assert "Traceback" not in done.stderr
    said = done.stdout + done.stderr
    assert said
    assert not [one for one in said if one != "\n" and not one.isprintable()], said


def test_a_result_on_a_terminal_has_no_escapes_of_its_names(tmp_path: Path) -> None:
    import io

    from rich.console import Console

    written = io.StringIO()
    Console(file=written, force_terminal=True, color_system=None, width=120).print(
        load(hostile(tmp_path / "x.json"))
    )
    assert "\x1b[2J" not in written.getvalue()
    assert "\\x1b[2J" in written.getvalue()


def test_text_of_many_languages_is_printed_as_it_is() -> None:
    assert printable("größe 模型 👍\n\tx") == "größe 模型 👍\n\tx"
    assert printable("a\nb", line=True) == "a\\nb"
    assert printable(STEERING).isprintable()


@pytest.mark.parametrize("written", [bytes, gzip.compress])
def test_a_result_is_read_from_a_pipe(written: Callable[[bytes], bytes]) -> None:
    read, write = os.pipe()
    try:
        os.write(write, written(b'{"a": 1}'))
        os.close(write)
        assert read_text(Path(f"/dev/fd/{read}")) == b'{"a": 1}'
    finally:
        os.close(read)


def test_a_pipe_is_held_to_the_limit() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x" * 100)
        os.close(write)
        with reading(50), pytest.raises(TooLargeError, match="at most 50 B are read"):
            read_text(Path(f"/dev/fd/{read}"))
    finally:
        os.close(read)

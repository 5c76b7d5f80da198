"""Files are written whole or not at all, and errors name them."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import stat
import sys
import tempfile
import threading
from pathlib import Path

import children
import pytest
from disk import full_disk

from amanda.errors import AmandaError, ArtefactError, FileError, MissingFileError
from amanda.files import (
    check_file_to_write,
    check_folder_to_write,
    file_beside,
    is_part,
    naming,
    replacing,
    replacing_all,
    write_file,
)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.json", "before")
    with pytest.raises(FileError, match=r"a\.json cannot be written: File too large") as caught, full_disk():
        write_file(path, "after" * 100)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert isinstance(caught.value, OSError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


KILLED = """
import os, signal, sys
from amanda.files import replacing
with replacing(sys.argv[1]) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.json", "before")
    assert children.run([sys.executable, "-c", KILLED, path]).returncode == -signal.SIGKILL
    assert path.read_text() == "before"
    (part,) = (entry.name for entry in tmp_path.iterdir() if entry != path)
    assert is_part(part)
    assert is_part(part, "a.json")
    assert not is_part(part, "b.json")
    write_file(path, "after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_of_a_file_at_the_same_time_have_parts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        with replacing(path) as third:
            third.write_text("third")
    assert path.read_text() == "first"
    assert first not in (second, third)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such locks")
def test_a_part_that_its_writer_moves_before_it_is_locked_is_no_other_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    path, later_writer = tmp_path / "a.json", contextlib.ExitStack()
    lock, find = fcntl.flock, Path.stat

    def lock_after_move(handle: int, operation: int) -> None:
        monkeypatch.setattr("fcntl.flock", lock)
        (tmp_path / ".a.json.00000000.part").replace(path)
        lock(handle, operation)
        monkeypatch.setattr(Path, "stat", find_nothing)

    def find_nothing(self: Path, **options: bool) -> os.stat_result:
        try:
            return find(self, **options)
        except FileNotFoundError:
            monkeypatch.setattr(Path, "stat", find)
            later_writer.enter_context(replacing(path)).write_text("later")
            raise

    monkeypatch.setattr("fcntl.flock", lock_after_move)
    write_file(path, "earlier")
    assert path.read_text() == "earlier"
    later_writer.close()
    assert path.read_text() == "later"
    assert list(tmp_path.iterdir()) == [path]


def test_writers_whose_library_moves_a_file_there_have_parts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replacing(path, is_moved_over=True) as part:
        write_file(tmp_path / "library", "first").replace(part)
        with replacing(path) as other_part:
            assert part.read_text() == "first"
            other_part.write_text("second")
    assert path.read_text() == "first"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such locks")
def test_a_file_system_without_locks_has_nothing_left_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    path = write_file(tmp_path / "a.json", "text")
    assert path.read_text() == "text"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_a_part_is_not_followed(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.json") as part:
        part.write_text("text")
    precious = write_file(tmp_path / "precious", "text")
    part.symlink_to(precious)
    write_file(tmp_path / "a.json", "new")
    assert precious.read_text() == "text"
    assert (tmp_path / "a.json").read_text() == "new"


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), replacing(tmp_path / "a") as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_new_file_has_the_mode_of_the_umask_and_an_older_one_keeps_its_own(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = write_file(tmp_path / "a", "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_file(path, "newer")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("path_in_target", ["", "tensors"])
def test_a_file_that_a_library_makes_for_the_owner_alone_has_the_mode_of_the_umask(
    path_in_target: str, tmp_path: Path
) -> None:
    def move_there(path: Path) -> None:
        handle, private_file = tempfile.mkstemp(dir=path.parent)
        os.close(handle)
        Path(private_file).replace(path)

    before = os.umask(0o027)
    try:
        with replacing(tmp_path / "a") as part:
            move_there(part)
        with replacing_all(tmp_path / "b", force=False) as new:
            if path_in_target:
                new.mkdir()
            move_there(new / path_in_target)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "b" / path_in_target):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_file(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_long_name_has_a_part_within_the_limit(tmp_path: Path) -> None:
    assert write_file(tmp_path / ("\U0001f40b" * 63), "text").read_text() == "text"


def test_errors_name_the_file_and_the_reason(tmp_path: Path) -> None:
    write_file(tmp_path / "file", "")
    inside = tmp_path / "file" / "a"
    for path, reason in ((tmp_path, "Is a dir"), (inside, "Not a dir"), (Path("/proc/a"), "No such file")):
        with pytest.raises(FileError, match=reason) as caught:
            write_file(path, "text")
        assert str(path) in str(caught.value)
    with pytest.raises(MissingFileError, match="there is no folder") as caught:
        write_file(tmp_path / "no" / "a", "text")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError, match=r"a cannot be read: No such file"), naming("a", "read"):
        Path("a").read_text()


@pytest.mark.parametrize("path", ["/proc/a", "/proc/a/b", "/dev/null/a"])
def test_folders_are_checked_before_there_is_anything_to_write(path: str) -> None:
    for check in (check_file_to_write, check_folder_to_write):
        with pytest.raises(FileError, match=f"^{path} cannot be written"):
            check(path)


def test_a_check_makes_nothing(tmp_path: Path) -> None:
    check_file_to_write(tmp_path / "a")
    check_folder_to_write(tmp_path / "b" / "c")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileError, match="it is a folder"):
        check_file_to_write(tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/etc/passwd", "outside of its folder"), ("../secret", "outside of its folder"),
        ("inner/../../secret", "outside of its folder"), ("inner/../data", "outside of its folder"),
        ("link", "outside of its folder"), ("folder-link/secret", "outside of its folder"),
        ("pipe", "no regular file"), ("inner", "no regular file"), ("none", "No such file"),
    ],
)  # fmt: skip
def test_a_file_that_another_one_names_lies_in_its_folder(name: str, why: str, tmp_path: Path) -> None:
    folder = tmp_path / "download"
    (folder / "inner").mkdir(parents=True)
    for path in (tmp_path / "secret", folder / "data"):
        path.write_text("")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder-link").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    with pytest.raises(AmandaError, match=why):
        file_beside(folder / "model", name, "the data")
    assert file_beside(folder / "model", "data", "the data") == folder / "data"


def test_a_file_of_a_cache_whose_files_are_links_is_read(tmp_path: Path) -> None:
    for name in ("model", "data"):
        write_file(tmp_path / f"blob-{name}", "")
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / name).symlink_to(f"../blob-{name}")
    assert file_beside(tmp_path / "snapshot" / "model", "data", "the data").name == "data"


def test_a_file_and_its_data_replace_others_together(tmp_path: Path) -> None:
    target = write_file(tmp_path / "a", "before")

    def write(force: bool, size: int) -> None:
        with replacing_all(target, force) as path:
            path.write_text("after")
            (path.parent / "a.data").write_text("data" * size)

    with pytest.raises(ArtefactError, match="is there already"):
        write(force=False, size=1)
    with pytest.raises(FileError, match="a cannot be written: File too large"), full_disk():
        write(force=True, size=100)
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"a": "before"}
    write(force=True, size=1)
    assert {entry.name: entry.read_text() for entry in tmp_path.iterdir()} == {"a": "after", "a.data": "data"}

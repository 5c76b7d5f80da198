"""Files that are written whole or not at all, under errors that name them.

with replacing("flops.json") as part:
    part.write_text(text)
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from tempfile import TemporaryFile, mkdtemp

from amanda.errors import ArtefactError, FileError, MissingFileError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "check_file_to_write", "check_folder_to_write", "file_beside", "is_part", "naming", "replacing",
    "replacing_all", "write_file",
]  # fmt: skip

_PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part", re.DOTALL)
_MAX_NAME_LENGTH = 60
"""Characters of a name that the name of its part has: 255 bytes are the most, and a character has up to 4."""


def write_file(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file as `replacing` does; return its path.

    Args:
        path: File to write or replace.
        content: Bytes, or a text, which is written as UTF-8.

    Raises:
        FileError: Where the file cannot be written.
    """
    with replacing(path) as part:
        part.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return Path(path)


@contextmanager
def replacing(path: str | os.PathLike[str], *, is_moved_over: bool = False) -> Iterator[Path]:
    """Return a context with the path of a new file, which replaces the file at `path` when it is left.

    The new file, called the part, lies beside the file.  After an exception, or if the process is killed, the
    file is as it was before; the part of a killed process is taken over by the next one that writes the file.
    A new file has the mode that the umask leaves, a replaced file keeps its mode.  For something other than a
    file, such as a pipe, the context gives that path itself.

    Args:
        path: File to write or replace.
        is_moved_over: True for a library that moves a file of its own over the yielded path, where a lock on
            the first file says nothing to other writers: the path is then of this writer alone.

    Raises:
        FileError: In place of an OSError.
    """
    path = Path(path)
    with naming(path):
        # A link stays a link: the file that it leads to is replaced.
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        is_special_file = target.exists() and not target.is_file()
        if is_special_file:
            yield target
            return
        part, lock_handle = _create_part(target, is_moved_over)
        try:
            new_mode = part.stat().st_mode
            yield part
            # A library that moves a file of its own there, such as safetensors, makes it for the owner alone.
            mode = target.stat().st_mode if target.exists() else new_mode
            with suppress(OSError):  # a file system without modes
                part.chmod(stat.S_IMODE(mode))
            _flush_to_disk(part)
            part.replace(target)
        except BaseException:
            # If it is in its place by now, another writer may have a part at its path.
            if lock_handle is None or _is_at(part, lock_handle):
                with suppress(OSError):
                    part.unlink(missing_ok=True)
            raise
        finally:
            if lock_handle is not None:
                os.close(lock_handle)


def _create_part(target: Path, is_moved_over: bool) -> tuple[Path, int | None]:
    """Make the part of a file, under a lock if the system has locks; take over a part that has no writer.

    Without a lock the part has a name of its own.  is_moved_over: whether a lock would not last.

    Returns its path, and the handle that holds the lock; None without a lock.
    """
    # Beside the target, since a file is replaced as a whole within one file system alone.
    prefix = f".{target.name[:_MAX_NAME_LENGTH]}"
    if sys.platform != "win32" and not is_moved_over:
        with suppress(OSError):  # another writer has the part, or the file system has no locks
            shared_part = target.with_name(f"{prefix}.00000000.part")
            return shared_part, _open_locked(shared_part)
    own_part = target.with_name(f"{prefix}.{token_hex(4)}.part")
    os.close(os.open(own_part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return own_part, None


def _open_locked(part: Path) -> int:
    """Open or make a file, lock it until its handle is closed, and empty it; return the handle.

    Raises BlockingIOError if the file is locked, or was moved away before it could be locked.  After another
    OSError, as on a file system without locks, the file is removed.
    """
    # Made by `open`, so that the umask decides its mode; `tempfile` makes files for the owner alone.
    handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Since it was opened, its writer may have moved it to its place.
        if not _is_at(part, handle):
            raise BlockingIOError
        os.truncate(handle, 0)
    except BaseException as error:
        # After an interrupt the file may be another writer's; else it is of no use without locks.
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            part.unlink(missing_ok=True)
        os.close(handle)
        raise
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """Return True if a path leads to an open file: not to another file, nor to none."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


@contextmanager
def replacing_all(target: Path, force: bool) -> Iterator[Path]:
    """Return a context with a path in a new folder, whose contents replace the target when it is left.

    The file or folder at the path replaces the target; files beside the path, such as a model's data, replace
    those beside the target.  Everybody whom the umask lets read new files can read them.  After an exception,
    such as KeyboardInterrupt, the target is as it was.  A process that is killed leaves the new folder,
    `.NAME.` and eight letters, with what was to be replaced.

    Args:
        target: File or folder to write or replace.
        force: Whether present files are replaced.

    Raises:
        ArtefactError: For a present file without `force`.
        FileError: In place of an OSError.
    """
    with naming(target):
        folder = Path(mkdtemp(prefix=f".{target.name[:_MAX_NAME_LENGTH]}.", dir=target.parent))
        try:
            new, old = folder / "new", folder / "old"
            new.mkdir()
            old.mkdir()
            yield new / target.name
            # The mode that the umask leaves a new file; some libraries make files for the owner alone.
            new_mode = new.stat().st_mode & 0o666
            for path in new.rglob("*"):
                if path.is_file():
                    with suppress(OSError):  # a file system without modes
                        path.chmod(stat.S_IMODE(path.stat().st_mode) | new_mode)
                    _flush_to_disk(path)
            # The target itself last (False sorts first): a file never lacks the data that belong to it.
            names = sorted((path.name for path in new.iterdir()), key=lambda name: name == target.name)
            for name in names:
                final_path = target.parent / name
                if os.path.lexists(final_path) and not force:
                    raise ArtefactError(f"{final_path} is there already; force (--force) replaces it")
            for name in names:
                _move_into_place(new / name, target.parent / name, old / name)
        finally:
            rmtree(folder, ignore_errors=True)


def _move_into_place(new: Path, target: Path, old: Path) -> None:
    """Move a file or folder to `target`; a file there is replaced, a folder moves to `old`.

    After an error the folder is moved back.
    """
    if not target.is_dir():
        new.replace(target)
        return
    target.replace(old)
    try:
        new.replace(target)
    except BaseException:
        old.replace(target)
        raise


def _flush_to_disk(path: Path) -> None:
    """Wait until a file's contents are on the disk, so that a crash of the system leaves no empty file."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming(path: str | os.PathLike[str], verb: str = "written") -> Iterator[None]:
    """Return a context that raises a FileError, which names a path, in place of an OSError.

    A FileError of the code within passes as it is.

    Args:
        path: File or folder that the error names.
        verb: What could not be done with the file: "written", "read".

    Raises:
        FileError: In place of an OSError; MissingFileError if the file is not there.
    """
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        parent = Path(path).parent
        # The system names the file that is to be made; what is missing is its folder.
        if isinstance(error, FileNotFoundError) and not parent.exists():
            reason = f"there is no folder {parent}"
        error_type = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        raise error_type(f"{path} cannot be {verb}: {reason}", error.errno) from error


def file_beside(path: Path, name: str, part: str) -> Path:
    """Return the path of a file that another file, perhaps a stranger's, names as a part of its contents.

    Args:
        path: The other file, which may be a link to one among its parts, as in a cache of downloads.
        name: Path of the part as the other file has it.
        part: The part, for messages: "the data of weight".

    Raises:
        ArtefactError: For a file outside of the folder, also by a link, and for something other than a
            regular file.
        MissingFileError: Where there is no such file.
    """
    part_path = path.parent / name
    allowed_folders = [path.parent.resolve(), path.resolve().parent]
    # The name comes from a file that anybody may have written.
    leads_out = Path(name).is_absolute() or ".." in Path(name).parts
    if leads_out or not any(part_path.resolve().is_relative_to(folder) for folder in allowed_folders):
        raise ArtefactError(f"{part} lie outside of its folder, in {name}")
    with naming(part_path, "read"):
        if not stat.S_ISREG(part_path.stat().st_mode):
            raise ArtefactError(f"{part} lie in {name}, which is no regular file")
    return part_path


def is_part(name: str, of: str | None = None) -> bool:
    """Return True for the name of a file that `replacing` began and a killed process left.

    Args:
        name: Name of a file in a folder.
        of: The name of the whole file; None for any.
    """
    match = _PART.fullmatch(name)
    return match is not None and (of is None or match[1] == of[:_MAX_NAME_LENGTH])


def check_file_to_write(path: str | os.PathLike[str]) -> None:
    """Raise an error where a file cannot be written.

    Args:
        path: File to write.

    Raises:
        MissingFileError: Where the folder of the file does not exist.
        FileError: Where the folder cannot be written to, and for the path of a folder.
    """
    path = Path(path)
    with naming(path):
        if path.is_dir():
            raise FileError(f"{path} cannot be written: it is a folder")
        if not path.parent.is_dir():
            raise MissingFileError(f"{path} cannot be written: there is no folder {path.parent}")
        if not path.exists() or path.is_file():
            _check_writable(path.parent, path)


def check_folder_to_write(folder: str | os.PathLike[str]) -> None:
    """Raise FileError where a folder cannot be made, or files cannot be made in it; make nothing."""
    folder = Path(folder)
    with naming(folder):
        folders_outwards = (folder, *folder.absolute().parents)
        nearest_present = next((path for path in folders_outwards if os.path.lexists(path)), folder)
        if not nearest_present.is_dir():
            raise FileError(f"{folder} cannot be written: {nearest_present} is not a folder")
        _check_writable(nearest_present, folder)


def _check_writable(folder: Path, path: Path) -> None:
    """Raise FileError, which names `path`, unless a file can be made in a folder."""
    # Tried, since permissions alone do not tell of a read-only disk.
    try:
        with TemporaryFile(dir=folder):
            return
    except OSError as error:
        reason = f"the folder {folder} cannot be written to ({error.strerror or error})"
        raise FileError(f"{path} cannot be written: {reason}", error.errno) from error

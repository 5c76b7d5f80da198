"""Writing of a file: all of it or nothing, and over nothing that was there unless that is wanted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from amanda.errors import ArtefactError
from amanda.files import check_folder_to_write, naming, store


def check_target(source: Path, target: Path, force: bool, is_folder: bool) -> None:
    """Raise ArtefactError where a file, or a folder, may not be written, before any work is done.

    Raises FileError for a folder around it that cannot be written to.
    """
    whole, goal = source.resolve(), target.resolve()
    if goal == whole:
        raise ArtefactError(f"{target} is the model that is read, which is never changed; give another path")
    if whole in goal.parents or goal in whole.parents:
        inside = "lies in" if whole in goal.parents else "is around"
        raise ArtefactError(f"{target} {inside} {source}, which is never changed; give another path")
    if not target.parent.is_dir():
        raise ArtefactError(f"{target} cannot be written: there is no folder {target.parent}")
    check_folder_to_write(target.parent)
    if not is_folder and target.suffix != source.suffix:
        raise ArtefactError(f"{target} does not end in {source.suffix}, as {source} does")
    if os.path.lexists(target) and not force:
        raise ArtefactError(f"{target} is there already; force (--force) replaces it")
    if target.exists() and target.is_dir() != is_folder:
        found, wanted = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
        raise ArtefactError(f"{target} is {found}, and what is written is {wanted}")


@contextmanager
def whole(target: Path, force: bool) -> Iterator[Path]:
    """A path to write to, beside the target, which it becomes at the end, with what lies beside it then.

    After an exception, such as KeyboardInterrupt, the target is as it was.
    Raises FileError in place of an OSError.
    """
    with naming(target):
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name[:60]}.", dir=target.parent))
        try:
            new, old = folder / "new", folder / "old"
            new.mkdir()
            old.mkdir()
            yield new / target.name
            for path in new.rglob("*"):
                if path.is_file():
                    store(path)
            # The data that belong to a file come before it, so that it never lacks them.
            names = sorted((one.name for one in new.iterdir()), key=lambda name: name == target.name)
            for name in names:
                if os.path.lexists(target.parent / name) and not force:
                    raise ArtefactError(f"{target.parent / name} is there already; force (--force) replaces it")
            for name in names:
                _exchange(new / name, target.parent / name, old / name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _exchange(new: Path, target: Path, old: Path) -> None:
    """Put a file or folder in another's place; a folder cannot replace one that is not empty."""
    if not target.is_dir():
        new.replace(target)
        return
    target.replace(old)
    try:
        new.replace(target)
    except BaseException:
        old.replace(target)
        raise

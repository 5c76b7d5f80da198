"""Checks of an output path: no file is overwritten unless forced, and the model that is read never."""

from __future__ import annotations

import os
from pathlib import Path

from amanda.errors import ArtefactError
from amanda.files import check_folder_to_write


def check_target(source: Path, target: Path, force: bool, is_folder: bool) -> None:
    """Raise ArtefactError where a file or folder may not be written, before any work is done.

    Raises FileError for a parent folder that cannot be written to.
    """
    source_path, target_path = source.resolve(), target.resolve()
    if target_path == source_path:
        raise ArtefactError(f"{target} is the model that is read, which is never changed; give another path")
    if source_path in target_path.parents or target_path in source_path.parents:
        inside = "lies in" if source_path in target_path.parents else "is around"
        raise ArtefactError(f"{target} {inside} {source}, which is never changed; give another path")
    if not target.parent.is_dir():
        raise ArtefactError(f"{target} cannot be written: there is no folder {target.parent}")
    check_folder_to_write(target.parent)
    if not is_folder and target.suffix != source.suffix:
        raise ArtefactError(f"{target} does not end in {source.suffix}, as {source} does")
    if os.path.lexists(target) and not force:
        raise ArtefactError(f"{target} is there already; force (--force) replaces it")
    if target.exists() and target.is_dir() != is_folder:
        present, expected = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
        raise ArtefactError(f"{target} is {present}, and what is written is {expected}")

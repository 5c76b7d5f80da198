"""Checks of what is written: over nothing that was there unless that is wanted, and never over the model."""

from __future__ import annotations

import os
from pathlib import Path

from amanda.errors import ArtefactError
from amanda.files import check_folder_to_write


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

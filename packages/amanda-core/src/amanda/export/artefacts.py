"""Kinds of model files: the base class, the search for the kind of a path, and the check of an output path.

The entry point of a kind is named after the suffix of its files, or after a file that each of its folders
contains, so that no driver is imported during the search.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.errors import ArtefactError, PluginError
from amanda.files import check_folder_to_write
from amanda.plugins.drivers import how_to_install
from amanda.plugins.entries import ARTEFACTS, PluginEntry, registry, rivalry_message, upgrade_command
from amanda.scope.driver import DRIVER_API

if TYPE_CHECKING:
    from amanda.export.inlining import Inlining


class Artefact(ABC):
    """A file or folder with a model, which a driver rewrites without running the model.

    api: the `DRIVER_API` that the class was written for.  kind: name of such files, e.g. "ONNX model".
    """

    api: ClassVar[int]
    kind: ClassVar[str]

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Read a file or folder.

        Args:
            path: File or folder that exists.

        Raises:
            ArtefactError: Where the path is not of this kind; or an error of the framework.
        """

    @abstractmethod
    def instrument(self, inlining: Inlining) -> None:
        """Pass every op to `inlining.analysis(...)`, and inline the routines; start from the file's contents.

        Pass a routine that cannot be inlined to `inlining.refuse`. This method may be called repeatedly.
        """

    @abstractmethod
    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the instrumented model.

        Args:
            path: File or folder that does not exist yet.
            about: Entries for the metadata of the model.
        """


def artefact_kind(path: Path) -> type[Artefact]:
    """Return the class of a driver that reads the file or folder at a path.

    Raises ArtefactError where the path does not exist, or no installed driver reads it; PluginError where
    several do, or where the driver is for another core.
    """
    if not path.exists():
        raise ArtefactError(f"{path} does not exist")
    entries = [entry for entry in registry.entries(ARTEFACTS) if _matches(entry.name, path)]
    if not entries:
        raise ArtefactError(f"{path} is not a file that an installed driver reads; {_readable_files()}")
    if len(entries) > 1:
        raise PluginError(rivalry_message(entries))
    (entry,) = entries
    artefact_type: type[Artefact] = entry.load()
    if artefact_type.api != DRIVER_API:
        outdated_distribution = "amanda-core" if artefact_type.api > DRIVER_API else entry.distribution
        raise PluginError(
            f"{entry} is written for driver API {artefact_type.api}, this core speaks {DRIVER_API}: "
            f"{upgrade_command(outdated_distribution)}"
        )
    return artefact_type


def _matches(name: str, path: Path) -> bool:
    # By names alone: nothing is opened before the kind is known.
    return (path / name).is_file() if path.is_dir() else path.suffix == f".{name}"


def _readable_files() -> str:
    """Say which files the installed drivers read, and how to install more."""
    entries = registry.entries(ARTEFACTS, fresh=False)
    patterns = [f"{_file_pattern(entry)} ({entry.distribution})" for entry in entries]
    install_hint = f"drivers come by {how_to_install()}"
    return f"there are {', '.join(patterns)}; {install_hint}" if patterns else install_hint


def _file_pattern(entry: PluginEntry) -> str:
    return f"folders with {entry.name}" if "." in entry.name else f"*.{entry.name}"


def check_target(source: Path, target: Path, force: bool, is_folder: bool) -> None:
    """Raise ArtefactError where a file or folder may not be written, before any work is done.

    Raises FileError for a parent folder that cannot be written to.
    source: the model that is read.  force: whether a present target may be replaced.
    """
    # Resolved, since a link may lead to the model that is read.
    source_path, target_path = source.resolve(), target.resolve()
    if target_path == source_path:
        raise ArtefactError(f"{target} is the model that is read, which is never changed; give another path")
    if source_path in target_path.parents or target_path in source_path.parents:
        relation = "lies in" if source_path in target_path.parents else "is around"
        raise ArtefactError(f"{target} {relation} {source}, which is never changed; give another path")
    if not target.parent.is_dir():
        raise ArtefactError(f"{target} cannot be written: there is no folder {target.parent}")
    check_folder_to_write(target.parent)
    if not is_folder and target.suffix != source.suffix:
        raise ArtefactError(f"{target} does not end in {source.suffix}, as {source} does")
    # Also a link that leads nowhere is somebody's file.
    if os.path.lexists(target) and not force:
        raise ArtefactError(f"{target} is there already; force (--force) replaces it")
    if target.exists() and target.is_dir() != is_folder:
        target_kind, written_kind = ("a folder", "a file") if target.is_dir() else ("a file", "a folder")
        raise ArtefactError(f"{target} is {target_kind}, and what is written is {written_kind}")

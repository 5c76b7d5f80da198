"""Kinds of model files: the base class, and the search for the kind of a path.

The entry point of a kind is named after the suffix of its files, or after a file that each of its folders
contains, so that no driver is imported during the search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.errors import ArtefactError, PluginError
from amanda.plugins.drivers import how_to_install
from amanda.plugins.entries import ARTEFACTS, Entry, registry, rivalry, upgrade
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
        """Read a file. Raises ArtefactError, or an error of the framework, where it is not of this kind."""

    @abstractmethod
    def instrument(self, inlining: Inlining) -> None:
        """Pass every op to `inlining.analysis(...)`, and inline the routines; start from the file's contents.

        Pass a routine that cannot be inlined to `inlining.refuse`. This method may be called repeatedly.
        """

    @abstractmethod
    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the instrumented model to a path that does not exist, with `about` in its metadata."""


def artefact_kind(path: Path) -> type[Artefact]:
    """Return the class that reads a path.

    Raises ArtefactError where the path does not exist, or no installed driver reads it.
    """
    if not path.exists():
        raise ArtefactError(f"{path} does not exist")
    entries = [entry for entry in registry.entries(ARTEFACTS) if _matches(entry.name, path)]
    if not entries:
        raise ArtefactError(f"{path} is no file that an installed driver reads; {_readable_files()}")
    if len(entries) > 1:
        raise PluginError(rivalry(entries))
    (entry,) = entries
    kind: type[Artefact] = entry.load()
    if kind.api != DRIVER_API:
        raise PluginError(
            f"{entry} is written for driver API {kind.api}, this core speaks {DRIVER_API}: "
            f"{upgrade('amanda-core' if kind.api > DRIVER_API else entry.distribution)}"
        )
    return kind


def _matches(name: str, path: Path) -> bool:
    return (path / name).is_file() if path.is_dir() else path.suffix == f".{name}"


def _readable_files() -> str:
    entries = registry.entries(ARTEFACTS, fresh=False)
    forms = [f"{_file_form(entry)} ({entry.distribution})" for entry in entries]
    install_hint = f"drivers come by {how_to_install()}"
    return f"there are {', '.join(forms)}; {install_hint}" if forms else install_hint


def _file_form(entry: Entry) -> str:
    return f"folders with {entry.name}" if "." in entry.name else f"*.{entry.name}"

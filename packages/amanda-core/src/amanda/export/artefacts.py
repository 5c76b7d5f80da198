"""Kinds of files that hold a model: which there are, and which one a path is.

A kind's entry is named after its files' suffix, or after a file that each of its folders has, so that
nothing is imported to find it.
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
    """A file, or a folder, that holds a model, and that a driver rewrites without running the model.

    api: the `DRIVER_API` that it was written for.  kind: what such a file is called, e.g. "ONNX model".
    """

    api: ClassVar[int]
    kind: ClassVar[str]

    @abstractmethod
    def __init__(self, path: Path) -> None:
        """Read it. Raises ArtefactError, or an error of the framework's, where it is none."""

    @abstractmethod
    def instrument(self, inlining: Inlining) -> None:
        """Bring every op to `inlining.analysis(...)`, and inline the routines; begin with the file as it is.

        A routine that cannot be inlined is told to `inlining.refuse`. It may be called again.
        """

    @abstractmethod
    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write the instrumented model where nothing is yet, with `about` in its metadata."""


def artefact_kind(path: Path) -> type[Artefact]:
    """Return the class that reads a path.

    Raises ArtefactError where there is nothing, or nothing that an installed driver reads.
    """
    if not path.exists():
        raise ArtefactError(f"{path} does not exist")
    found = [entry for entry in registry.entries(ARTEFACTS) if _fits(entry.name, path)]
    if not found:
        raise ArtefactError(f"{path} is no file that an installed driver reads; {_known()}")
    if len(found) > 1:
        raise PluginError(rivalry(found))
    (entry,) = found
    kind: type[Artefact] = entry.load()
    if kind.api != DRIVER_API:
        raise PluginError(
            f"{entry} is written for driver API {kind.api}, this core speaks {DRIVER_API}: "
            f"{upgrade('amanda-core' if kind.api > DRIVER_API else entry.distribution)}"
        )
    return kind


def _fits(name: str, path: Path) -> bool:
    return (path / name).is_file() if path.is_dir() else path.suffix == f".{name}"


def _known() -> str:
    entries = registry.entries(ARTEFACTS, fresh=False)
    known = [f"{_form(entry)} ({entry.distribution})" for entry in entries]
    others = f"drivers come by {how_to_install()}"
    return f"there are {', '.join(known)}; {others}" if known else others


def _form(entry: Entry) -> str:
    return f"folders with {entry.name}" if "." in entry.name else f"*.{entry.name}"

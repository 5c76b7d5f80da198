"""A file of two runs and what was found, which others open: JSON and tensors in a zip, nothing pickled."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

from amanda.errors import AmandaError
from amanda.files import replacing
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Run, run_of
from amanda.tools.dump import Dump
from amanda.tools.results import check_size, parsing, to_json

_FOUND = "diff.json"
_MEMBER = re.compile(r"(a|b|control)/(index\.json|tensors-\d+\.(safetensors|npz))")


def write_bundle(path: Path, runs: Mapping[str, Run], result: DiffResult) -> None:
    """Write the dumps of runs and a result into one file, which is whole or as it was before.

    runs: by "a", "b" and "control".  Raises AmandaError for statistics, which have no tensors, and FileError.
    """
    for label, run in runs.items():
        if run.dump is None:
            raise AmandaError(f"a bundle holds dumps, and {label} is a file of statistics: {run.name}")
    names = {label: run.name for label, run in runs.items()}
    dumps = {label: run.dump for label, run in runs.items() if run.dump is not None}
    with replacing(path) as part, ZipFile(part, "w") as file:
        file.writestr(_FOUND, to_json({**result.to_dict(), "runs": names}))
        for label, dump in dumps.items():
            for name in ("index.json", *dump.files):
                file.write(dump.folder / name, f"{label}/{name}")


@contextmanager
def opened(path: Path | str | None) -> Iterator[dict[str, Run]]:
    """Give the runs of a bundle by "a", "b" and "control", while the context is open; none for None.

    Raises AmandaError for another file, and for one that is larger than what is read.
    """
    if path is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        with parsing(path, "bundle of amanda diff"):
            names = _extracted(Path(path), folder)
            runs = {
                label: replace(run_of(Dump(Path(folder) / label)), name=f"{name} of {path}")
                for label, name in names.items() if label in ("a", "b", "control")
            }  # fmt: skip
        yield runs


def _extracted(path: Path, folder: str) -> dict[str, str]:
    """Write the dumps of a bundle into a folder; return the names of its runs."""
    with ZipFile(path) as file:
        check_size(path, sum(one.file_size for one in file.infolist()))
        names = json.loads(file.read(_FOUND))["runs"]
        if not isinstance(names, dict):
            raise ValueError(f"its runs are {type(names).__name__}, no object")
        for name in file.namelist():
            if _MEMBER.fullmatch(name):
                file.extract(name, folder)
            elif name != _FOUND:
                raise ValueError(f"it has {name!r} in it, which is no part of a bundle")
    return names

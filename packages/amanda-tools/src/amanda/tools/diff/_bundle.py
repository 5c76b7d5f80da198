"""A file of two runs and what was found, which others open: JSON and tensors in a zip, nothing pickled."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from amanda.errors import AmandaError
from amanda.tools.diff._result import DiffResult
from amanda.tools.diff._run import Run, run_of
from amanda.tools.dump import Dump
from amanda.tools.results import check_size

_FOUND = "diff.json"
_MEMBER = re.compile(r"(a|b|control)/(index\.json|tensors-\d+\.(safetensors|npz))")


def write_bundle(path: Path, runs: Mapping[str, Run], result: DiffResult) -> None:
    """Write the dumps of runs and a result into one file, which is whole or as it was before.

    runs: by "a", "b" and "control".  Raises AmandaError for statistics, which have no tensors.
    """
    for label, run in runs.items():
        if run.dump is None:
            raise AmandaError(f"a bundle holds dumps, and {label} is a file of statistics: {run.name}")
    names = {label: run.name for label, run in runs.items()}
    dumps = {label: run.dump for label, run in runs.items() if run.dump is not None}
    part = path.with_name(f"{path.name}.part")
    try:
        with ZipFile(part, "w") as file:
            file.writestr(_FOUND, json.dumps({**result.to_dict(), "runs": names}))
            for label, dump in dumps.items():
                for name in ("index.json", *dump.files):
                    file.write(dump.folder / name, f"{label}/{name}")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def opened(path: Path | str | None) -> Iterator[dict[str, Run]]:
    """Give the runs of a bundle by "a", "b" and "control", while the context is open; none for None.

    Raises AmandaError for another file, and for one that is larger than what is read.
    """
    if path is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            with ZipFile(path) as file:
                check_size(Path(path), sum(one.file_size for one in file.infolist()))
                names = json.loads(file.read(_FOUND))["runs"]
                for name in file.namelist():
                    if _MEMBER.fullmatch(name):
                        file.extract(name, folder)
                    elif name != _FOUND:
                        raise AmandaError(f"{path} has {name!r} in it, which is no part of a bundle")
        except (BadZipFile, KeyError, ValueError, TypeError) as error:
            raise AmandaError(f"{path} is no bundle of amanda diff: {error}") from error
        yield {
            label: replace(run_of(Dump(Path(folder) / label)), name=f"{name} of {path}")
            for label, name in names.items() if label in ("a", "b", "control")
        }  # fmt: skip

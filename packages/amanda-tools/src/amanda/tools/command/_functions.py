"""Functions that a command is given by name: FILE:FUNCTION or MODULE:FUNCTION."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.command._spec import SpecError


def function_of(named: str) -> Callable[[], Any]:
    """The function of FILE:FUNCTION or MODULE:FUNCTION.  Raises SpecError for anything else."""
    where, _, name = named.rpartition(":")
    path = Path(where)
    if not where or not name:
        raise SpecError(f"{named!r} names no function; give FILE:FUNCTION, as in evaluate.py:accuracy")
    if path.is_file() and path.suffix != ".py":
        raise SpecError(f"{where} is no Python file; give FILE:FUNCTION, as in evaluate.py:accuracy")
    if path.suffix == ".py" and not path.is_file():
        raise SpecError(f"there is no file {where}")
    module = _loaded(path) if path.suffix == ".py" else _imported(where)
    found = getattr(module, name, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if isfunction(value)]
        raise SpecError(f"{where} has no function {name!r}; {did_you_mean(name, own)}")
    evaluate: Callable[[], Any] = found
    return evaluate


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # what the module itself imports
        raise SpecError(f"there is no module {name}, and no file of that name") from error

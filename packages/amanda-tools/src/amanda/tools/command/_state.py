"""What tools have learnt, from files: masks and scales, by place in the model."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import AmandaError
from amanda.tools.command._spec import SpecError, Tooling
from amanda.tools.results import TooLargeError, check_file, read_npz

_FORMS = (".npz", ".safetensors")


def load_states(given: Sequence[str], toolings: Sequence[Tooling]) -> None:
    """Load "TOOL=FILE", or "FILE" where there is one tool, each into its tool.

    A tool with a `load` of its own reads the file; others are given its arrays as `load_state_dict` takes
    them. Raises SpecError for a file that cannot be read, and for no such tool.
    """
    named = {tooling.name: tooling for tooling in toolings}
    for text in given:
        name, equals, file = text.partition("=")
        if not equals or name not in named:
            file, name = (text, toolings[0].name) if len(toolings) == 1 else (file, name)
        if name not in named:
            raise SpecError(f"--state {text}: give TOOL=FILE, TOOL one of {', '.join(named)}")
        tool, path = named[name].tool, Path(file)
        load = getattr(tool, "load", None)
        try:
            if load is not None:
                load(path)
            else:
                tool.load_state_dict(read_arrays(path))
        except (AmandaError, OSError, ValueError, TypeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(
                f"--state {text}: {path} is no state of {name} that can be read: {reason}"
            ) from error


def read_arrays(path: Path) -> Mapping[str, Any]:
    """The arrays of an .npz or .safetensors file by name; nothing in it is run.

    Raises SpecError for another file.
    """
    if path.suffix == ".npz":
        try:
            return read_npz(path)
        except TooLargeError:
            raise
        except (ValueError, EOFError, zipfile.BadZipFile) as error:
            raise SpecError(f"it is no .npz file of plain arrays ({error})") from error
    if path.suffix == ".safetensors":
        check_file(path)
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise SpecError(f"it is no .safetensors file ({error})") from error
    raise SpecError(f"it ends in none of {', '.join(_FORMS)}")

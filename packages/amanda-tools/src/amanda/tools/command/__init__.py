"""`amanda run`: an unmodified program under tools; `amanda instrument`: tools written into a model's file.

amanda run -t flops -t "nan:stop,module=encoder" -- train.py --epochs 1
amanda instrument model.onnx -t prune:sparsity=0.5 -o pruned.onnx
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amanda.options import warn_deprecated
from amanda.tools.command._line import (
    OptionType,
    compiled_option,
    exit_status,
    function_of,
    limit_option,
    path_to_write,
    save_option,
)
from amanda.tools.command._specs import (
    CommandOption,
    SpecError,
    Tooling,
    ToolSpec,
    make_tools,
    options_of,
    split_tools,
)

if TYPE_CHECKING:
    from amanda.tools.command._gathering import merge
    from amanda.tools.command._instrument import instrument
    from amanda.tools.command._run import run
    from amanda.tools.command._session import Session, strip_traceback

__all__ = [
    "CommandOption", "OptionType", "Session", "SpecError", "ToolSpec", "Tooling", "compiled_option",
    "exit_status", "function_of", "instrument", "limit_option", "make_tools", "merge", "options_of",
    "path_to_write", "run", "save_option", "split_tools", "strip_traceback",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a command, or the session of a run, on demand; `made` is `make_tools`, with a warning."""
    # A process runs only one command.
    if name == "made":
        warn_deprecated(f"{__name__}.made", f"{__name__}.make_tools", "amanda-tools 0.2", "0.4")
        return make_tools
    modules = {"instrument": "_instrument", "merge": "_gathering", "run": "_run"}
    module = modules.get(name, "_session" if name in ("Session", "strip_traceback") else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)

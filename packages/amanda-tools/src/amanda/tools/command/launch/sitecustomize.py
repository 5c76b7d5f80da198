"""Module that Python imports at its start under `amanda run`, which puts this folder on PYTHONPATH."""

import os
import sys


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]  # noqa: PTH100
    try:
        from amanda.tools.command._begin import begin
    except ImportError:
        # A Python in whose environment Amanda is not installed.
        sys.stderr.write(
            f"amanda: no tools in process {os.getpid()}: {sys.executable} does not have amanda-tools\n"
        )
    else:
        begin()


def _chain() -> None:
    """Import the program's own sitecustomize, which this module hides."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("AMANDA_TOOLS"):
    _begin()
_chain()

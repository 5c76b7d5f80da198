"""Libraries that are imported at their first use, so that a run which needs none of them starts sooner.

from amanda.tools.libraries import do
from amanda.tools.libraries import numpy as np
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = [
    "astype", "do", "get_dtype_name", "infer_backend", "ml_dtypes", "networkx", "numpy", "register_backend",
    "rich", "safetensors", "shape", "to_numpy", "tree_iter", "tree_map",
]  # fmt: skip

if TYPE_CHECKING:
    import ml_dtypes
    import networkx
    import numpy
    import rich.console
    import rich.text
    import safetensors.numpy
    from autoray import (
        astype,
        do,
        get_dtype_name,
        infer_backend,
        register_backend,
        shape,
        to_numpy,
        tree_iter,
        tree_map,
    )
else:

    class _DeferredLibrary(ModuleType):
        """A module that imports the library of the same name, and parts of it, when a name is read."""

        def __init__(self, name: str, *parts: str) -> None:
            super().__init__(name)
            self._modules = [name, *(f"{name}.{part}" for part in parts)]

        def __getattr__(self, name: str) -> Any:
            """Import the library and its parts; return the attribute, which the module keeps."""
            # Parts such as rich.console have to be imported by name: importing rich alone lacks them.
            library, *_ = map(import_module, self._modules)
            value = getattr(library, name)
            # The next read finds the attribute, and calls this function no more.
            setattr(self, name, value)
            return value

    _autoray = _DeferredLibrary("autoray")

    def _function(name: str) -> Callable[..., Any]:
        """Return a function that calls the function of autoray, which is imported at the first call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(_autoray, name)(*args, **kwargs)

        call.__name__ = call.__qualname__ = name
        return call

    ml_dtypes, networkx, numpy = map(_DeferredLibrary, ("ml_dtypes", "networkx", "numpy"))
    rich, safetensors = _DeferredLibrary("rich", "console", "text"), _DeferredLibrary("safetensors", "numpy")
    astype, do, get_dtype_name, infer_backend, register_backend, shape, to_numpy, tree_iter, tree_map = map(
        _function,
        ("astype", "do", "get_dtype_name", "infer_backend", "register_backend", "shape", "to_numpy",
         "tree_iter", "tree_map"),
    )  # fmt: skip

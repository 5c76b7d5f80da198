"""The driver of PyTorch's graph mode: FX graphs, as torch.compile, torch.export and torch.fx make them.

`instrument(module, *tools)` gives a copy of one graph with the routines of tools in it; `GraphDriver` has
torch.compile instrument its graphs in scopes with `compiled="instrument"`.  `control(step, model, *tools)`
tells whether the numbers of an observed step are those of the same step without tools.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._driver import GraphDriver

if TYPE_CHECKING:
    from ._control import Control, control
    from ._instrument import instrument

__all__ = ["Control", "GraphDriver", "control", "instrument"]

_LATE = {"Control": "_control", "control": "_control", "instrument": "_instrument"}
"""Names that are slow to import, by module; `__getattr__` imports them."""


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)

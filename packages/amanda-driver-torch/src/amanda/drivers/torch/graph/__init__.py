"""The driver of PyTorch's graph mode: FX graphs, as torch.compile, torch.export and torch.fx make them.

`instrument(module, *tools)` gives a copy of one graph with the routines of tools in it; `GraphDriver` has
torch.compile instrument its graphs in scopes with `compiled="instrument"`.
"""

from typing import TYPE_CHECKING, Any

from ._driver import GraphDriver

if TYPE_CHECKING:
    from ._instrument import instrument

__all__ = ["GraphDriver", "instrument"]


def __getattr__(name: str) -> Any:
    if name != "instrument":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._instrument import instrument  # what it leans on takes a while to import

    return instrument

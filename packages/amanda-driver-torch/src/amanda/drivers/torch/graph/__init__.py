"""The driver of PyTorch's graph mode: FX graphs, as torch.compile, torch.export and torch.fx make them.

`instrument(module, *tools)` gives a copy of one graph with the routines of tools in it; `GraphDriver` has
torch.compile instrument its graphs in scopes with `compiled="instrument"`.  `control(step, model, *tools)`
tells whether the numbers of an observed step are those of the same step without tools.
"""

from typing import TYPE_CHECKING

from amanda.backend import lazy_getattr

from ._driver import GraphDriver

if TYPE_CHECKING:
    from ._control import Control, control
    from ._instrument import instrument

__all__ = ["Control", "GraphDriver", "control", "instrument"]

# These are slow to import.
__getattr__ = lazy_getattr(
    __name__, {"Control": "_control", "control": "_control", "instrument": "_instrument"}
)

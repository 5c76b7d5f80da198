"""PyTorch's graph mode: FX graphs, as torch.fx and torch.export make them.

`instrument(module, *tools)` gives a copy of a graph with the routines of tools in it.
"""

from ._instrument import instrument

__all__ = ["instrument"]

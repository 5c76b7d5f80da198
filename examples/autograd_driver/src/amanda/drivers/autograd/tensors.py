"""autograd's tensors for tools: arrays of NumPy, perhaps in boxes."""

from __future__ import annotations

from typing import Any

from amanda.drivers.autograd._boxes import plain
from amanda.tools.kit import Tensors


class AutogradTensors(Tensors):
    """Boxes, computed with as the arrays that lie in them."""

    def to_numpy(self, x: Any) -> Any:
        return plain(x)

"""Simulate quantisation: static and dynamic after training, quantisation-aware training, learned step sizes.

quantize = QuantizeTool(weight_bits=8, activation_bits=8, observer="histogram")
with amanda.apply(quantize), quantize.calibrating():
    for batch in batches:
        model(batch)
with amanda.apply(quantize):
    model(x)
print(quantize.result)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amanda.tools.quantize._fake_quantize import (
    Bits,
    Float8,
    Grid,
    Groups,
    QuantizeError,
    Rounding,
    choose_qparams,
    fake_quantize,
    fake_quantize_gradient,
)
from amanda.tools.quantize._kv_cache import KVCacheResult, KVCacheTool, quantized_states
from amanda.tools.quantize._lsq import (
    gradient_scale,
    lsq_gradients,
    lsq_plus_scale,
    lsq_quantize,
    lsq_scale,
)
from amanda.tools.quantize._observers import (
    Histogram,
    HistogramObserver,
    MinMaxObserver,
    MseObserver,
    Observer,
    PercentileObserver,
    PerChannelObserver,
    extremes,
    make_observer,
)
from amanda.tools.quantize._result import Quantized, QuantizeResult, sqnr
from amanda.tools.quantize._tool import QuantizeTool

if TYPE_CHECKING:
    from amanda.tools.quantize.weights import convert

__all__ = [
    "Bits", "Float8", "Grid", "Groups", "Histogram", "HistogramObserver", "KVCacheResult",
    "KVCacheTool", "MinMaxObserver",
    "MseObserver", "Observer", "PerChannelObserver", "PercentileObserver", "QuantizeError",
    "QuantizeResult", "QuantizeTool", "Quantized", "Rounding", "choose_qparams", "convert", "extremes",
    "fake_quantize", "fake_quantize_gradient", "gradient_scale", "lsq_gradients", "lsq_plus_scale",
    "lsq_quantize", "lsq_scale", "make_observer", "quantized_states", "sqnr",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import `convert`, and with it the tools for weights alone, when it is first used."""
    if name != "convert":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from amanda.tools.quantize import weights

    return weights.convert


def __dir__() -> list[str]:
    """Return the names of the package, with `convert` before it is imported."""
    return __all__

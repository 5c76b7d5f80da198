"""Quantise weights of PyTorch's products to integers: round to nearest, GPTQ, AWQ; SmoothQuant before them.

gptq = GPTQTool(bits=4, group_size=128)
with amanda.apply(gptq), gptq.calibrating():
    for batch in batches:
        model(batch)
gptq.finalize(model)  # dequantised weights, in floating point
convert(model, gptq)  # or integers, in torchao's tensors
convert(model, gptq, "folder")  # or a checkpoint of integers for vLLM
"""

from amanda.tools.quantize.weights._convert import ConvertResult, convert, model_bytes, save_compressed
from amanda.tools.quantize.weights._gptq import GPTQTool, gptq
from amanda.tools.quantize.weights._input_factors import (
    AWQTool,
    SmoothQuantTool,
    awq_clipped,
    awq_scales,
    smoothing,
)
from amanda.tools.quantize.weights._integers import (
    Codes,
    NearestTool,
    QuantizedWeights,
    dequantized,
    quantized,
)

__all__ = [
    "AWQTool", "Codes", "ConvertResult", "GPTQTool", "NearestTool", "QuantizedWeights", "SmoothQuantTool",
    "awq_clipped", "awq_scales", "convert", "dequantized", "gptq", "model_bytes", "quantized",
    "save_compressed", "smoothing",
]  # fmt: skip

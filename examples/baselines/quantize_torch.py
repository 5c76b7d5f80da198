"""Quantisation of a PyTorch model by hand: each known module is exchanged for one that quantises its input
and its weight.

A model is to be built of modules for that; products of attention, additions and functions stay as they are.
Sources: Jacob et al. 2018 (static), Esser et al. 2020 and Bhalgat et al. 2020 (learned step sizes).
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MinMax(nn.Module):
    """Fake quantisation within the extremes that calibration has seen.

    channels: signed and symmetric with a scale for each row, as for weights; else unsigned and affine.
    """

    def __init__(self, bits: int, channels: bool) -> None:
        super().__init__()
        self.channels, self.calibrating = channels, True
        self.low = -(1 << (bits - 1)) if channels else 0
        self.high = self.low + (1 << bits) - 1
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.calibrating:
            rows = x.detach().flatten(1) if self.channels else x.detach().flatten()
            self.least = torch.minimum(self.least, rows.amin(-1))
            self.most = torch.maximum(self.most, rows.amax(-1))
            return x
        eps = torch.finfo(torch.float32).eps
        if self.channels:
            scale = (torch.maximum(-self.least, self.most) / ((self.high - self.low) / 2)).clamp(min=eps)
            zero_point = torch.zeros_like(scale, dtype=torch.int32)
            return torch.fake_quantize_per_channel_affine(x, scale, zero_point, 0, self.low, self.high)
        scale = ((self.most - self.least) / (self.high - self.low)).clamp(min=eps)
        zero_point = (self.low - torch.round(self.least / scale)).clamp(self.low, self.high).int()
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, self.low, self.high)


class Learned(nn.Module):
    """Fake quantisation whose scale is trained, begun by what is seen first.

    channels: signed with a scale for each row, as for weights; else unsigned where the first values are.
    """

    def __init__(self, bits: int, channels: bool) -> None:
        super().__init__()
        self.bits, self.channels, self.calibrating = bits, channels, True
        self.scale = nn.UninitializedParameter()

    def forward(self, x: Tensor) -> Tensor:
        if self.calibrating:
            self.begin(x.detach())
            return x
        scale = self.scale.view(-1, *[1] * (x.dim() - 1)) if self.channels else self.scale
        count = x[0].numel()  # weights of a channel, or features of an example
        return _Learned.apply(x, scale, self.low, self.high, 1 / math.sqrt(count * self.high))

    def begin(self, x: Tensor) -> None:
        """Choose the grid and the first scale, 2 mean|x| / sqrt(high)."""
        signed = self.channels or bool(x.min() < 0)
        self.low = -(1 << (self.bits - 1)) if signed else 0
        self.high = self.low + (1 << self.bits) - 1
        mean = x.abs().flatten(1).mean(1) if self.channels else x.abs().mean()
        if nn.parameter.is_lazy(self.scale):
            self.scale.materialize(mean.shape)
        self.scale.data = 2 * mean / math.sqrt(self.high)


class _Learned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale, low, high, factor):
        ctx.save_for_backward(x, scale)
        ctx.numbers = low, high, factor
        return (x / scale).clamp(low, high).round() * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        low, high, factor = ctx.numbers
        v = x / scale
        inside = (v > low) & (v < high)
        by_scale = gradient * torch.where(inside, v.round() - v, v.clamp(low, high))
        return gradient * inside, by_scale.sum_to_size(scale.shape) * factor, None, None, None


class QuantizedLinear(nn.Module):
    """A linear layer that quantises what it reads."""

    def __init__(self, layer: nn.Linear, activation: nn.Module, weight: nn.Module) -> None:
        super().__init__()
        self.layer, self.activation, self.weight = layer, activation, weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.activation(x), self.weight(self.layer.weight), self.layer.bias)


class QuantizedConv2d(QuantizedLinear):
    """A convolution that quantises what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer._conv_forward(self.activation(x), self.weight(self.layer.weight), self.layer.bias)


KINDS = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}


def exchanged(model: nn.Module, quantizers) -> nn.Module:
    """A copy whose known modules quantise; `quantizers()` gives a pair, for activation and weight."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) in KINDS:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, KINDS[type(module)](module, *quantizers()))
    return model


def ptq(model: nn.Module, calibrate, bits: int) -> nn.Module:
    """A copy that is quantised after training; `calibrate` runs a model."""
    model = exchanged(model, lambda: (MinMax(bits, channels=False), MinMax(bits, channels=True)))
    return calibrated(model, calibrate)


def lsq(model: nn.Module, calibrate, bits: int) -> nn.Module:
    """A copy that is to be trained, scales and all; `calibrate` runs a model on what they begin with."""
    model = exchanged(model, lambda: (Learned(bits, channels=False), Learned(bits, channels=True)))
    return calibrated(model, calibrate)


def calibrated(model: nn.Module, calibrate) -> nn.Module:
    """The model, whose ranges and scales are fixed or begun by what `calibrate` runs it on."""
    calibrate(model)
    for module in model.modules():
        if isinstance(module, (MinMax, Learned)):
            module.calibrating = False
    return model

"""Matrices of weights as integers, with a scale and a zero point for each group of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from amanda.tools.quantize._grid import Grid, choose_qparams

if TYPE_CHECKING:
    from torch import Tensor


class Codes(NamedTuple):
    """Integers (outputs, inputs) of a matrix; scale and zero point of each group, (outputs, groups)."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor


def qparams(matrix: Tensor, grid: Grid, size: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero point, (outputs, groups), of groups of so many inputs, by their extremes."""
    groups = matrix.reshape(len(matrix), -1, size)
    return choose_qparams(groups.amin(-1), groups.amax(-1), grid)


def nearest(matrix: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Return the integers nearest to a matrix, half to even: scale and zero point are those of its groups."""
    groups = matrix.reshape(*scale.shape, -1)
    codes = (groups * (1 / scale).unsqueeze(-1)).round() + zero_point.unsqueeze(-1)
    return codes.clamp(grid.low, grid.high).reshape(matrix.shape)


def quantized(matrix: Tensor, grid: Grid, size: int) -> Codes:
    """Return a matrix, rounded to the nearest, with the scales of its groups."""
    scale, zero_point = qparams(matrix, grid, size)
    return Codes(nearest(matrix, scale, zero_point, grid), scale, zero_point)


def dequantized(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Return the matrix that integers stand for."""
    groups = codes.reshape(*scale.shape, -1)
    return ((groups - zero_point.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(codes.shape)

"""Masks: the elements of a weight that are kept, as functions of magnitudes.

Weights are arrays of NumPy, tensors of PyTorch, or eager tensors of TensorFlow; a mask is of the weight's
kind, shape and type, 1 where it is kept and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf, prod, sqrt
from typing import Any, Literal

from amanda.errors import AmandaError
from amanda.options import PositiveInt, Share, checked
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._arrays import Array


class PruneError(AmandaError, ValueError):
    """An option, a weight or a model with which pruning makes no sense."""


class ShapeError(PruneError):
    """A weight whose shape a pattern does not fit."""


def _of_any(kept: Callable[..., Array]) -> Callable[..., Any]:
    """Return the mask of a weight of any framework, by a function of arrays that says what is kept."""

    @checked(error=PruneError)
    @wraps(kept)
    def mask(weight: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of(weight)
        return tensors.cast(kept(tensors.plain(weight), *args, **kwargs), weight)

    return mask


@_of_any
def element_mask(weight: Any, sparsity: Share = 0.5) -> Any:
    """Drop the round(sparsity * elements) smallest magnitudes.

    weight: of any shape.  Raises PruneError for a sparsity outside [0, 1].
    Source: Han et al. 2015, "Learning both weights and connections"; equals torch.nn.utils.prune's
    `l1_unstructured`.
    """
    return elements_kept([abs(weight)], sparsity)[0]


@_of_any
def n_m_mask(weight: Any, n: PositiveInt = 2, m: PositiveInt = 4) -> Any:
    """Keep the n largest magnitudes of every m consecutive values along the last axis.

    weight: (..., k), k divisible by m.  Raises ShapeError otherwise, and for n above m.
    Source: Mishra et al. 2021, "Accelerating sparse deep neural networks" (2:4); Zhou et al. 2021, sec. 3.1.
    """
    return n_m_kept(abs(weight), n, m)


@_of_any
def tile_mask(weight: Any, sparsity: Share = 0.5, granularity: PositiveInt = 128) -> Any:
    """Drop columns, and of each tile of `granularity` columns that are left rows.

    weight: (k, n), the second factor of a product: k is summed over, n are outputs.  Columns and rows are
    dropped in equal shares, 1 - sqrt(1 - sparsity) of each, by the root of the mean of their squares.
    Raises ShapeError for a weight that is no matrix.
    Source: Guo et al. 2020, "Accelerating sparse DNN models without hardware-support via tile-wise sparsity".
    """
    return tiles_kept([abs(weight)], sparsity, granularity)[0]


@_of_any
def channel_mask(weight: Any, sparsity: Share = 0.5, norm: Literal[1, 2] = 2, axis: int = 0) -> Any:
    """Drop the round(sparsity * channels) channels of the smallest norm.

    weight: channels along `axis`.  norm: 1 or 2.
    Source: Li et al. 2017, "Pruning filters for efficient ConvNets" (L1); equals torch.nn.utils.prune's
    `ln_structured`.
    """
    (kept,) = channels_kept([do("moveaxis", abs(weight), axis, 0)], sparsity, norm)
    return do("moveaxis", kept, 0, axis)


@_of_any
def block_mask(
    weight: Any,
    sparsity: Share = 0.5,
    block: tuple[PositiveInt, PositiveInt] = (4, 4),
    norm: Literal[1, 2] = 2,
) -> Any:
    """Drop the round(sparsity * blocks) blocks of the smallest norm.

    weight: (k, n), of whole blocks.  norm: 1 or 2.
    Raises ShapeError for a weight of another shape.
    Source: Narang et al. 2017, "Block-sparse recurrent neural networks" (with the largest magnitude there).
    """
    return blocks_kept([abs(weight)], sparsity, block, norm)[0]


def elements_kept(magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return what is kept of weights of any shapes when the smallest of all their elements are dropped."""
    tensors = tensors_of(magnitudes[0])
    row = tensors.flat(magnitudes)
    return _split(tensors.keep_mask_of_highest(row, round(sparsity * len(row))), magnitudes)


def n_m_kept(magnitudes: Array, n: int, m: int) -> Array:
    """Return what is kept of one weight (..., k) when n of each m along the last axis are."""
    *outer, k = shape(magnitudes)
    if not 0 < n <= m or k % m:
        raise ShapeError(f"{n}:{m} does not fit shape {(*outer, k)}: its last extent is a multiple of {m}")
    groups = do("reshape", magnitudes, (*outer, k // m, m))
    return do("reshape", tensors_of(groups).ranks(groups) >= m - n, (*outer, k))


def tiles_kept(magnitudes: Sequence[Array], sparsity: float, granularity: int = 128) -> list[Array]:
    """Return what is kept of matrices (k, n) by columns and by rows of tiles, ranked over all of them."""
    if granularity < 1:
        raise PruneError(f"granularity is {granularity}; a tile has one column at least")
    for one in magnitudes:
        if len(shape(one)) != 2:
            raise ShapeError(f"tiles are of a matrix (k, n), not of a weight of shape {shape(one)}")
    share = 1 - sqrt(1 - sparsity)
    tensors = tensors_of(magnitudes[0])
    squares = [np.square(np.maximum(tensors.to_numpy(one), 0)) for one in magnitudes]
    columns = lowest_units_dropped([(np.sqrt(one.mean(0)), len(one)) for one in squares], share)
    left = [np.flatnonzero(kept) for kept in columns]
    tiles = [[own[i : i + granularity] for i in range(0, len(own), granularity)] for own in left]
    segments = [
        (np.sqrt(one[:, tile].mean(1)), len(tile))
        for one, own in zip(squares, tiles, strict=True)
        for tile in own
    ]
    rows = iter(lowest_units_dropped(segments, share) if segments else [])
    found = []
    for one, own in zip(squares, tiles, strict=True):
        kept = np.zeros(one.shape, bool)
        for tile in own:
            kept[:, tile] = next(rows)[:, None]
        found.append(kept)
    return [tensors.beside(kept, one) for kept, one in zip(found, magnitudes, strict=True)]


def channels_kept(magnitudes: Sequence[Array], sparsity: float, norm: int = 2) -> list[Array]:
    """Return what is kept of weights (channels, ...) when the channels of the smallest norms are dropped.

    Channels of several weights are compared by their norm over the one that all ones would have, and of each
    weight the best one stays.
    """
    if norm not in (1, 2):
        raise PruneError(f"norm is {norm!r}; channels are told by their norm 1 or 2")
    tensors = tensors_of(magnitudes[0])
    units = []
    for one in magnitudes:
        rows = do("reshape", one, (shape(one)[0], -1))
        alive = tensors.to_numpy((rows >= 0).sum(1)) > 0
        powers = tensors.to_numpy((_alive(rows) ** norm).sum(1))
        length = shape(rows)[1]
        units.append((np.where(alive, (powers / length) ** (1 / norm), -1), length))
    if len(units) > 1 and sparsity < 1:
        for scores, _ in units:
            scores[scores.argmax()] = np.inf
    found = []
    for kept, one in zip(lowest_units_dropped(units, sparsity), magnitudes, strict=True):
        column = do("reshape", tensors.beside(kept, one), (-1, *[1] * (len(shape(one)) - 1)))
        found.append(do("broadcast_to", column, shape(one)))
    return found


def blocks_kept(
    magnitudes: Sequence[Array], sparsity: float, block: tuple[int, int] = (4, 4), norm: int = 2
) -> list[Array]:
    """Return what is kept of matrices when the blocks of the smallest norms of all of them are dropped."""
    tensors = tensors_of(magnitudes[0])
    height, width = block
    grids = []
    for one in magnitudes:
        extents = shape(one)
        if len(extents) != 2 or extents[0] % height or extents[1] % width:
            raise ShapeError(f"a weight of shape {extents} has no whole number of blocks {height}x{width}")
        grids.append(do("reshape", one, (extents[0] // height, height, extents[1] // width, width)))
    units = []
    for grid in grids:
        dropped = tensors.to_numpy((grid >= 0).sum((1, 3))) == 0
        powers = tensors.to_numpy((_alive(grid) ** norm).sum((1, 3)))
        units.append((np.where(dropped, -1, powers).reshape(-1), height * width))
    found = []
    for kept, grid in zip(lowest_units_dropped(units, sparsity), grids, strict=True):
        rows, _, columns, _ = shape(grid)
        blocks = do("reshape", tensors.beside(kept, grid), (rows, 1, columns, 1))
        found.append(do("reshape", do("broadcast_to", blocks, shape(grid)), (rows * height, columns * width)))
    return found


def rows_kept(scores: Sequence[Array], sparsity: float) -> list[Array]:
    """Return what is kept of weights (outputs, ...) when the lowest scores of each output are dropped."""
    found = []
    for one in scores:
        rows = do("reshape", one, (shape(one)[0], -1))
        kept = tensors_of(one).ranks(rows) >= round(sparsity * shape(rows)[1])
        found.append(do("reshape", kept, shape(one)))
    return found


def _alive(magnitudes: Array) -> Array:
    """Return magnitudes with 0 for what is dropped."""
    return do("where", magnitudes >= 0, magnitudes, do("zeros_like", magnitudes))


def lowest_units_dropped(units: Sequence[tuple[Any, int]], sparsity: float) -> list[Any]:
    """Return False for the lowest units of all, of scores, each with the elements that its units have.

    As many are dropped as come nearest to that share of all elements.
    """
    scores = np.concatenate([one for one, _ in units])
    sizes = np.concatenate([np.full(len(one), count) for one, count in units])
    if len(set(sizes.tolist())) <= 1:
        count = round(sparsity * len(scores))
    else:
        dropped = np.concatenate([[0], np.cumsum(sizes[np.argsort(scores, kind="stable")])])
        count = int(np.argmin(abs(dropped - sparsity * dropped[-1])))
    kept = tensors_of(scores).keep_mask_of_highest(scores, count)
    return np.split(kept, np.cumsum([len(one) for one, _ in units])[:-1])


def regrown_kept(
    magnitudes: Sequence[Array], growth: Sequence[Array], sparsity: float, fraction: float
) -> list[Array]:
    """Return what is kept of weights when the smallest are exchanged for those of the highest growth scores.

    magnitudes: -inf where a weight is dropped already.  growth: magnitudes of gradients (RigL) or random
    numbers (SET), not negative.  Of what the sparsity lets be kept, the share `fraction` is exchanged.
    Source: Mocanu et al. 2018 (SET); Evci et al. 2020 (RigL), algorithm 1.
    """
    tensors = tensors_of(magnitudes[0])
    row, scores = tensors.flat(magnitudes), tensors.flat(growth)
    total = len(row)
    kept = total - round(sparsity * total)
    stay = min(kept - round(fraction * kept), int((row > -inf).sum()))
    staying = tensors.keep_mask_of_highest(row, total - stay)
    candidates = do("where", staying, -do("ones_like", scores), scores)
    grown = tensors.keep_mask_of_highest(candidates, total - (kept - stay))
    return _split(staying | grown, magnitudes)


def _split(row: Array, arrays: Sequence[Array]) -> list[Array]:
    """Return parts of a row in the shapes of arrays, whose elements it has one after another."""
    parts, first = [], 0
    for array in arrays:
        end = first + prod(shape(array))
        parts.append(do("reshape", row[first:end], shape(array)))
        first = end
    return parts

"""Masks: the elements of a weight that are kept, as functions of magnitudes, and patterns of sparsity.

Weights are arrays of NumPy, tensors of PyTorch, or eager tensors of TensorFlow.  A mask has the weight's
library, shape and type, with 1 where an element is kept and 0 elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import inf, prod, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, PositiveInt, Share, Where, checked
from amanda.tools.kit import tensors_of
from amanda.tools.libraries import do, shape
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


Array = Any
"""An array of NumPy, or a tensor of PyTorch."""


class PruneError(AmandaError, ValueError, module="amanda.tools.prune"):
    """An option, a weight or a model with which pruning makes no sense."""


class ShapeError(PruneError, module="amanda.tools.prune"):
    """A weight whose shape a pattern does not fit."""


def _for_any_framework(keep_mask: Callable[..., Array]) -> Callable[..., Any]:
    """Return a function for weights of any framework, which checks its options, from one of plain arrays."""

    @checked(error=PruneError)
    @wraps(keep_mask)
    def mask(weight: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the mask, which is chosen in float32 or wider, in the weight's own library and type."""
        tensors = tensors_of(weight)
        # In the weight's type, which is what a product with it needs.
        return tensors.cast(keep_mask(tensors.plain(weight), *args, **kwargs), weight)

    return mask


@_for_any_framework
def element_mask(weight: Any, sparsity: Share = 0.5) -> Any:
    """Drop the round(sparsity * elements) smallest magnitudes.

    Source: Han et al. 2015, "Learning both weights and connections"; equals torch.nn.utils.prune's
    `l1_unstructured`.

    Args:
        weight: Of any shape.
        sparsity: Share of the elements that are dropped.

    Returns:
        0/1 mask of the weight's shape and type.

    Raises:
        PruneError: For a sparsity outside [0, 1].
    """
    return element_keep_masks([abs(weight)], sparsity)[0]


@_for_any_framework
def n_m_mask(weight: Any, n: PositiveInt = 2, m: PositiveInt = 4) -> Any:
    """Keep the n largest magnitudes of every m consecutive values along the last axis.

    Source: Mishra et al. 2021, "Accelerating sparse deep neural networks" (2:4); Zhou et al. 2021, sec. 3.1.

    Args:
        weight: (..., k), k divisible by m.
        n: Elements that are kept of each m.
        m: Consecutive elements that are ranked together.

    Returns:
        0/1 mask of the weight's shape and type.

    Raises:
        ShapeError: Otherwise, and for n above m.
    """
    return n_m_keep_mask(abs(weight), n, m)


@_for_any_framework
def tile_mask(weight: Any, sparsity: Share = 0.5, granularity: PositiveInt = 128) -> Any:
    """Drop columns, and then rows of each tile of `granularity` remaining columns.

    Source: Guo et al. 2020, "Accelerating sparse DNN models without hardware-support via tile-wise sparsity".

    Args:
        weight: (k, n), the second factor of a product: k is summed over, n are outputs.  Columns and rows are
            dropped in equal shares, 1 - sqrt(1 - sparsity) of each, by the root of the mean of their squares.
        sparsity: Share of the elements that are dropped.
        granularity: Columns of a tile.

    Returns:
        0/1 mask of the weight's shape and type.

    Raises:
        ShapeError: For a weight that is not a matrix.
    """
    return tile_keep_masks([abs(weight)], sparsity, granularity)[0]


@_for_any_framework
def channel_mask(weight: Any, sparsity: Share = 0.5, norm: Literal[1, 2] = 2, axis: int = 0) -> Any:
    """Drop the round(sparsity * channels) channels of the smallest norm.

    Source: Li et al. 2017, "Pruning filters for efficient ConvNets" (L1); equals torch.nn.utils.prune's
    `ln_structured`.

    Args:
        weight: Channels along `axis`.
        sparsity: Share of the channels that are dropped.
        norm: 1 or 2.
        axis: Axis of the channels.

    Returns:
        0/1 mask of the weight's shape and type.
    """
    (keep_mask,) = channel_keep_masks([do("moveaxis", abs(weight), axis, 0)], sparsity, norm)
    return do("moveaxis", keep_mask, 0, axis)


@_for_any_framework
def block_mask(
    weight: Any,
    sparsity: Share = 0.5,
    block: tuple[PositiveInt, PositiveInt] = (4, 4),
    norm: Literal[1, 2] = 2,
) -> Any:
    """Drop the round(sparsity * blocks) blocks of the smallest norm.

    Source: Narang et al. 2017, "Block-sparse recurrent neural networks" (with the largest magnitude there).

    Args:
        weight: (k, n), of whole blocks.
        sparsity: Share of the blocks that are dropped.
        block: Rows and columns of a block.
        norm: 1 or 2.

    Returns:
        0/1 mask of the weight's shape and type.

    Raises:
        ShapeError: For a weight of another shape.
    """
    return block_keep_masks([abs(weight)], sparsity, block, norm)[0]


def element_keep_masks(magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks of weights of any shapes: the smallest elements of all weights are dropped."""
    tensors = tensors_of(magnitudes[0])
    # One flat array of all weights makes "global" and "local" the same function of one or several weights.
    elements = tensors.flat(magnitudes)
    return _split_in_shapes(
        tensors.keep_mask_of_highest(elements, round(sparsity * len(elements))), magnitudes
    )


def n_m_keep_mask(magnitudes: Array, n: int, m: int) -> Array:
    """Return a mask of the n largest of each m along the last axis; raise ShapeError if n:m does not fit."""
    *outer_extents, k = shape(magnitudes)
    if not 0 < n <= m or k % m:
        raise ShapeError(
            f"{n}:{m} does not fit shape {(*outer_extents, k)}: its last extent is a multiple of {m}"
        )
    groups = do("reshape", magnitudes, (*outer_extents, k // m, m))
    # Ranks and not a threshold: of equal magnitudes exactly n have to stay, which hardware demands.
    return do("reshape", tensors_of(groups).ranks(groups) >= m - n, (*outer_extents, k))


def tile_keep_masks(magnitudes: Sequence[Array], sparsity: float, granularity: int = 128) -> list[Array]:
    """Return keep masks of matrices: columns, then rows of tiles, rank over all; ShapeError for others."""
    if granularity < 1:
        raise PruneError(f"granularity is {granularity}; a tile has one column at least")
    for matrix in magnitudes:
        if len(shape(matrix)) != 2:
            raise ShapeError(f"tiles are of a matrix (k, n), not of a weight of shape {shape(matrix)}")
    # Two rounds, of columns and of rows, that each keep sqrt(1 - sparsity) keep 1 - sparsity together.
    share = 1 - sqrt(1 - sparsity)
    tensors = tensors_of(magnitudes[0])
    # On the host in NumPy: tiles are ragged, and a loop over them on a GPU would launch a kernel for each.
    # -inf of dropped elements becomes 0.
    squares = [np.square(np.maximum(tensors.to_numpy(matrix), 0)) for matrix in magnitudes]
    column_masks = unit_keep_masks([(np.sqrt(matrix.mean(0)), len(matrix)) for matrix in squares], share)
    # The kept columns of each matrix, cut into tiles.
    tiles_by_matrix = [
        [columns[i : i + granularity] for i in range(0, len(columns), granularity)]
        for columns in map(np.flatnonzero, column_masks)
    ]
    # Rows are ranked within their tile: a row may stay in one tile and go in another.
    tile_rows = [  # as units: scores of the rows of each tile, and the number of elements of a row
        (np.sqrt(matrix[:, tile].mean(1)), len(tile))
        for matrix, tiles in zip(squares, tiles_by_matrix, strict=True)
        for tile in tiles
    ]
    row_masks = iter(unit_keep_masks(tile_rows, share) if tile_rows else [])  # one for each tile, in order
    keep_masks = []
    for matrix, tiles in zip(squares, tiles_by_matrix, strict=True):
        keep_mask = np.zeros(matrix.shape, bool)
        for tile in tiles:
            keep_mask[:, tile] = next(row_masks)[:, None]
        keep_masks.append(keep_mask)
    return [
        tensors.beside(keep_mask, matrix) for keep_mask, matrix in zip(keep_masks, magnitudes, strict=True)
    ]


def channel_keep_masks(magnitudes: Sequence[Array], sparsity: float, norm: int = 2) -> list[Array]:
    """Return keep masks of weights (channels, ...): the channels of the smallest norms are dropped.

    Norms of several weights are divided by the norm of as many ones, so that channels of different sizes
    compare; the best channel of each then stays, unless all go.  Raises PruneError for another norm.
    """
    if norm not in (1, 2):
        raise PruneError(f"norm is {norm!r}; it is 1 or 2")
    tensors = tensors_of(magnitudes[0])
    units = []  # scores of the channels of each weight, and the number of elements of a channel
    for weight in magnitudes:
        rows = do("reshape", weight, (shape(weight)[0], -1))
        # Dropped channels have -inf throughout; -1 ranks them below a channel that is 0 and kept.
        is_dropped = tensors.to_numpy((rows >= 0).sum(1)) == 0
        powers = tensors.to_numpy((_zero_where_dropped(rows) ** norm).sum(1))
        length = shape(rows)[1]
        units.append((np.where(is_dropped, -1, (powers / length) ** (1 / norm)), length))
    # A global budget could empty a whole layer otherwise, and cut the network.
    if len(units) > 1 and sparsity < 1:
        for scores, _ in units:
            scores[scores.argmax()] = np.inf
    keep_masks = []
    for kept_channels, weight in zip(unit_keep_masks(units, sparsity), magnitudes, strict=True):
        column = do("reshape", tensors.beside(kept_channels, weight), (-1, *[1] * (len(shape(weight)) - 1)))
        keep_masks.append(do("broadcast_to", column, shape(weight)))
    return keep_masks


def block_keep_masks(
    magnitudes: Sequence[Array], sparsity: float, block: tuple[int, int] = (4, 4), norm: int = 2
) -> list[Array]:
    """Return keep masks without the blocks of the smallest norms of all; ShapeError for no whole blocks."""
    tensors = tensors_of(magnitudes[0])
    height, width = block
    grids = []
    for matrix in magnitudes:
        extents = shape(matrix)
        if len(extents) != 2 or extents[0] % height or extents[1] % width:
            raise ShapeError(f"a weight of shape {extents} has no whole number of blocks {height}x{width}")
        grids.append(do("reshape", matrix, (extents[0] // height, height, extents[1] // width, width)))
    units = []  # scores of the blocks of each matrix, and the number of elements of a block
    for grid in grids:
        # -1 ranks blocks of dropped elements below blocks that are 0 and kept.
        is_dropped = tensors.to_numpy((grid >= 0).sum((1, 3))) == 0
        # Powers rank as their roots do, and no root rounds near ties apart.
        powers = tensors.to_numpy((_zero_where_dropped(grid) ** norm).sum((1, 3)))
        units.append((np.where(is_dropped, -1, powers).reshape(-1), height * width))
    keep_masks = []
    for kept_blocks, grid in zip(unit_keep_masks(units, sparsity), grids, strict=True):
        rows, _, columns, _ = shape(grid)
        blocks = do("reshape", tensors.beside(kept_blocks, grid), (rows, 1, columns, 1))
        keep_masks.append(
            do("reshape", do("broadcast_to", blocks, shape(grid)), (rows * height, columns * width))
        )
    return keep_masks


def row_keep_masks(scores: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks of weights (outputs, ...): the lowest scores of each output are dropped."""
    keep_masks = []
    for weight_scores in scores:
        rows = do("reshape", weight_scores, (shape(weight_scores)[0], -1))
        # By output, as Wanda compares weights of one output alone (Sun et al. 2023, sec. 3).
        keep_mask = tensors_of(weight_scores).ranks(rows) >= round(sparsity * shape(rows)[1])
        keep_masks.append(do("reshape", keep_mask, shape(weight_scores)))
    return keep_masks


def _zero_where_dropped(magnitudes: Array) -> Array:
    """Return magnitudes with 0 in place of the -inf of dropped elements."""
    return do("where", magnitudes >= 0, magnitudes, do("zeros_like", magnitudes))


def unit_keep_masks(units: Sequence[tuple[Any, int]], sparsity: float) -> list[Any]:
    """Return keep masks of units, such as channels, of several weights: the lowest scores are dropped.

    units: for each weight the scores of its units, and the number of elements of a unit.  As many units are
    dropped as come nearest to the share `sparsity` of all elements.
    """
    scores = np.concatenate([unit_scores for unit_scores, _ in units])
    sizes = np.concatenate([np.full(len(unit_scores), count) for unit_scores, count in units])
    if len(set(sizes.tolist())) <= 1:
        count = round(sparsity * len(scores))
    else:
        dropped_elements = np.concatenate([[0], np.cumsum(sizes[np.argsort(scores, kind="stable")])])
        # Units of several sizes meet a share only nearly: the nearest number of units is taken.
        count = int(np.argmin(abs(dropped_elements - sparsity * dropped_elements[-1])))
    keep_mask = tensors_of(scores).keep_mask_of_highest(scores, count)
    return np.split(keep_mask, np.cumsum([len(unit_scores) for unit_scores, _ in units])[:-1])


def regrown_keep_masks(
    magnitudes: Sequence[Array], growth: Sequence[Array], sparsity: float, fraction: float
) -> list[Array]:
    """Return keep masks of weights: the smallest kept elements are exchanged for dropped ones that grow most.

    magnitudes: -inf where an element is dropped already.  growth: magnitudes of gradients (RigL) or random
    numbers (SET), not negative.  fraction: share of the kept elements that is exchanged.
    Source: Mocanu et al. 2018 (SET); Evci et al. 2020 (RigL), algorithm 1.
    """
    tensors = tensors_of(magnitudes[0])
    elements, scores = tensors.flat(magnitudes), tensors.flat(growth)
    total = len(elements)
    keep_count = total - round(sparsity * total)
    # Where the sparsity falls, fewer elements are kept so far than are to stay.
    stay_count = min(keep_count - round(fraction * keep_count), int((elements > -inf).sum()))
    stay_mask = tensors.keep_mask_of_highest(elements, total - stay_count)
    # Growth is not negative, so that -1 keeps elements that stay from being chosen a second time.
    candidates = do("where", stay_mask, -do("ones_like", scores), scores)
    grow_mask = tensors.keep_mask_of_highest(candidates, total - (keep_count - stay_count))
    return _split_in_shapes(stay_mask | grow_mask, magnitudes)


def _split_in_shapes(elements: Array, arrays: Sequence[Array]) -> list[Array]:
    """Return the parts of a flat array of the elements of several arrays, each in its array's shape."""
    parts, start = [], 0
    for array in arrays:
        end = start + prod(array.shape)
        parts.append(elements[start:end].reshape(array.shape))
        start = end
    return parts


_Floats: TypeAlias = "NDArray[np.float64]"


@checked(error=PruneError)
def input_permutation(
    weight: Any, n: PositiveInt = 2, m: PositiveInt = 4, rounds: NonNegativeInt = 1000
) -> NDArray[np.intp]:
    """Return an order of the channels along the last axis in which an n:m mask keeps more magnitude.

    Source: Pool & Yu 2021, "Channel permutations for N:M sparsity" (greedy channel swaps).

    Args:
        weight: An array (..., k), k divisible by m.
        n: As in `n_m_mask`.
        m: As in `n_m_mask`.
        rounds: Largest number of rounds of swaps.

    Returns:
        k positions: an n:m mask of `weight[..., permutation]` keeps at least as much as one of `weight`. Each
        round swaps the pairs of channels that gain most, no group of m twice, until no swap gains or `rounds`
        are over.

    Raises:
        ShapeError: As `n_m_mask` does.
    """
    channels = np.abs(np.asarray(weight, np.float64)).reshape(-1, np.shape(weight)[-1]).T.copy()
    k = len(channels)
    if not 0 < n <= m or k % m:
        raise ShapeError(f"{n}:{m} does not fit {k} channels: their number is a multiple of {m}")
    order = np.arange(k)
    if n == m:
        return order
    group_of_channel = order // m
    magnitudes_without = np.empty(k)  # magnitude that the group of channel i keeps without channel i
    gains_by_joining = np.empty((k, k))  # magnitude that this rest of the group gains by channel j
    changed_groups = np.arange(k // m)
    for _ in range(rounds):
        # Only groups that changed are computed anew in a round: k * k scores would dominate otherwise.
        for changed_group in changed_groups:
            members = order[changed_group * m : (changed_group + 1) * m]
            for i in members:
                rest = channels[[j for j in members if j != i]]
                magnitudes_without[i], gains_by_joining[i] = _magnitude_and_gains(rest, channels, n)
        present_magnitudes = magnitudes_without + np.diag(gains_by_joining)
        # What the group of channel i gains if j replaces i; a swap changes the groups of both.
        gains_by_replacement = magnitudes_without[:, None] + gains_by_joining - present_magnitudes[:, None]
        gains = gains_by_replacement + gains_by_replacement.T
        # Each pair once, and no pair within a group, whose order changes nothing.
        gains[group_of_channel[:, None] >= group_of_channel[None, :]] = 0
        # Gains within rounding count as none: equal channels would be swapped in every round.
        changed_groups = _swap_best_pairs(gains, order, group_of_channel, 1e-9 * channels.sum())
        if not len(changed_groups):
            break
    return order


def _magnitude_and_gains(rest: _Floats, channels: _Floats, n: int) -> tuple[float, _Floats]:
    """Return the magnitude that an n:m mask keeps of the rest of a group, and how much each channel adds."""
    largest = np.sort(rest, 0)[-n:]  # at each place of the channels, the smallest of the n first
    # A channel takes the place of the smallest of the n that are kept, where it is larger.
    return float(largest.sum()), np.maximum(channels - largest[0], 0).sum(1)


def _swap_best_pairs(
    gains: _Floats, order: NDArray[np.intp], group_of_channel: NDArray[np.intp], threshold: float
) -> NDArray[np.intp]:
    """Swap pairs of channels in the order of their gains above a threshold, no group twice.

    Changes `order` and `group_of_channel` in place.  Returns the changed groups; an empty array without any.
    """
    positions = np.argsort(order)
    first_channels, second_channels = np.nonzero(gains > threshold)
    changed_groups: set[int] = set()
    # Stable, so that equal gains give the same order on each machine.
    for pair in np.argsort(-gains[first_channels, second_channels], kind="stable"):
        i, j = first_channels[pair], second_channels[pair]
        # Gains were computed for the groups before any swap of the round.
        if not {group_of_channel[i], group_of_channel[j]} & changed_groups:
            changed_groups |= {group_of_channel[i], group_of_channel[j]}
            order[[positions[i], positions[j]]] = j, i
            group_of_channel[[i, j]] = group_of_channel[[j, i]]
    return np.array(sorted(changed_groups), np.intp)


@dataclass(frozen=True)
class Pattern:
    """A shape of sparsity: which elements of a weight are dropped together.

    name: the option `pattern` of PruneTool.  keep_masks: function of the scores of weights (outputs, inputs,
    ...), -inf where an element is dropped already, and of a sparsity; it returns keep masks.
    n_m: n and m of a pattern that keeps n of each m consecutive input channels, whatever the sparsity.
    block: outputs and inputs of a block; a weight's matrix (outputs, inputs and window) has whole blocks.
    """

    name: str
    keep_masks: Callable[[Sequence[Array], float], list[Array]]
    n_m: tuple[int, int] | None = None
    block: tuple[int, int] | None = None

    @property
    def is_elementwise(self) -> bool:
        """True if each element is dropped by itself."""
        return self.keep_masks is element_keep_masks

    def why_unsupported(self, extents: Sequence[int], has_axes: bool) -> str | None:
        """Return why a weight cannot have the pattern; None for a weight that can.

        extents: of outputs, inputs, and the rest.  has_axes: whether it is known which these are.
        """
        if not has_axes and not self.is_elementwise:
            return "which of its axes are outputs and inputs is not known"
        if self.n_m is not None and extents[1] % self.n_m[1]:
            return f"its {extents[1]} input channels are no multiple of {self.n_m[1]}"
        if self.block is not None:
            matrix = extents[0], prod(extents[1:])
            if any(extent % block_extent for extent, block_extent in zip(matrix, self.block, strict=True)):
                return f"its matrix of {matrix[0]}x{matrix[1]} has no whole number of blocks {self.block}"
        return None


_N_M = re.compile(r"(\d+):(\d+)")

PatternName = (
    Literal["unstructured", "block", "tile", "structured"]
    | Annotated[str, Where("n:m such as 2:4", lambda name: _N_M.fullmatch(name) is not None)]
)
"""Name of a pattern of sparsity."""


def pattern_of(name: PatternName, granularity: int, norm: int, block: tuple[int, int]) -> Pattern:
    """Return a pattern by name; raise PruneError for n:m that keeps none, or more than there are."""
    if match := _N_M.fullmatch(name):
        n, m = int(match[1]), int(match[2])
        if 0 < n <= m:
            return Pattern(name, partial(_n_m_keep_masks, n, m), (n, m))
        raise PruneError(f"pattern is {name!r}: of each {m} channels {n} cannot be kept")
    keep_masks_by_name: dict[str, Callable[..., list[Array]]] = {
        "unstructured": element_keep_masks,
        "block": partial(_matrix_block_keep_masks, block, norm),
        "tile": partial(_matrix_tile_keep_masks, granularity),
        "structured": partial(channel_keep_masks, norm=norm),
    }
    return Pattern(name, keep_masks_by_name[name], block=(block[0], block[1]) if name == "block" else None)


def _n_m_keep_masks(n: int, m: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks by n:m along the input channels; the sparsity has no effect."""
    return [
        do("moveaxis", n_m_keep_mask(do("moveaxis", weight, 1, -1), n, m), -1, 1) for weight in magnitudes
    ]


def _matrix_block_keep_masks(
    block: tuple[int, int], norm: int, magnitudes: Sequence[Array], sparsity: float
) -> list[Array]:
    """Return keep masks by blocks of the matrices (outputs, inputs and window) of weights."""
    matrices = [do("reshape", weight, (shape(weight)[0], -1)) for weight in magnitudes]
    keep_masks = block_keep_masks(matrices, sparsity, block, norm)
    return [
        do("reshape", keep_mask, shape(weight))
        for keep_mask, weight in zip(keep_masks, magnitudes, strict=True)
    ]


def _matrix_tile_keep_masks(granularity: int, magnitudes: Sequence[Array], sparsity: float) -> list[Array]:
    """Return keep masks by tiles of the matrices (inputs and window, outputs) of weights."""
    matrices = [do("reshape", weight, (shape(weight)[0], -1)).T for weight in magnitudes]
    keep_masks = tile_keep_masks(matrices, sparsity, granularity)
    return [
        do("reshape", keep_mask.T, shape(weight))
        for keep_mask, weight in zip(keep_masks, magnitudes, strict=True)
    ]

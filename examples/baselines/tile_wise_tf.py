"""Tile-wise pruning of a TensorFlow graph by hand, with a hook of sessions (Guo et al. 2020).

Variables are found by their names, so a network is to name them as layers do. Source of the method:
"Accelerating sparse DNN models without hardware-support via tile-wise sparsity", whose code is such a hook.
"""

from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
NAMES = ("kernel", "weights", "w")


def lowest_dropped(scores: np.ndarray, share: float) -> np.ndarray:
    """False for the share of lowest scores."""
    kept = np.ones(len(scores), bool)
    kept[np.argsort(scores, kind="stable")[: round(share * len(scores))]] = False
    return kept


def rows_dropped(squares: np.ndarray, tiles: list[np.ndarray], share: float) -> list[np.ndarray]:
    """For each tile, false for the rows that are dropped: the lowest of all, a share of the elements."""
    scores = np.concatenate([np.sqrt(squares[:, tile].mean(1)) for tile in tiles])
    sizes = np.repeat([len(tile) for tile in tiles], len(squares))
    order = np.argsort(scores, kind="stable")
    dropped = np.concatenate([[0], np.cumsum(sizes[order])])
    kept = np.ones(len(scores), bool)
    kept[order[: np.argmin(np.abs(dropped - share * sizes.sum()))]] = False
    return np.split(kept, len(tiles))


def tile_mask(matrix: np.ndarray, sparsity: float, granularity: int) -> np.ndarray:
    """Of a matrix (inputs, outputs) whole columns go, then whole rows of each tile of columns left."""
    share = 1 - np.sqrt(1 - sparsity)
    squares = np.square(matrix)
    columns = np.flatnonzero(lowest_dropped(np.sqrt(squares.mean(0)), share))
    tiles = [columns[first : first + granularity] for first in range(0, len(columns), granularity)]
    mask = np.zeros(matrix.shape, matrix.dtype)
    for tile, rows in zip(tiles, rows_dropped(squares, tiles, share), strict=True):
        mask[np.ix_(rows, tile)] = 1
    return mask


def mask_of(kernel: np.ndarray, sparsity: float, granularity: int) -> np.ndarray:
    """The mask of a kernel (..., in, out), as the matrix that it is in a product."""
    if kernel.ndim == 2:
        return tile_mask(kernel, sparsity, granularity)
    inner = np.moveaxis(kernel, -2, 0)  # the channels before the places of the kernel
    mask = tile_mask(inner.reshape(-1, kernel.shape[-1]), sparsity, granularity)
    return np.moveaxis(mask.reshape(inner.shape), 0, -2)


class TileWiseHook(v1.train.SessionRunHook):
    """Masks the kernels when a session begins and after each of its steps."""

    def __init__(self, sparsity: float = 0.5, granularity: int = 128) -> None:
        self.sparsity, self.granularity = sparsity, granularity
        self.masks: dict[str, np.ndarray] = {}

    def begin(self) -> None:
        """The graph is about to be finished: give it the assignments."""
        self.kernels = [one for one in v1.trainable_variables() if one.op.name.split("/")[-1] in NAMES]
        self.given = [v1.placeholder(one.dtype.base_dtype, one.shape) for one in self.kernels]
        self.assigned = [
            v1.assign(one, one * mask) for one, mask in zip(self.kernels, self.given, strict=True)
        ]

    def after_create_session(self, session: Any, coordinator: Any) -> None:
        """Variables have their values: compute masks from them."""
        for kernel, value in zip(self.kernels, session.run(self.kernels), strict=True):
            if value.ndim in (2, 4):
                self.masks[kernel.op.name] = mask_of(value, self.sparsity, self.granularity)
        self.mask(session)

    def after_run(self, context: Any, values: Any) -> None:
        """A step may have changed the weights."""
        self.mask(context.session)

    def mask(self, session: Any) -> None:
        """Set what is dropped to zero."""
        chosen = [i for i, one in enumerate(self.kernels) if one.op.name in self.masks]
        masks = {self.given[i]: self.masks[self.kernels[i].op.name] for i in chosen}
        session.run([self.assigned[i] for i in chosen], masks)

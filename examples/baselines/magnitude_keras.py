"""Magnitude pruning of a Keras model by hand, with a callback of `fit` (Han et al. 2015).

It knows the layers that have a kernel; layers inside of other layers have to be named one by one.
"""

import keras
import numpy as np

KINDS = (keras.layers.Conv2D, keras.layers.Dense, keras.layers.EinsumDense)
INSIDE = {keras.layers.MultiHeadAttention: ("query_dense", "key_dense", "value_dense", "output_dense")}


def smallest_dropped(kernel: np.ndarray, sparsity: float) -> np.ndarray:
    """A 0/1 mask of the kernel's shape that drops the share `sparsity` of smallest magnitude."""
    order = np.argsort(np.abs(kernel), axis=None, kind="stable")
    mask = np.ones(kernel.size, kernel.dtype)
    mask[order[: round(kernel.size * sparsity)]] = 0
    return mask.reshape(kernel.shape)


class MagnitudePruning(keras.callbacks.Callback):
    """Sets the smallest weights of every known layer to zero, and again after each batch."""

    def __init__(self, model: keras.Model, sparsity: float = 0.5) -> None:
        super().__init__()
        kernels = [layer.kernel for layer in known(model)]
        self.masked = [(kernel, smallest_dropped(kernel.numpy(), sparsity)) for kernel in kernels]
        self.mask()

    def mask(self) -> None:
        """Set what is dropped to zero."""
        for kernel, mask in self.masked:
            kernel.assign(kernel * mask)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """The optimizer has changed the weights."""
        self.mask()


def known(model: keras.Model) -> list[keras.layers.Layer]:
    """Layers with a kernel."""
    found = []
    for layer in model.layers:
        inside = [getattr(layer, name) for kind, names in INSIDE.items() if isinstance(layer, kind)
                  for name in names]  # fmt: skip
        found += [one for one in [layer, *inside] if isinstance(one, KINDS)]
    return found

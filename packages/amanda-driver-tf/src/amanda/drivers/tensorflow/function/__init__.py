"""Function mode: what tf.function, Keras and loaded SavedModels run."""

from ._driver import FunctionDriver

__all__ = ["FunctionDriver"]

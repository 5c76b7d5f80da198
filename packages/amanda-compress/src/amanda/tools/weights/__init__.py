"""Base of tools that change weights: the weight that an op reads, state kept by weight, stores of parameters.

class Halved(WeightTool):
    @amanda.traceable
    def transform(self, value):
        return value / 2

In: ops, in the words of StandardMapping; models, whose parameters a `ParameterStore` reads and writes.
Out: other values of weights, where ops read them and, by `finalize`, in the model.
"""

from amanda.tools.weights._parameters import (
    ParameterError,
    ParameterStore,
    SharedState,
    StoredParameter,
    parameter_store,
)
from amanda.tools.weights._tool import WeightTool
from amanda.tools.weights._weight import Weight, WeightError, WeightResult, WeightView
from amanda.tools.weights._weight_input import ParameterSlice, WeightInput, WeightReads, weight_input
from amanda.tools.weights._weights import SelectionOptions

__all__ = [
    "ParameterError", "ParameterSlice", "ParameterStore", "SelectionOptions", "SharedState",
    "StoredParameter", "Weight", "WeightError", "WeightInput", "WeightReads", "WeightResult",
    "WeightTool", "WeightView", "parameter_store", "weight_input",
]  # fmt: skip

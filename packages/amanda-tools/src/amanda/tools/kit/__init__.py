"""What tools that look need beyond the context: tensors of any library, who made them, parameters of models.

A tool that observes tensors derives from `TensorTool`; one that changes weights from
`amanda.tools.weights.WeightTool`.
"""

from amanda.tools.kit._dataflow import Dataflow, DataflowNode
from amanda.tools.kit._leaves import leaves
from amanda.tools.kit._onnx_file import read_onnx
from amanda.tools.kit._parameters import (
    ParameterError,
    ParameterStore,
    StoredParameter,
    StridedLayout,
    parameter_inputs,
    parameter_store,
)
from amanda.tools.kit._progress import Progress, check_number
from amanda.tools.kit._requirements import check
from amanda.tools.kit._tensor_tool import OpRecord, OpTensor, Role, TensorTool, op_tensors
from amanda.tools.kit._tensors import Tensors, TensorsError, tensors_of
from amanda.tools.kit._unread import remarks_on_packed_inputs
from amanda.tools.kit._windows import Window, windows_of

__all__ = [
    "Dataflow", "DataflowNode", "OpRecord", "OpTensor", "ParameterError", "ParameterStore",
    "Progress", "Role", "StoredParameter", "StridedLayout", "TensorTool", "Tensors", "TensorsError",
    "Window", "check", "check_number", "leaves", "op_tensors", "parameter_inputs",
    "parameter_store", "read_onnx", "remarks_on_packed_inputs", "tensors_of", "windows_of",
]  # fmt: skip

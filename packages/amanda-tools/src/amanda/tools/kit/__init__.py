"""What tools that look need beyond the context: tensors of any library, who made them, layouts and windows.

A tool that observes tensors derives from `TensorTool`; one that changes weights from
`amanda.tools.weights.WeightTool`.
"""

from amanda.tools.kit._dataflow import Dataflow, DataflowNode
from amanda.tools.kit._inputs import leaves, parameter_inputs, remarks_on_packed_inputs
from amanda.tools.kit._layout import Unfolding, canonical, canonical_extents, restored
from amanda.tools.kit._progress import Progress, check_number
from amanda.tools.kit._requirements import RequiredNames
from amanda.tools.kit._tensor_tool import OpRecord, OpTensor, Role, TensorTool, op_tensors
from amanda.tools.kit._tensors import Tensors, TensorsError, tensors_of
from amanda.tools.kit._windows import Window, windows_of

__all__ = [
    "Dataflow", "DataflowNode", "OpRecord", "OpTensor", "Progress", "RequiredNames", "Role",
    "TensorTool", "Tensors", "TensorsError", "Unfolding", "Window", "canonical",
    "canonical_extents", "check_number", "leaves", "op_tensors", "parameter_inputs",
    "remarks_on_packed_inputs", "restored", "tensors_of", "windows_of",
]  # fmt: skip

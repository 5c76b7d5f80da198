"""Bases for tools that change weights or observe tensors, arithmetic of tensors, and which op made which."""

from amanda.backend import TensorMap
from amanda.tools.kit._callers import PerCaller
from amanda.tools.kit._checks import attempt, check_finite, check_number
from amanda.tools.kit._dataflow import Dataflow, DataflowNode
from amanda.tools.kit._formats import BitField, bits_of, from_bytes, to_bytes
from amanda.tools.kit._forms import OtherForm, SelectedRows
from amanda.tools.kit._holders import HeldError, Holders, holders_of
from amanda.tools.kit._input_rows import MultipliedInput, multiplied_input
from amanda.tools.kit._layout import Unfolding, canonical, canonical_extents, restored, unfolding
from amanda.tools.kit._leaves import leaves
from amanda.tools.kit._memory import FoundMemory
from amanda.tools.kit._onnx_file import read_onnx
from amanda.tools.kit._origins import Origin
from amanda.tools.kit._packed import packed_inputs, unread_tensor
from amanda.tools.kit._parameters import Held, parameters
from amanda.tools.kit._parts import Parts, makes_a_weight
from amanda.tools.kit._progress import Progress
from amanda.tools.kit._rerun import Rerun, rerun, undisturbed
from amanda.tools.kit._tensor_tool import Dtype, Leave, OpRecord, OpTensor, Role, TensorTool, op_tensors
from amanda.tools.kit._tensors import Tensors, TensorsError, numpy_type, tensors_of
from amanda.tools.kit._weight import Form, Present, Weight, WeightError
from amanda.tools.kit._weight_input import (
    WeightInput,
    WeightReads,
    origin,
    parameter_inputs,
    source,
    weight_input,
)
from amanda.tools.kit._weight_result import WeightResult
from amanda.tools.kit._weight_selection import Globs, Selected, WeightSelection
from amanda.tools.kit._weight_tool import WeightTool
from amanda.tools.kit._weights import ELSEWHERE, SEVERAL, Weights
from amanda.tools.kit._windows import Window, spatial_axes, windows_of

__all__ = [
    "ELSEWHERE", "SEVERAL", "BitField", "Dataflow", "DataflowNode", "Dtype", "Form", "FoundMemory", "Globs",
    "Held", "HeldError", "Holders", "Leave", "MultipliedInput", "OpRecord", "OpTensor", "Origin", "OtherForm",
    "Parts", "PerCaller", "Present", "Progress", "Rerun", "Role", "Selected", "SelectedRows", "TensorMap",
    "TensorTool", "Tensors", "TensorsError", "Unfolding", "Weight", "WeightError", "WeightInput",
    "WeightReads", "WeightResult", "WeightSelection", "WeightTool", "Weights", "Window", "attempt", "bits_of",
    "canonical", "canonical_extents", "check_finite", "check_number", "from_bytes", "holders_of", "leaves",
    "makes_a_weight", "multiplied_input", "numpy_type", "op_tensors", "origin", "packed_inputs",
    "parameter_inputs", "parameters", "read_onnx", "rerun", "restored", "source", "spatial_axes",
    "tensors_of", "to_bytes", "undisturbed", "unfolding", "unread_tensor", "weight_input", "windows_of",
]  # fmt: skip

"""What a tool needs beyond the context of an op: the parameters of a model, wherever their values lie."""

from amanda.tools.kit._packed import packed_inputs
from amanda.tools.kit._parameters import Held, HeldError, parameters

__all__ = ["Held", "HeldError", "packed_inputs", "parameters"]

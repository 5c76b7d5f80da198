"""A tiny framework in memory: tensors that are lists of numbers, a tape, modules.

It stands for what a driver meets in a real one: operators that are found by attribute, composites
that call them, in-place and `out=` operators, results of several tensors, checkpoints.
"""

from amanda.testing.fake._autograd import (
    Node,
    Parameter,
    Tensor,
    enable_grad,
    is_grad_enabled,
    no_grad,
    run_backward,
    tensor,
)
from amanda.testing.fake._operators import (
    OPERATORS,
    Halves,
    Linear,
    Module,
    add,
    add_,
    batch_norm,
    cat,
    checkpoint,
    item,
    matmul,
    mul,
    muladd,
    opaque,
    relu,
    split,
    sum,
)

__version__ = "1.0"

__all__ = [
    "OPERATORS",
    "Halves",
    "Linear",
    "Module",
    "Node",
    "Parameter",
    "Tensor",
    "add",
    "add_",
    "batch_norm",
    "cat",
    "checkpoint",
    "enable_grad",
    "is_grad_enabled",
    "item",
    "matmul",
    "mul",
    "muladd",
    "no_grad",
    "opaque",
    "relu",
    "run_backward",
    "split",
    "sum",
    "tensor",
]

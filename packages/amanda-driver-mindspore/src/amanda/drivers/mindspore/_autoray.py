"""Functions that autoray lacks for MindSpore, for tools that compute with every framework's tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np

import mindspore
from amanda.backend import when_imported
from mindspore import Parameter, Tensor, ops


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, Tensor) else Tensor(np.asarray(value))


def _assign(variable: Any, value: Any) -> None:
    variable.set_data(Tensor(np.asarray(value)).astype(variable.dtype))


def _count_nonzero(tensor: Any) -> int:
    return int(np.count_nonzero(tensor.asnumpy()))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "array": _as_tensor,
    "asarray": _as_tensor,
    "to_numpy": lambda tensor: tensor.asnumpy(),
    "assign": _assign,
    "count_nonzero": _count_nonzero,
    **{
        name: getattr(ops, name)
        for name in ("abs", "exp", "isfinite", "isinf", "isnan", "log", "matmul", "maximum", "minimum",
                     "mul", "ones_like", "reshape", "round", "sign", "sqrt", "square", "tanh", "where",
                     "zeros_like", "broadcast_to", "argsort", "moveaxis")
        if hasattr(ops, name)
    },
    **{
        # The default argument binds the name of this iteration.
        name: (lambda tensor, *args, _name=name, **kwargs: getattr(tensor, _name)(*args, **kwargs))
        for name in ("all", "any", "max", "mean", "min", "prod", "sum")
    },
}  # fmt: skip
"""By autoray's name."""


def register_when_imported() -> None:
    """Register the functions with autoray, now or once it is imported."""
    when_imported("autoray", _register_functions)


def _register_functions() -> None:
    import autoray

    # The class of parameters is made at run time, and says that it is of another module.
    autoray.register_backend(Parameter._get_base_class(Tensor), mindspore.__name__)
    for name, function in FUNCTIONS.items():
        autoray.register_function(mindspore.__name__, name, function)

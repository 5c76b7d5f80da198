"""Where a run of PyTorch starts: the random state, and what modules and optimizers hold."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import amanda
from amanda.tools.libraries import numpy as np


class Start:
    """State of the process before its first run, which every other run starts from again.

    It has the random state of Python, NumPy and PyTorch; parameters, buffers and gradients of all living
    modules; and the state of all living optimizers.
    """

    def __init__(self) -> None:
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            with amanda.disabled(), self._torch.no_grad():
                self._take(self._torch)

    def _take(self, torch: Any) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        found, self._optimizers = {}, []
        for one in gc.get_objects():
            kind = type(one)
            if issubclass(kind, torch.nn.Module) and "_parameters" in one.__dict__:
                for tensor in (*one.parameters(recurse=False), *one.buffers(recurse=False)):
                    if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                        found[id(tensor)] = tensor
            elif issubclass(kind, torch.optim.Optimizer) and hasattr(one, "state"):
                self._optimizers.append((one, {key: _copied(value) for key, value in one.state.items()}))
        self._tensors = [(one, one.detach().clone(), _gradient(one)) for one in found.values()]

    def restore(self) -> None:
        """Bring the process back to the state."""
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        if self._torch is None:
            return
        with amanda.disabled(), self._torch.no_grad():
            self._torch.set_rng_state(self._cpu)
            if self._cuda:
                self._torch.cuda.set_rng_state_all(self._cuda)
            for tensor, value, gradient in self._tensors:
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.clone()
                if tensor.is_leaf:
                    tensor.grad = None if gradient is None else gradient.clone()
            for optimizer, state in self._optimizers:
                optimizer.state.clear()
                optimizer.state.update({key: _copied(value) for key, value in state.items()})


def _gradient(tensor: Any) -> Any:
    found = tensor.grad if tensor.is_leaf else None
    return None if found is None else found.detach().clone()


def _copied(value: Any) -> Any:
    """Return the state of one parameter, with tensors of its own."""
    if not isinstance(value, dict):
        return value
    return {name: one.clone() if hasattr(one, "clone") else one for name, one in value.items()}

"""State of the process, which every run of a function starts from."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import amanda
from amanda.tools.libraries import numpy as np


class ProcessState:
    """State of the process before its first run, which every other run starts from again.

    It has the random state of Python, NumPy and PyTorch; parameters, buffers and gradients of all living
    modules; and the state of all living optimizers.
    """

    def __init__(self) -> None:
        self._random, self._numpy = random.getstate(), np.random.get_state()
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            with amanda.disabled(), self._torch.no_grad():
                self._save_torch(self._torch)

    def _save_torch(self, torch: Any) -> None:
        """Copy random states, tensors of modules, gradients and states of optimizers."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        tensors, self._optimizers = {}, []
        # A function may reach models by closures and globals: the garbage collector sees every live one.
        for item in gc.get_objects():
            # Not isinstance, which asks an object for `__class__`: a lazy proxy would load its object.
            kind = type(item)
            # A module whose `__init__` has not run yet has no parameters, and an optimizer no state.
            if issubclass(kind, torch.nn.Module) and "_parameters" in item.__dict__:
                for tensor in (*item.parameters(recurse=False), *item.buffers(recurse=False)):
                    if isinstance(tensor, torch.Tensor) and not torch.nn.parameter.is_lazy(tensor):
                        # By id: modules may share a tensor, and tensors have no equality that is a bool.
                        tensors[id(tensor)] = tensor
            elif issubclass(kind, torch.optim.Optimizer) and hasattr(item, "state"):
                self._optimizers.append(
                    (item, {key: _state_copy(value) for key, value in item.state.items()})
                )
        gradients = (tensor.grad if tensor.is_leaf else None for tensor in tensors.values())
        self._tensors = [
            (tensor, tensor.detach().clone(), None if gradient is None else gradient.detach().clone())
            for tensor, gradient in zip(tensors.values(), gradients, strict=True)
        ]

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
                # In place where that is possible: views and optimizers keep the memory.  `.data` raises no
                # version.
                if tensor.shape == value.shape and tensor.dtype == value.dtype:
                    tensor.data.copy_(value)
                else:
                    tensor.data = value.clone()
                if tensor.is_leaf:
                    tensor.grad = None if gradient is None else gradient.clone()
            for optimizer, state in self._optimizers:
                # The same dict stays: it is a defaultdict to which others may hold references.
                optimizer.state.clear()
                optimizer.state.update({key: _state_copy(value) for key, value in state.items()})


def _state_copy(value: Any) -> Any:
    """Return a copy of the state of one parameter, with its tensors; a value that is not a dict, as it is."""
    if not isinstance(value, dict):
        return value
    return {name: tensor.clone() if hasattr(tensor, "clone") else tensor for name, tensor in value.items()}

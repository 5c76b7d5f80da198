"""What dynamic pruning computes, on tensors of any framework that autoray knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from autoray import astype, do, get_dtype_name

from amanda.errors import AmandaError
from amanda.tools.kit import tensors_of
from amanda.tools.mapping import backend_of

_MODULES = {"torch": "_pytorch", "tensorflow": "_tensorflow", "numpy": "_numpy"}


def framework(tensor: Any) -> ModuleType:
    """The module of this package for a tensor's framework.

    Raises AmandaError for a framework that there is none for.
    """
    name = backend_of(tensor)
    if name not in _MODULES:
        raise AmandaError(f"dynamic pruning knows tensors of {', '.join(_MODULES)}; this is one of {name}")
    return import_module(f"amanda.tools.dynamic_prune.{_MODULES[name]}")


def subsample(x: Any, axes: Sequence[int]) -> Any:
    """Mean magnitude over the spatial axes: (N, C).  Source: Gao et al. 2019, with the L1 norm."""
    return do("mean", do("abs", x), axis=tuple(axes))


def saliency(x: Any, weight: Any, bias: Any) -> Any:
    """Return the predicted saliency of each output channel: relu(x weight + bias).

    x: (N, I).  weight: (I, O).  bias: (O,).  Returns (N, O).  Source: Gao et al. 2019.
    """
    predicted = x @ weight + bias
    return predicted * indicator(predicted > 0, predicted)


def winners(values: Any, count: int) -> Any:
    """0/1 mask of the `count` largest along the last axis; of equal ones the first.

    values: (..., C).  Source: k-winners-take-all, Gao et al. 2019.
    """
    mask: Any = framework(values).winners(values, count)
    return mask


def shares(gate: Any) -> Any:
    """A gate divided by its mean over what is not zero along the last axis."""
    total = do("sum", gate, axis=-1, keepdims=True)
    count = do("sum", indicator(gate > 0, gate), axis=-1, keepdims=True)
    return gate * count / (total + indicator(total == 0, total))


def density_count(density: float, size: int) -> int:
    """Return the number of `size` that are kept: `density` of them, rounded up, and one at least."""
    return min(size, max(1, math.ceil(density * size - 1e-9)))


def indicator(condition: Any, like: Any) -> Any:
    """0/1 in the type of `like`."""
    return astype(condition, get_dtype_name(like))


def wide(value: Any) -> Any:
    """Return a tensor in float32, or in its own type if that is wider."""
    return tensors_of(value).wide(value)


def binary_gumbel(logits: Any, noise: Any = None, temperature: float = 1.0) -> Any:
    """0/1 whether logits and noise are above zero, with the gradient of their sigmoid.

    noise: logistic, of the shape of logits; None for none.
    Source: Jang et al. 2017 for two classes; Verelst & Tuytelaars 2020.
    """
    shifted = logits if noise is None else logits + noise
    soft = framework(logits).sigmoid(shifted / temperature)
    hard = indicator(shifted > 0, logits)
    return soft + stop(hard - soft)


def stop(value: Any) -> Any:
    """Return a tensor through which no gradient goes."""
    return tensors_of(value).detach(value)


def per_unit(values: Any, size: int) -> Any:
    """Means over blocks of `size` along the last axis, of the last what is left.

    values: (..., T).  Returns (..., ceil(T / size)).
    """
    if size == 1:
        return values
    length = values.shape[-1]
    parts = [do("mean", values[..., start : start + size], axis=-1) for start in range(0, length, size)]
    return do("stack", parts, axis=-1)


def per_token(units: Any, size: int, length: int) -> Any:
    """Each unit's value at each of its `size` tokens, `length` in all: (..., T)."""
    if size == 1:
        return units
    spread = do("stack", [units] * size, axis=-1)
    return do("reshape", spread, (*units.shape[:-1], units.shape[-1] * size))[..., :length]


def renormalised(probabilities: Any, keys: Any) -> Any:
    """A softmax over the kept keys alone.

    probabilities: (..., S), rows of sum 1.  keys: 0/1, broadcast against it.
    """
    kept = probabilities * keys
    total = do("sum", kept, axis=-1, keepdims=True)
    return kept / (total + indicator(total == 0, total))


def budget_loss(used: Sequence[Any], total: Sequence[Any], target: float, progress: float = 1.0) -> Any:
    """Return the squared distance of the blocks' cost from the target share, and from bounds that relax.

    used, total: multiply-accumulates of each block.  progress: of the training, from 0, where each block
    is to cost the target, to 1, where a block is free.
    Source: Verelst & Tuytelaars 2020, with the annealing of their code.
    """
    strict = math.cos(min(max(progress, 0.0), 1.0) * math.pi / 2) ** 2
    lower, upper = strict * target, 1 - strict * (1 - target)
    shares = [one / all_ for one, all_ in zip(used, total, strict=True)]
    loss = (sum(used) / sum(total) - target) ** 2
    for share in shares:
        below = indicator(share < lower, share) * (lower - share)
        above = indicator(share > upper, share) * (share - upper)
        loss = loss + (below**2 + above**2) / len(shares)
    return loss

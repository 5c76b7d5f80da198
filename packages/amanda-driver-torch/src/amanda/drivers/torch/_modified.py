"""Torch's own error for a saved tensor that was written since, where a hook stands for torch's check."""

import re
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch

_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
_PLACE = " is at version "


class Making:
    """The call of an op in place, but for what its tensors hold: it decides which node is made."""

    __slots__ = ("_compute", "_forms")

    def __init__(self, compute: Callable[[Sequence[Any]], Any] | None, inputs: Sequence[Any]) -> None:
        self._compute = compute
        self._forms = _each(_Form.of, list(inputs))

    def name(self) -> str:
        """Return the name of the node, found by running the op on tensors without data."""
        try:
            assert self._compute is not None
            made: str = self._compute(_each(_Form.tensor, self._forms)).grad_fn.name()
        except Exception:
            return "torch::autograd::CopySlices"
        return made


class _Form(NamedTuple):
    """A tensor's shape, element type and need of a gradient, without its data."""

    shape: Any
    dtype: torch.dtype
    needs_gradient: bool

    @staticmethod
    def of(value: Any) -> Any:
        """Return the form of a tensor, anything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return _Form(value.shape, value.dtype, value.requires_grad)

    @staticmethod
    def tensor(value: Any) -> Any:
        """Return a tensor of a form, which an op made if it needs a gradient."""
        if not isinstance(value, _Form):
            return value
        plain = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return plain.requires_grad_().clone() if value.needs_gradient else plain


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_each(function, one) for one in value)
    return function(value)


class Maker:
    """The node that torch's error names for what an op in place on a view has saved of its result.

    The node of the view, as long as it is there; then the one of the op, which no tensor leads to.
    """

    __slots__ = ("_making", "_name", "_number", "_there")

    def __init__(self, output: torch.Tensor, making: Making) -> None:
        node = output.grad_fn
        assert node is not None
        self._making, self._name, self._number = making, node.name(), output.output_nr
        self._there = weakref.ref(cast(dict[str, Any], node.metadata).setdefault("amanda maker", _There()))

    def __str__(self) -> str:
        name = self._making.name() if self._there() is None else self._name
        return f", which is output {self._number} of {_shown(name)},"


class _There:
    """Goes with the node that holds it."""

    __slots__ = ("__weakref__",)


def modification(tensor: torch.Tensor, version: int, maker: Maker | None) -> RuntimeError:
    """Return the error that torch raises for a tensor that it has saved at an earlier version.

    maker: of a tensor that does not tell by itself.
    """
    with torch.enable_grad():
        text = _text(tensor, version)
        return RuntimeError(text if maker is None else text.replace(_PLACE, f"{maker}{_PLACE}", 1))


class _Keep(torch.autograd.Function):
    """Saves a tensor and computes nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*held)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _text(tensor: torch.Tensor, version: int) -> str:
    """Make torch save the tensor as of that version, so that it finds that the tensor was written since."""
    now = tensor._version
    try:
        _set_versions((tensor,), (version,))
        try:
            saving: Any = _Keep.apply(torch.zeros((), requires_grad=True), [tensor])  # type: ignore[no-untyped-call]
        finally:
            _set_versions((tensor,), (now,))
        _ = saving.grad_fn.saved_tensors
    except RuntimeError as error:
        return str(error)
    except TypeError:  # torch has no such function, or another one
        pass
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{_PLACE}{now}; expected version {version} instead."
    )


@cache
def _names_are_short() -> bool:
    """Return True if torch's error names a node by its op alone."""
    return "NegBackward0" not in _text(torch.zeros((), requires_grad=True).neg(), 1)


def _shown(name: str) -> str:
    return re.sub(r"Backward\d+$", "", name) if _names_are_short() else name

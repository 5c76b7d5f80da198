"""Tensors that the backward ops of an op save and that a routine may write after it."""

from collections.abc import Iterator
from typing import Any

import torch
from amanda.backend import Call
from amanda.eager import Saved
from amanda.interceptor import Suspension

from ._modified import Maker, Making, modification

_RAW = "_raw_saved_"
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class SavedTensors(Saved):
    """Saves as torch does; what shares memory with tensors that are written by a routine is copied before.

    Only where `Reached` could not find it, since torch does not see what is written behind its hooks.
    Where the user has hooks on saved tensors, these are given copies from the start.
    """

    def __init__(self, written: list[torch.Tensor]) -> None:
        self._written = written
        self._shared: list[_Saved] = []
        hooks: tuple[Any, Any] = _hooks() or (None, _Saved.unpack)
        self._outer_pack, self._unpack = hooks

    def seeing(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op and see what it saves. An interrupt comes after a call: the hooks are there by then."""
        self._making = Making(call.computation(), inputs)
        try:
            _push(self._pack, self._unpack)
            return call.invoke(inputs)
        finally:
            _pop()
            self._written = []  # the graph keeps the hooks, and these must not keep the graph

    def keep(self) -> None:
        """Copy what was saved of the tensors that are written now."""
        while self._shared:
            self._shared.pop().copy()

    def _pack(self, tensor: torch.Tensor) -> Any:
        with Suspension():
            shared = any(_shares(tensor, one) for one in self._written)
            if self._outer_pack is not None:
                return self._outer_pack(tensor.clone() if shared else tensor)
            if not shared:
                return _Saved(tensor)
            maker = None if tensor.grad_fn is None else Maker(tensor, self._making)
            saved = _Saved(tensor.detach(), maker)  # itself, an output would hold its own node
        self._shared.append(saved)
        return saved


class Reached(Saved):
    """Return what is found of it after the op, at its nodes.

    made: tensors that the op made or wrote. A node may save what it has written and has no gradient, such as
    the statistics of batch normalisation: those of the outputs are asked, too.
    """

    def __init__(self, written: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        self._written = written
        self._nodes = set(map(_node_of, made)) - {None} if written else set()

    def keep(self) -> None:
        """Copy what was saved of the tensors that are written now."""
        with Suspension(), torch.no_grad():
            for node in self._nodes:
                for saved, value in _saved_at(node):
                    if any(_shares(value, tensor) for tensor in self._written):
                        saved.register_hooks(torch.clone, _same)
        self._written, self._nodes = [], set()


def _node_of(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except RuntimeError:  # of a view from under no_grad whose base was written since, torch does not tell
        return None


def _saved_at(node: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield what a node has saved, and the tensor that each is, but for what was written since: an error."""
    for name in dir(node):
        if name.startswith(_RAW):
            own = name.replace(_RAW, "_saved_", 1)
            try:
                raw, values = (
                    getattr(node, name),
                    getattr(node, own if hasattr(node, own) else "saved_tensors"),
                )
            except RuntimeError:
                continue
            pairs = zip(raw, values, strict=True) if isinstance(raw, tuple) else ((raw, values),)
            yield from ((saved, value) for saved, value in pairs if isinstance(value, torch.Tensor))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Saved:
    """A saved tensor, the version at which it was saved, and what made it where the tensor does not tell."""

    __slots__ = ("_maker", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, maker: Maker | None = None) -> None:
        self._tensor = tensor
        self._maker = maker
        self._version = None if tensor.is_inference() else tensor._version

    def copy(self) -> None:
        if self._version is not None and self._tensor._version != self._version:
            return  # the op itself has written what it saved, which is an error in the backward pass
        with Suspension(), torch.no_grad():
            self._tensor = self._tensor.clone()
        self._version = 0

    def unpack(self) -> torch.Tensor:
        with Suspension():
            tensor, version = self._tensor, self._version
            if version is not None and tensor._version != version:
                raise modification(tensor, version, self._maker)
            return tensor


def end_traceback_in_torch(error: BaseException) -> None:
    """Leave an error the traceback that it has where torch itself finds what was written since."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_frame.f_code is _Saved.unpack.__code__:
            last.tb_next = None
        last = last.tb_next


def has_hooks() -> bool:
    """Return True if the user has hooks on tensors that are saved."""
    return _hooks() is not None


def _hooks() -> Any:
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(False)
    except AttributeError:  # before torch 2.8
        return None


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.layout == other.layout and bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]

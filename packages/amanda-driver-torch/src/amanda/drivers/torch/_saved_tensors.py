"""Tensors that an op saves for its backward ops, and that a routine may write after the op.

Torch raises in the backward pass if a saved tensor was written since. A routine's value may be copied into a
tensor that the op has saved; the saved tensor is then copied first, and later writes of the program still
raise torch's error.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from amanda.backend import Call
from amanda.eager import SavedTensors
from amanda.interceptor import Suspension

from ._levels import innermost, is_wrapped

_set_versions: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
_VERSION_PHRASE = " is at version "
_RAW = "_raw_saved_"
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks


class SavingHooks(SavedTensors):
    """Hooks on saved tensors around an op, which copy those that a routine's value will overwrite.

    Needed only where `SavedAtNodes` cannot reach the node: a tensor that hooks hold has no check by torch for
    later writes, so `SavedTensor` makes the check. Hooks of the user get copies from the start.
    """

    def __init__(self, tensors_to_write: list[torch.Tensor]) -> None:
        """Take the user's hooks that are in force now; tensors_to_write: that routines may write."""
        self._tensors_to_write = tensors_to_write
        self._saved_in_their_memory: list[SavedTensor] = []
        hooks: tuple[Any, Any] = _program_hooks() or (None, SavedTensor.unpack)
        self._pack_of_program, self._unpack = hooks

    def run_op(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op under the hooks, which then know the tensors that it saves; to be called once."""
        self._dataless_call = DatalessCall(call.as_function(), inputs)
        try:
            # An interrupt is raised after a call returns, so once `try` is left the hooks were pushed.
            _push(self._pack, self._unpack)
            return call.invoke(inputs)
        finally:
            _pop()
            self._tensors_to_write = []  # the graph keeps the hooks, and these must not keep the graph

    def copy_before_write(self) -> None:
        """Copy the saved tensors that share memory with tensors that are about to be written."""
        while self._saved_in_their_memory:
            self._saved_in_their_memory.pop().copy()

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd is to hold for a saved tensor.

        One in memory that a routine may write is copied: before that write, or now for a hook of the user's.
        """
        with Suspension():
            will_be_written = any(_share_memory(tensor, target) for target in self._tensors_to_write)
            if self._pack_of_program is not None:
                # The user's hook takes the tensor away at once: a later copy could not reach it.
                return self._pack_of_program(tensor.clone() if will_be_written else tensor)
            if not will_be_written:
                return SavedTensor(tensor)
            maker = None if tensor.grad_fn is None else MakerNode(tensor, self._dataless_call)
            # If not detached, an output of the op would hold the node that saves it.
            saved_tensor = SavedTensor(tensor.detach(), maker)
        self._saved_in_their_memory.append(saved_tensor)
        return saved_tensor


class SavedAtNodes(SavedTensors):
    """Saved tensors that are found after the op, at the nodes of its results.

    results: tensors that the op made or wrote.  A node may save a written tensor that has no gradient, such
    as the statistics of batch normalisation, so the nodes of the outputs are looked at too.
    further_nodes: number of nodes behind these that are looked at as well.
    """

    def __init__(
        self, tensors_to_write: list[torch.Tensor], results: list[torch.Tensor], further_nodes: int = 0
    ) -> None:
        """Find the nodes now, before the program drops a result; none if nothing is to be written."""
        self._tensors_to_write = tensors_to_write
        self._nodes = _nearest_nodes(results, further_nodes) if tensors_to_write else set()

    def copy_before_write(self) -> None:
        """Copy the saved tensors that share memory with tensors that are about to be written."""
        with Suspension(), torch.no_grad():  # copies are not ops of the program
            for node in self._nodes:
                for saved_variable, value in _saved_variables(node):
                    if any(_share_memory(value, tensor) for tensor in self._tensors_to_write):
                        # Torch packs the variable at once, by the first of the two hooks.
                        pack = _clone_outside_its_transform if is_wrapped(value) else torch.clone
                        saved_variable.register_hooks(pack, _identity)
        self._tensors_to_write, self._nodes = [], set()


def _nearest_nodes(results: list[torch.Tensor], further_nodes: int) -> set[Any]:
    """Return the nodes of some tensors, and the nearest behind them until there are `further_nodes` more."""
    nodes_of_results = dict.fromkeys(node for node in map(_node_of, results) if node is not None)
    nodes, waiting = set(nodes_of_results), list(nodes_of_results)
    limit = len(nodes) + further_nodes
    while waiting and len(nodes) < limit:
        successors = [node for node, _ in waiting.pop(0).next_functions if node is not None]
        waiting += [node for node in successors if node not in nodes]
        nodes.update(successors)
    return nodes


def _node_of(tensor: torch.Tensor) -> Any:
    """Return a tensor's node; None for a leaf, and for a view whose node torch cannot tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # of a view from under no_grad whose base was written since, torch does not tell
        return None


def _saved_variables(node: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield each variable that a node has saved, as torch's object for it, with its tensor.

    Variables are skipped whose tensor torch refuses to return, as after a write.
    """
    # Torch names the attributes of a node by the saved variable: `_raw_saved_self` beside `_saved_self`.
    for variable_name in [name for name in dir(node) if name.startswith(_RAW)]:
        value_name = variable_name.replace(_RAW, "_saved_", 1)
        try:  # `hasattr` raises, too, for a tensor that was written since
            if not hasattr(node, value_name):
                value_name = "saved_tensors"  # of an autograd.Function
            variables, values = getattr(node, variable_name), getattr(node, value_name)
        except RuntimeError:
            continue
        if not isinstance(variables, tuple):
            variables, values = (variables,), (values,)
        for saved_variable, value in zip(variables, values, strict=True):
            if isinstance(value, torch.Tensor):
                yield saved_variable, value


def _clone_outside_its_transform(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of a transform, which the transforms around it differentiate."""
    with torch.enable_grad():  # torch calls hooks under no_grad, which would hold at the levels below too
        return tensor.clone()


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class SavedTensor:
    """A saved tensor with its version when it was saved; maker: its node, if it was detached from that."""

    __slots__ = ("_maker", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, maker: MakerNode | None = None) -> None:
        self._tensor = tensor
        self._maker = maker
        self._version = None if tensor.is_inference() else tensor._version

    def copy(self) -> None:
        """Copy the tensor, so that a routine may write the original; do nothing if it was written since."""
        if self._version is not None and self._tensor._version != self._version:
            return  # by the op itself, which is an error in the backward pass
        with Suspension(), torch.no_grad():
            self._tensor = self._tensor.clone()
        self._version = 0  # the clone's

    def unpack(self) -> torch.Tensor:
        """Return the tensor; raise torch's error if it was written since it was saved."""
        with Suspension():
            tensor, version = self._tensor, self._version
            if version is not None and tensor._version != version:
                raise modification_error(tensor, version, self._maker)
            return tensor


def hide_unpack_frame(error: BaseException) -> None:
    """Cut the frame of `unpack` off an error's traceback, as if torch had found the write itself."""
    # It would tell users of a hook that they have not set.
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        if entry.tb_next.tb_frame.f_code is SavedTensor.unpack.__code__:
            entry.tb_next = None
        entry = entry.tb_next


def has_hooks() -> bool:
    """Return True inside `saved_tensors_hooks` of the user; False in any case before torch 2.8."""
    return _program_hooks() is not None


def _program_hooks() -> Any:
    """Return the user's innermost hooks, to pack and to unpack; None without, and before torch 2.8."""
    ignore_is_tracing = False
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)
    except AttributeError:  # before torch 2.8
        return None


def _share_memory(tensor: torch.Tensor, written: torch.Tensor) -> bool:
    """Return True if two tensors of one layout have a storage in common."""
    if is_wrapped(tensor) or is_wrapped(written):  # a wrapper's storage cannot be asked for
        tensor, written = innermost(tensor), innermost(written)
    return tensor.layout == written.layout and bool(torch._C._is_alias_of(tensor, written))  # type: ignore[attr-defined]


class DatalessCall:
    """The call of an op in place without the data of its tensors, which decides what node autograd makes."""

    __slots__ = ("_compute", "_inputs")

    def __init__(self, compute: Callable[[Sequence[Any]], Any] | None, inputs: Sequence[Any]) -> None:
        self._compute = compute
        self._inputs = map_nested(TensorSpec.of, list(inputs))

    def node_name(self) -> str:
        """Run the op on tensors without data; return the name of its node, or the likeliest if it fails."""
        try:
            assert self._compute is not None
            inputs = map_nested(TensorSpec.tensor, self._inputs)
            name: str = self._compute(inputs).grad_fn.name()
        except Exception:  # the op fails without data: torch's name for writes into views is the likeliest
            return "torch::autograd::CopySlices"
        return name


class TensorSpec(NamedTuple):
    """A tensor's shape, element type and need of a gradient, without its data."""

    shape: Any
    dtype: torch.dtype
    needs_gradient: bool

    @staticmethod
    def of(value: Any) -> Any:
        """Return the spec of a tensor; return any other value as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return TensorSpec(value.shape, value.dtype, value.requires_grad)

    @staticmethod
    def tensor(value: Any) -> Any:
        """Return a tensor without data of a spec; return any other value as it is."""
        if not isinstance(value, TensorSpec):
            return value
        # A leaf that needs a gradient may not be written in place, so the clone stands for an op's result.
        plain = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return plain.requires_grad_().clone() if value.needs_gradient else plain


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a function's result for a value; for a list or tuple, results of its items at any depth."""
    if type(value) in (list, tuple):
        return type(value)(map_nested(function, item) for item in value)
    return function(value)


class MakerNode:
    """The node that torch's error names for a result that an op in place on a view has saved.

    Torch names the node of the view as long as it lives, then the node of the op, which no tensor leads to.
    """

    __slots__ = ("_call", "_marker", "_name", "_number")

    def __init__(self, output: torch.Tensor, call: DatalessCall) -> None:
        """Note the name of an output's node; a marker at the node tells later if it lives."""
        node = output.grad_fn
        assert node is not None
        self._call, self._name, self._number = call, node.name(), output.output_nr
        self._marker = weakref.ref(
            cast(dict[str, Any], node.metadata).setdefault("amanda maker", _NodeMarker())
        )

    def __str__(self) -> str:
        name = self._call.node_name() if self._marker() is None else self._name
        return f", which is output {self._number} of {_name_in_error(name)},"


class _NodeMarker:
    """Object that a node holds, so that a weak reference to it tells if the node lives."""

    __slots__ = ("__weakref__",)


def modification_error(tensor: torch.Tensor, version: int, maker: MakerNode | None) -> RuntimeError:
    """Return the error that torch raises for a tensor that it has saved at an earlier version.

    maker: the node to name in the error, if the tensor was detached from it.
    """
    with torch.enable_grad():
        text = _error_text(tensor, version)
        if maker is not None:
            text = text.replace(_VERSION_PHRASE, f"{maker}{_VERSION_PHRASE}", 1)
        return RuntimeError(text)


class _SaveForBackward(torch.autograd.Function):
    """Function that saves tensors and computes nothing."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensors: list[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return root.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _error_text(tensor: torch.Tensor, version: int) -> str:
    """Return torch's error text for a tensor that was saved at an earlier version.

    Torch itself writes the text: it saves the tensor under that version number and then finds a later one.
    Where torch cannot set versions, the text is written here.
    """
    current_version = tensor._version
    try:
        _set_versions((tensor,), (version,))
        try:
            result: Any = _SaveForBackward.apply(torch.zeros((), requires_grad=True), [tensor])  # type: ignore[no-untyped-call]
        finally:
            _set_versions((tensor,), (current_version,))
        _ = result.grad_fn.saved_tensors  # raises
    except RuntimeError as error:
        return str(error)
    except TypeError:  # torch has no such function, or another one
        pass
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}]{_VERSION_PHRASE}{current_version}; "
        f"expected version {version} instead."
    )


@cache
def _names_are_short() -> bool:
    """Return True if torch's error names a node by its op alone."""
    return "NegBackward0" not in _error_text(torch.zeros((), requires_grad=True).neg(), 1)


def _name_in_error(name: str) -> str:
    """Return a node's name as this torch's errors have it: some lack the ending "Backward0"."""
    return re.sub(r"Backward\d+$", "", name) if _names_are_short() else name

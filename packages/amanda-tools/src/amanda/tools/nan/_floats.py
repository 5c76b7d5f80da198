"""Floating tensors of ops: what they hold, what inputs held before an op wrote them, and PyTorch's part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, reduce
from math import isfinite, isnan, prod
from operator import or_
from typing import Any, NamedTuple
from weakref import ref

import amanda
from amanda import interceptor
from amanda.tools.kit import Dtype, OpTensor, leaves, op_tensors, shape_text, tensors_of
from amanda.tools.libraries import do
from amanda.tools.results import made_of, number_of


class Summary(NamedTuple):
    """Shape, element type, numbers of NaN and infinite elements, and the range of the finite elements.

    least, most, mean: of the finite elements; None where there are none.
    batches: number of axes in front that are the batches of a vmap.  negative_inf: how many are -Inf.
    """

    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    batches: int = 0
    negative_inf: int = 0

    @classmethod
    def of(cls, tensor: Any, dtype: str, batches: int = 0) -> Summary:
        """Return the summary of a floating tensor, or of the magnitudes of a complex tensor.

        Args:
            tensor: Of any library; can be read.
            dtype: Name of its element type.
            batches: Number of axes in front that are the batches of a vmap.
        """
        tensors = tensors_of(tensor)
        shape, numbers = tensors.extents(tensor), tensors.stored_values(tensor, widen=True)
        if numbers is None:
            return cls(shape, dtype, 0, 0, batches=batches)
        is_finite = do("isfinite", numbers)
        nan, inf = (int(do("count_nonzero", do(test, numbers))) for test in ("isnan", "isinf"))
        negative_inf = int(do("count_nonzero", numbers <= float("-inf"))) if inf else 0
        finite_count = prod(map(int, numbers.shape)) - nan - inf
        if finite_count == 0:
            return cls(shape, dtype, nan, inf, batches=batches, negative_inf=negative_inf)
        # By `where`, not by a selection: the elements stay on their device, in an array of a known shape.
        infinities = do("full_like", numbers, float("inf"))
        least = float(do("min", do("where", is_finite, numbers, infinities)))
        most = float(do("max", do("where", is_finite, numbers, -infinities)))
        mean = float(do("sum", do("where", is_finite, numbers, do("zeros_like", numbers)))) / finite_count
        return cls(shape, dtype, nan, inf, least, most, mean, batches, negative_inf)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Summary:
        """Return the summary that `_asdict` described."""
        numbers = {name: number_of(fields[name]) for name in ("least", "most", "mean")}
        return made_of(cls, {**fields, **numbers, "shape": tuple(fields["shape"])})

    @property
    def counts_text(self) -> str:
        """How many elements are NaN and infinite: "5 NaN of 50"."""
        *counts, last = self._counts() or ["no NaN"]
        return f"{', '.join(counts)}{' and ' * bool(counts)}{last} of {prod(self.shape):,}"

    @property
    def values_text(self) -> str:
        """Numbers of NaN and infinite elements, and the range of the others: "5 Inf, -3.14 to 2.29"."""
        parts = self._counts()
        if self.least is not None:
            parts.append(f"{self.least:.3g} to {self.most:.3g}")
        return ", ".join(parts)

    def _counts(self) -> list[str]:
        numbers = {"NaN": self.nan, "Inf": self.inf - self.negative_inf, "-Inf": self.negative_inf}
        return [f"{count:,} {name}" for name, count in numbers.items() if count]

    def __str__(self) -> str:
        mean = "" if self.mean is None else f", mean {self.mean:.3g}"
        return f"{self.dtype}{shape_text(self.shape, self.batches)}: {self.values_text}{mean}"


NAN, INF = 1, 2
"""Flags of what a tensor holds."""


def nonfinite_flags(tensor: Any, looks_for_inf: bool) -> int:
    """Return NAN, INF, both or neither for the content of a tensor; INF only if `looks_for_inf`.

    One pass computes the sum, which is finite only if all elements are; further passes only if it is not.
    """
    tensors = tensors_of(tensor)
    total = tensors.checksum(tensor)
    if isfinite(total) or not (looks_for_inf or isnan(total)):
        return 0
    numbers = tensors.stored_values(tensor, widen=True)
    # A sum is NaN for Inf - Inf too, so the elements are asked.
    has_nan = isnan(total) and bool(do("any", do("isnan", numbers)))
    has_inf = looks_for_inf and bool(do("any", do("isinf", numbers)))
    return (NAN if has_nan else 0) | (INF if has_inf else 0)


def nonfinite(tensors: Sequence[Any]) -> list[int]:
    """Return the positions of tensors of one library that native code does not find finite; a hot path."""
    return interceptor.nonfinite(tensors_of(tensors[0]).buffers(tensors)) if tensors else []


# Version of an inference tensor, which does not count writes.
_UNKNOWN_VERSION = -1

floating = partial(op_tensors, kinds=("float", "bfloat", "half", "complex"))
"""Yields the floating and complex tensors among values, as `op_tensors` does."""


class Floats(NamedTuple):
    """Floating tensors among the inputs or outputs of an execution, by flat index.

    flags_by_index: NAN, INF or both, of the tensors alone that hold any.
    """

    tensors: Mapping[int, OpTensor] = {}
    flags_by_index: Mapping[int, int] = {}

    @classmethod
    def of(
        cls, values: Sequence[Any], dtype: Dtype, looks_for_inf: bool,
        known_flags: Mapping[int, int] = {}, batches: Sequence[int] = (),
    ) -> Floats:  # fmt: skip
        """Return the floating tensors among values, and which hold NaN or, if `looks_for_inf`, Inf.

        By flat index: known_flags, of tensors not to be looked at, and batches, numbers of batches of a vmap.
        """
        tensors, flags_by_index = dict[int, OpTensor](), dict[int, int]()
        for op_tensor in floating(values, dtype, batches=batches):
            index = op_tensor.flat_index
            tensors[index] = op_tensor
            flags = known_flags.get(index)
            if flags is None:
                flags = nonfinite_flags(op_tensor.tensor, looks_for_inf)
            if flags:
                flags_by_index[index] = flags
        return cls(tensors, flags_by_index)

    @property
    def flags(self) -> int:
        """NAN, INF, both or neither, of all tensors together."""
        return reduce(or_, self.flags_by_index.values(), 0)

    def summaries(self, indices: Iterable[int]) -> dict[int, Summary]:
        """Summarise some of the tensors."""
        op_tensors = {i: self.tensors[i] for i in indices}
        return {i: Summary.of(read.tensor, read.dtype, read.batches) for i, read in op_tensors.items()}


class RecordedInputs(NamedTuple):
    """Inputs of one execution; weak references for tensors of PyTorch.

    flags_by_index: flags by flat index, 0 for neither, of the tensors that were looked at before the op.
    alive: strong references to the inputs in graphs, whose caller may free them before the op ends.
    batches: numbers of batches of a vmap, by flat index.
    """

    values: Sequence[Any]
    flags_by_index: Mapping[int, int]
    alive: Sequence[Any]
    batches: Sequence[int] = ()


class InputRecorder:
    """Record the inputs of one op, and examine them only if an output is not finite.

    Inputs that the op writes must be examined before it runs.  The first execution shows which these are, so
    all inputs are examined before the first execution.
    dtype: `dtype` of StandardMapping.  looks_for_inf: True to look for Inf too.  is_in_place: the op writes
    its first input.  is_eager: the caller of the op holds the inputs until the op ends.
    """

    def __init__(self, dtype: Dtype, looks_for_inf: bool, is_in_place: bool, is_eager: bool) -> None:
        self._dtype, self._looks_for_inf = dtype, looks_for_inf
        self.is_in_place, self._is_eager = is_in_place, is_eager
        self._written_indices: frozenset[int] | None = None  # flat ones; None until the first execution ends

    def record(
        self, values: Sequence[Any], batches: Sequence[int] = (), overwritten: bytearray | None = None
    ) -> RecordedInputs:
        """Return the inputs of an execution that begins, with flags of those that are looked at now.

        overwritten: memory of the first input from before the op, if the op has run already.
        """
        references = list(map(_reference, values))
        if overwritten is not None:
            references[0] = _tensor_before_write(values[0], overwritten)
            # Others in the same memory were overwritten too; nobody can tell any more.
            storage = values[0].untyped_storage()
            indices = [i for i, leaf in enumerate(leaves(values)) if i and _has_storage(leaf, storage)]
            return RecordedInputs(references, dict.fromkeys(indices, 0), (), batches)
        # From the second execution on, only inputs that the op writes are looked at beforehand.
        written_indices = self._written_indices
        if written_indices is None and not any(isinstance(x, _TensorReference) for x in leaves(references)):
            written_indices = self._written_indices = frozenset()  # tensors that no op writes
        flags_by_index: dict[int, int] = {}
        if written_indices is None or written_indices:
            for leaf in floating(values, self._dtype):
                if written_indices is None or leaf.flat_index in written_indices:
                    flags_by_index[leaf.flat_index] = nonfinite_flags(leaf.tensor, self._looks_for_inf)
        if self.is_in_place and references:
            # The op writes over this tensor, and the finding shows what it was before.
            references[0] = _map_leaves(self._copy_float, values[0])
        # In eager mode the caller holds its inputs; a second reference would keep memory longer.
        return RecordedInputs(references, flags_by_index, () if self._is_eager else values, batches)

    def _copy_float(self, value: Any) -> Any:
        """Return a copy of a floating tensor, which the op does not overwrite; any other value as it is."""
        return tensors_of(value).duplicate(value) if any(floating([value], self._dtype)) else value

    def note_writes(self, inputs: RecordedInputs) -> None:
        """Note which inputs the op writes, after its first execution."""
        if self._written_indices is None:
            self._written_indices = frozenset(_indices_of_written(inputs.values))

    @property
    def may_record_after(self) -> bool:
        """True if inputs can be recorded after the op, with a copy of the first where `is_in_place`."""
        return self._written_indices in (frozenset(), frozenset({0} if self.is_in_place else ()))

    def floats(self, inputs: RecordedInputs, unread_at: Callable[[Sequence[Any]], Collection[int]]) -> Floats:
        """Return the tensors among inputs as before the op, without those at `unread_at(values)`."""
        # A tensor that was written without having been looked at counts as finite: nobody can tell any more.
        known_flags = {**dict.fromkeys(_indices_of_written(inputs.values), 0), **inputs.flags_by_index}
        # None of a tensor that is gone.
        values = _map_leaves(lambda x: x() if isinstance(x, _TensorReference) else x, inputs.values)
        for position in unread_at(values):
            values[position] = None
        return Floats.of(values, self._dtype, self._looks_for_inf, known_flags, inputs.batches)


class _TensorReference(ref):  # type: ignore[type-arg]
    """A weak reference of a tensor; version: its count of writes when the op began."""

    __slots__ = ("version",)
    version: int

    @property
    def may_be_written(self) -> bool:
        # Also if the version is not known; a tensor that is gone counts as not written.
        return self.version == _UNKNOWN_VERSION or _write_count(self()) not in (None, self.version)


def _tensor_before_write(tensor: Any, memory: bytearray) -> Any:
    """Return a tensor as it was before an op wrote it, of its memory then; flat if it had another form."""
    import torch

    values = torch.frombuffer(memory, dtype=tensor.dtype) if memory else torch.empty(0, dtype=tensor.dtype)
    try:
        return values.as_strided(tensor.shape, tensor.stride())
    except RuntimeError:  # the op gave the tensor more elements
        return values


def _has_storage(value: Any, storage: Any) -> bool:
    try:
        return value.untyped_storage() is storage
    except (AttributeError, NotImplementedError, RuntimeError):  # no tensor, or one without a storage
        return False


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_map_leaves(function, item) for item in value]
    return function(value)


_PLAIN_TYPES = frozenset({int, float, bool, type(None), slice})


def _reference(value: Any) -> Any:
    """Return a weak reference of a tensor that counts writes, also in lists; any other value as it is."""
    if type(value) in _PLAIN_TYPES:
        return value
    version = _write_count(value)
    if version is None:
        return list(map(_reference, value)) if isinstance(value, (list, tuple)) else value
    reference = _TensorReference(value)
    reference.version = version  # it tells later whether the tensor still holds what the op read
    return reference


def _write_count(value: Any) -> int | None:
    """Return PyTorch's count of writes; `_UNKNOWN_VERSION` of a tensor without; None of others."""
    if not hasattr(type(value), "_version"):  # TensorFlow takes its time to say that a tensor has none
        return None
    try:
        return getattr(value, "_version", None)
    except RuntimeError:
        return _UNKNOWN_VERSION


def _indices_of_written(references: Sequence[Any]) -> list[int]:
    """Return the flat indices of tensors that may have been written since they were recorded."""
    flat = enumerate(leaves(references))
    return [i for i, leaf in flat if isinstance(leaf, _TensorReference) and leaf.may_be_written]


_SCALER_MODULE = "torch.amp.grad_scaler"
_SCALER_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def write_torch_facts(context: amanda.OpContext) -> None:
    """Write the functions and the role by which NanTool checks an op of PyTorch.

    saved_tensors: of a backward op, returns the tensors that the node under way has saved.
    loss_scale: of a forward op: "scale" where a GradScaler scales a loss, "check" where it checks gradients.
    unread_positions: of a forward op, returns the positions of inputs that it writes and does not read.
    """
    if context.is_backward():
        context["saved_tensors"] = saved_tensors_of_node
    if context.is_forward():
        scales_loss = context["type"] == "mul" and _is_called_by_scaler()
        is_check = context.get_op_type() == _SCALER_CHECK
        context["loss_scale"] = "check" if is_check else "scale" if scales_loss else None
        context["unread_positions"] = partial(_running_statistics_positions, context.get_input_names())


def _running_statistics_positions(names: Sequence[str], values: Sequence[Any]) -> tuple[int, ...]:
    """Return where the running statistics are that a normalization updates from its batch."""
    is_updated = any(
        name in ("training", "train", "use_input_stats") and value is True
        for name, value in zip(names, values, strict=False)
    )
    return tuple(i for i, name in enumerate(names) if is_updated and name in ("running_mean", "running_var"))


def saved_tensors_of_node() -> list[Any] | None:
    """Return what autograd's node under way has saved; None where hooks give a saved tensor once only."""
    import torch

    node: Any = torch._C._current_autograd_node()
    # PyTorch has no other list of what a native node saved.
    names = [name for name in dir(node) if name.startswith("_saved_")]
    # Nodes of autograd.Function save by one attribute, native ones by one for each tensor.
    if hasattr(type(node), "saved_tensors"):
        names.append("saved_tensors")
    try:
        with amanda.disabled():
            return [getattr(node, name) for name in names]
    except Exception:  # a checkpoint's, which recomputes a tensor for one reader
        return None


def _is_called_by_scaler() -> bool:
    """Return True if a GradScaler calls the op under way."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _SCALER_MODULE:
            return True
        frame = frame.f_back
    return False

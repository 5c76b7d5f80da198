"""The ways in which torch's operator database calls an op, and the sample calls of each."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy
import torch
from opinfo import op_db
from suite_device import DEVICE, seed_device
from torch.utils._pytree import tree_leaves, tree_map

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
SPELLINGS = ("method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant")


class Sample(NamedTuple):
    """One call of the database's."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def database() -> dict[str, Any]:
    """Every OpInfo of torch that runs on the device, by its name and that of its test variant."""
    ops = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db() if dtypes(op)}
    assert len(ops) == sum(bool(dtypes(op)) for op in op_db())
    return ops


def dtypes(op: Any) -> list[torch.dtype]:
    """A floating and a complex type that the op supports on the device; else one that it supports."""
    supported = op.supported_dtypes(DEVICE)
    first_of_kinds = [
        next((dtype for dtype in kind if dtype in supported), None) for kind in (FLOATS, COMPLEX)
    ]
    sampled = [dtype for dtype in first_of_kinds if dtype is not None]
    return sampled or sorted(supported, key=str)[:1]


class Samples:
    """Sample calls of an op; equal ones, with tensors of their own, at each iteration.

    dtype: the type of the tensors; None for the calls that the op refuses.
    most: how many there are at most, spread over all.
    """

    def __init__(self, op: Any, dtype: torch.dtype | None, most: int) -> None:
        self._op, self.dtype, self._most = op, dtype, most
        self._originals: list[Sample] | None = None
        fresh = self._fresh()
        if all(map(_is_whole, tree_leaves(fresh))):
            with contextlib.suppress(Exception):  # what cannot be copied is made anew
                self._originals = copy.deepcopy(fresh)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._fresh() if self._originals is None else copy.deepcopy(self._originals))

    def _fresh(self) -> list[Sample]:
        seed_device(0)
        random.seed(0)
        numpy.random.seed(0)
        with filled():
            every = list(self._errors() if self.dtype is None else self._samples(self.dtype))
        return [
            Sample((sample.input, *sample.args), sample.kwargs)
            for sample in every[:: -(-len(every) // self._most) or 1]
        ]

    def _samples(self, dtype: torch.dtype) -> Iterator[Any]:
        trains = self._op.supports_autograd and dtype in self._op.supported_backward_dtypes(DEVICE)
        yield from self._op.sample_inputs(DEVICE, dtype, requires_grad=trains)

    def _errors(self) -> Iterator[Any]:
        if self._op.error_inputs_func is not None:
            yield from (error.sample_input for error in self._op.error_inputs(DEVICE))


def variants(op: Any) -> Iterator["Variant"]:
    """Every way in which the database calls an op: function, method, operator, in place, `out=`, aliases."""
    for owner in (op, *op.aliases):
        prefix = "" if owner is op else f"{owner.name}, "
        yield Variant(f"{prefix}function", owner.op)
        for spelling in SPELLINGS:
            call = getattr(owner, spelling, None)
            if call is not None:
                yield Variant(f"{prefix}{spelling}", call, in_place="inplace" in spelling)
    if op.supports_out:
        for form in ("filled", "empty", "strided"):
            yield Variant(f"out {form}", op.op, out=form)


@dataclass(frozen=True)
class Variant:
    """One way of calling an op.

    in_place: whether the first argument is written; then it is no leaf that needs a gradient.
    out: whether `out=` is given tensors that hold something, that are empty, or that have gaps.
    """

    name: str
    call: Callable[..., Any]
    in_place: bool = False
    out: Literal["filled", "empty", "strided"] | None = None

    def prepared(self, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of a call; None if there is no result that `out=` could be made like."""
        args, kwargs = sample
        if self.out:
            args, kwargs = tree_map(_untrained, (args, kwargs))
            try:
                return args, {**kwargs, "out": tree_map(self._written, self.call(*args, **kwargs))}
            except Exception:
                return None
        if self.in_place and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
            return (args[0].clone(), *args[1:]), kwargs
        return args, kwargs

    def _written(self, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        if self.out == "empty":
            return result.new_empty(0)
        filled = torch.full_like(result, 3, memory_format=torch.contiguous_format)
        if self.out == "strided" and filled.dim() and filled.layout == torch.strided:
            return torch.stack([filled, filled], -1)[..., 0]
        return filled


@contextlib.contextmanager
def filled() -> Iterator[None]:
    """Context in which memory that is handed out as it was is filled."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _untrained(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_whole(value: Any) -> bool:
    """Whether a copy of it is like it: it is no tensor, or no view or result."""
    return not isinstance(value, torch.Tensor) or (value.is_leaf and not value._is_view())

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
from torch.utils._pytree import tree_map

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex128, torch.complex64, torch.complex32)
SPELLINGS = ("method_variant", "inplace_variant", "operator_variant", "inplace_operator_variant")


class Sample(NamedTuple):
    """One call of the database's."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def database() -> dict[str, Any]:
    """Every OpInfo of torch that runs on a CPU, by its name and that of its test variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    found = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db if dtypes(op)}
    assert len(found) == sum(bool(dtypes(op)) for op in op_db)
    return found


def dtypes(op: Any) -> list[torch.dtype]:
    """A floating and a complex type that the op supports on the CPU; else one that it supports."""
    supported = op.supported_dtypes("cpu")
    found = [next((one for one in kind if one in supported), None) for kind in (FLOATS, COMPLEX)]
    wanted = [one for one in found if one is not None]
    return wanted or sorted(supported, key=str)[:1]


class Samples:
    """Sample calls of an op, spread over all that it has; equal ones, with new tensors, at each iteration."""

    def __init__(self, op: Any, dtype: torch.dtype, most: int) -> None:
        self._op, self._dtype, self._most = op, dtype, most
        self._few: list[Sample] | None = None
        every = self._every()
        if len(every) > 2 * most:  # to make them all again takes longer than to call some
            with contextlib.suppress(Exception):  # of what is no leaf, there is no copy
                self._few = copy.deepcopy(self._spread(every))

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._spread(self._every()) if self._few is None else copy.deepcopy(self._few))

    def _spread(self, every: list[Sample]) -> list[Sample]:
        return every[:: -(-len(every) // self._most) or 1]

    def _every(self) -> list[Sample]:
        _seed()
        op = self._op
        trains = op.supports_autograd and self._dtype in op.supported_backward_dtypes("cpu")
        with filled():
            every = op.sample_inputs("cpu", self._dtype, requires_grad=trains)
            return [Sample((one.input, *one.args), one.kwargs) for one in every]


def error_samples(op: Any) -> list[Sample]:
    """Calls that the op refuses."""
    _seed()
    if op.error_inputs_func is None:
        return []
    with filled():
        wrong = [one.sample_input for one in op.error_inputs("cpu")]
    return [Sample((one.input, *one.args), one.kwargs) for one in wrong]


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
        """The arguments of a call; None if the op has no result that `out=` could be made like."""
        args, kwargs = sample
        if self.out:
            args, kwargs = tree_map(_untrained, (args, kwargs))
            try:
                result = self.call(*args, **kwargs)
            except Exception:
                return None
            return args, {**kwargs, "out": tree_map(self._written, result)}
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


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)

"""Calls of torch's ops: the inputs in schema order, and how to make the call with others."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from amanda.backend import Call
from amanda.interceptor import Site

from ._schema import Binding
from ._storages import in_memory_like, is_strided, laid_out_like
from ._views import Written


class TorchCall(Call):
    """One call, bound to the op's schema.

    head: what comes before the op's own arguments (an OpOverload, a Function subclass).
    """

    __slots__ = ("_binding", "_given", "_head", "_make", "_site")

    def __init__(
        self,
        site: Site,
        op: Any,
        head: tuple[Any, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        binding: Binding,
        in_place: bool,
        make: Callable[[Site, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:
        """make: makes the call as the program would."""
        self._site = site
        self._make = make
        self._head = head
        self._given = args, kwargs
        self._binding = binding
        self.op = op
        self.inputs = binding.inputs(args, kwargs)
        self.names: Sequence[str] = binding.names
        self.mutable = binding.written(self.inputs) if binding.mutable or binding._trained else ()
        self.targets = _targets(binding, self.inputs, in_place) if binding.mutable else ()

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op; with the arguments as the user gave them where nothing changed."""
        if inputs is self.inputs:
            args, kwargs = self._given
        else:
            args, kwargs = self._binding.call_arguments(inputs)
        return self._make(self._site, (*self._head, *args), kwargs)

    def fitted(self, inputs: list[Any]) -> list[Any]:
        """Lay a tensor out like the original where the op may make a view of it, or read all its memory.

        Of another layout `reshape` would make a view where it copies, or the other way round.
        """
        own, given = self.inputs[0], inputs[0]
        if given is own or not _depends_on_layout(self._site.key):
            return inputs
        if self._site.key == "as_strided":
            return [in_memory_like(own, given), *inputs[1:]]
        if not (is_strided(own) and is_strided(given)) or own.stride() == given.stride():
            return inputs
        return [laid_out_like(own, given), *inputs[1:]] if own.shape == given.shape else inputs

    def computation(self) -> Callable[[Sequence[Any]], Any]:
        """Runs the op on inputs like this call's."""
        op, head, binding = self._site.op, self._head, self._binding

        def compute(inputs: Sequence[Any]) -> Any:
            args, kwargs = binding.call_arguments(inputs)
            return op(*head, *args, **kwargs)

        return compute

    def written(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Of an autograd.Function: those that it marked dirty, which alone it gives back themselves."""
        if self._site.key != "Function.apply":
            return super().written(inputs, outputs) if self.targets else []
        return [one for one in inputs if isinstance(one, torch.Tensor) and any(one is out for out in outputs)]

    def unreturned(self, outputs: Any) -> Sequence[int]:
        """Return all that the schema says is written if nothing was returned, else what is apart."""
        binding = self._binding
        if not binding.mutable:
            return ()
        written = binding.mutable if outputs is None else binding.apart
        return [i for i in written if self.inputs[i] is not None]

    def may_write(self) -> bool:
        """Return whether the op may write: it says so, or is called through an object, as a Function is."""
        return bool(self.mutable or self._head)

    def may_write_unseen(self) -> bool:
        """Return True for an autograd.Function and for TorchScript, whose code may write any tensor."""
        return bool(self._head) and self._site.key in _OPAQUE

    def takes_equals(self) -> bool:
        """Return True unless the op may write, or its result depends on how a tensor lies in memory."""
        return not self.may_write() and not _depends_on_layout(self._site.key)

    def writes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the tensors that the op has written, of `x[index] = y` the elements at the index."""
        if self._site.key != "setitem":
            return super().writes(inputs, outputs)
        return [Written.at(inputs[0], inputs[1])]

    def formed(self, result: Any) -> Any:
        """A plain tuple as the named tuple of the op's results, where it has one of that length."""
        name = f"{self._site.key}_out" if self.targets else self._site.key
        named = getattr(torch.return_types, name, None)
        if type(result) not in (tuple, list) or named is None or named.n_sequence_fields != len(result):
            return result
        return named(result)

    def sources(self) -> tuple[int | tuple[int, int], ...] | None:
        """Return which argument each input is; None for a call through an object, such as a custom op's."""
        return None if self._head else self._binding.sources(len(self._given[0]), tuple(self._given[1]))

    def attributes(self) -> dict[str, Any]:
        """The non-tensor arguments by name, defaults included."""
        return self._binding.attributes(self.inputs)

    def op_type(self) -> str:
        """The ATen operator, without its overload; "library::name" of a custom op, a Function's name."""
        if not self._head:
            return self._site.key
        name = getattr(self.op, "_qualified_op_name", None) or getattr(self.op, "__name__", str(self.op))
        return str(name).removeprefix("aten::")


_OPAQUE = frozenset({"Function.apply", "ScriptFunction", "ScriptMethod"})
"""Keys of sites that run code of the program within one op."""


@cache
def _depends_on_layout(key: str) -> bool:
    """Return True for an op that may return a view of its first input."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{key}")
    aliases = [result.alias_info for schema in schemas for result in schema.returns]
    return key == "getitem" or any(alias and not alias.is_write for alias in aliases)


class CollectiveCall(TorchCall):
    """One call of a process group's method: a list of lists of tensors is one list, as every input is."""

    __slots__ = ("_lengths",)

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self._lengths = {
            i: [len(one) for one in value]
            for i, value in enumerate(self.inputs)
            if isinstance(value, (list, tuple)) and value and all(isinstance(one, list) for one in value)
        }
        for i in self._lengths:
            self.inputs[i] = [one for part in self.inputs[i] for one in part]

    def invoke(self, inputs: list[Any]) -> Any:
        """Make the call, with lists as they were."""
        return super().invoke(inputs if inputs is self.inputs else self._nested(inputs))

    def takes_equals(self) -> bool:
        """Return False: the lists of the inputs are not those of the arguments."""
        return False

    def computation(self) -> Callable[[Sequence[Any]], Any]:
        """The call of inputs like this call's."""
        compute, nested = super().computation(), self._nested
        return lambda inputs: compute(nested(inputs))

    def _nested(self, inputs: Sequence[Any]) -> list[Any]:
        return [
            _divided(value, self._lengths[i]) if i in self._lengths else value
            for i, value in enumerate(inputs)
        ]


def _divided(flat: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    rest = iter(flat)
    return [[next(rest) for _ in range(length)] for length in lengths]


def _targets(binding: Binding, inputs: Sequence[Any], in_place: bool) -> tuple[int, ...]:
    if in_place:
        return (0,)
    return tuple(i for i in binding.mutable if binding.names[i] != "noise" and inputs[i] is not None)

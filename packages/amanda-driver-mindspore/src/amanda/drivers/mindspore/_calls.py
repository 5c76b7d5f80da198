"""Calls of MindSpore's operators: the inputs in schema order, and how to make the call with others."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from amanda.backend import Call, Operation
from amanda.interceptor import Site
from mindspore import Tensor

from . import _signatures
from ._signatures import Signature
from ._targets import writes
from ._views import Written
from ._writes import HAS_UNWRITTEN, Writes, unwritten, writes_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MindSporeCall(Call):
    """One call.

    given: the arguments as they came.  signature: names and defaults of the operator's own.
    """

    __slots__ = ("_given", "_signature", "_site")

    op: Operation

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site = site
        self._given = args, kwargs
        self.op = site.op
        self.inputs, self._signature = self._bound(args, kwargs)
        self.names: Sequence[str] = self._signature.names
        self.mutable, self.targets = self._writes()

    @abstractmethod
    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        """The operator's inputs, trailing defaults left out, and its signature."""

    @abstractmethod
    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        """Arguments of a call with these inputs."""

    def _writes(self) -> Writes:
        return _WRITES_FIRST if writes(self._site.key) else _WRITES_NOTHING

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the operator; with the arguments as the user gave them where nothing changed."""
        return self._site.invoke(*(self._given if inputs is self.inputs else self._arguments(inputs)))

    def computation(self) -> Callable[[Sequence[Any]], Any]:
        """Runs the operator on inputs like this call's."""
        call = self._emptied()
        return lambda inputs: call._site.target(*(found := call._arguments(inputs))[0], **found[1])

    def _emptied(self) -> "MindSporeCall":
        """The same call without the tensors that it was given."""
        call = type(self).__new__(type(self))
        call._site, call._signature, call.inputs = self._site, self._signature, [None] * len(self.inputs)
        args, kwargs = self._given
        call._given = _without_tensors(args), {name: _without_tensors(one) for name, one in kwargs.items()}
        return call

    def written(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return what the operator gives back of what it wrote: another object for the same tensor."""
        return [*(inputs[i] for i in self.targets), *outputs] if self.targets else []

    def writes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the tensors that the operator has written, of `x[index] = y` the elements at the index."""
        if self._site.key == "setitem":
            return [Written.at(inputs[0], inputs[1])]
        return super().writes(inputs, outputs)

    def with_written(
        self, outputs: Any, inputs: Sequence[Any], values: list[Any], rebuild: Callable[[list[Any]], Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Show what was written for the outputs that stand for it, and None for memory that nobody wrote.

        On the CPU many kernels of optimizers leave outputs unwritten. The program gets them as they are.
        """
        shown = self._shown(inputs, values)
        if not shown:
            return values, rebuild
        seen = [shown.get(i, value) for i, value in enumerate(values)]

        def restored(changed: list[Any]) -> Any:
            pairs = zip(changed, seen, values, strict=True)
            return rebuild([value if new is old else new for new, old, value in pairs])

        return seen, restored

    def _shown(self, inputs: Sequence[Any], values: Sequence[Any]) -> dict[int, Any]:
        """Return what tools see in the place of outputs, by position."""
        return {}

    def attributes(self) -> dict[str, Any]:
        """The arguments that are no tensors by name, defaults included."""
        named = dict(zip(self.names, self._signature.defaults, strict=False))
        named.update(zip(self.names, self.inputs, strict=False))
        return {name: one for name, one in named.items() if one is not _NO_DEFAULT and not _has_tensor(one)}

    def op_type(self) -> str:
        """The operator's name, whichever way it was called."""
        return self._site.key


_NO_DEFAULT = _signatures._NO_DEFAULT
_WRITES_NOTHING, _WRITES_FIRST = Writes(), Writes((0,), (0,))


class _OfPrimitive(MindSporeCall):
    """A call of an object of a primitive, whose class declares what it writes."""

    __slots__ = ()

    @property
    @abstractmethod
    def _primitive(self) -> Any:
        """The object."""

    def _writes(self) -> Writes:
        found = writes_of(type(self._primitive), self.attributes)
        return found if len(self.inputs) > max(found.inputs, default=-1) else _WRITES_NOTHING

    def _shown(self, inputs: Sequence[Any], values: Sequence[Any]) -> dict[int, Any]:
        if self.targets:
            return {i: inputs[at] for i, at in zip(range(len(values)), self.targets, strict=False)}
        if self._site.key in HAS_UNWRITTEN:
            return dict.fromkeys(unwritten(self._site.key, self.attributes()))
        return {}


class KernelCall(_OfPrimitive):
    """`pyboost_relu(primitive, [x])`."""

    __slots__ = ("_rest",)

    @property
    def _primitive(self) -> Any:
        return self._given[0][0]

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        primitive, values = args
        kind: Any = type(primitive)
        signature = _signatures.of_kernel(kind, len(values))
        count = len(values) - signature.trailing(list(values))
        self._rest = tuple(values[count:])
        return list(values[:count]), signature

    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (self._given[0][0], [*inputs, *self._rest]), {}

    def _emptied(self) -> MindSporeCall:
        call = super()._emptied()
        assert isinstance(call, KernelCall)
        call._rest = self._rest
        return call


class OverloadCall(MindSporeCall):
    """`_add_instance(x, y, alpha=2)`; the overload is picked natively."""

    __slots__ = ("_count",)

    method = False

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        values = list(args[0 if self.method else 1 :])
        name = getattr(self._site.target, "__name__", self._site.key)
        known = _signatures.of_overloads(self._site.key, name, self.method)
        signature = next((one for one in known if one.accepts(len(values), kwargs)), known[0])
        if signature.gathered is not None and len(values) > signature.gathered:
            rest = values[signature.gathered :]
            whole = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else tuple(rest)
            values = [*values[: signature.gathered], whole]
        self._count = len(values)
        unknown = [name for name in kwargs if name not in signature.names]
        names = (*signature.names, *unknown)
        defaults = (*signature.defaults, *[_NO_DEFAULT] * len(unknown))
        while len(values) < len(names) and any(name in kwargs for name in names[len(values) :]):
            values.append(kwargs.get(names[len(values)], defaults[len(values)]))
        return values, Signature(names, defaults, signature.positional, signature.gathered)

    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        head = () if self.method else self._given[0][:1]
        named = zip(self.names, inputs, strict=False)
        kwargs = {
            name: one for i, (name, one) in enumerate(named) if i >= self._count and one is not _NO_DEFAULT
        }
        return (*head, *inputs[: self._count]), kwargs

    def _emptied(self) -> MindSporeCall:
        call = super()._emptied()
        assert isinstance(call, OverloadCall)
        call.names, call._count = self.names, self._count
        return call


class MethodCall(OverloadCall):
    """`x.add(y)`."""

    __slots__ = ()

    method = True


class AssignCall(MindSporeCall):
    """`x.assign_value(y)`, after which x has the memory of y.

    It reads nothing of x, which has no memory yet where a Parameter is made: x is its output alone.
    """

    __slots__ = ()

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        values = [*args[1:], *kwargs.values()]
        return values, Signature(("value",), (_NO_DEFAULT,), 1)

    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (self._given[0][0], *inputs), {}

    def written(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return x."""
        return list(outputs)


class PrimitiveCall(_OfPrimitive):
    """`executor.run_op_async(primitive, name, (x, y))`."""

    __slots__ = ()

    @property
    def _primitive(self) -> Any:
        return self._given[0][1]

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        _, primitive, _, values = args
        return list(values), _signatures.of_primitive(primitive, len(values))

    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (*self._given[0][:3], tuple(inputs)), {}

    def attributes(self) -> dict[str, Any]:
        """The same, and what the primitive was made with."""
        made_with = getattr(self._given[0][1], "attrs", None) or {}
        kept = {name: one for name, one in made_with.items() if name not in ("input_names", "output_names")}
        return {**kept, **super().attributes()}


class ApplyCall(MindSporeCall):
    """`Function.apply(*values)` of a function with a backward of its own."""

    __slots__ = ()

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Signature]:
        values = [*args[1:], *kwargs.values()]
        names = _signatures._parameters(args[0].forward)
        signature = _signatures._filled(names, len(values) - len(kwargs))
        return values, Signature((*signature.names, *kwargs), signature.defaults, len(values))

    def _arguments(self, inputs: Sequence[Any]) -> Arguments:
        args, kwargs = self._given
        count = len(inputs) - len(kwargs)
        return (args[0], *inputs[:count]), dict(zip(kwargs, inputs[count:], strict=True))

    def op_type(self) -> str:
        """The function's name."""
        return str(self._given[0][0].__name__)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def _without_tensors(values: Any) -> Any:
    if type(values) in (list, tuple):
        return type(values)([_without_tensors(one) for one in values])
    return None if isinstance(values, Tensor) else values

"""Bindings: how the arguments of a call of torch become the inputs of its operator, and back.

    bound = binding(torch.conv2d, (x, weight), {"padding": 1})
    bound.names                                   # input, weight, bias, stride, padding
    inputs = bound.inputs((x, weight), {"padding": 1})      # [x, weight, None, (1, 1), 1]
    args, kwargs = bound.call_arguments(inputs)   # (x, weight), {"padding": 1}

A binding depends on the form of a call, never on its values, and is made once per form.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ._overloads import ArgumentLayout, CallForm, best_form, call_forms, kinds_of
from ._signatures import signatures
from ._targets import by_callable

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class Binding:
    """Conversion of the arguments of calls of one form to inputs in schema order, and back. Immutable.

    names: the schema's name of each input.
    always_written: positions of the inputs that the schema says are written: in place, or by `out=`.
    unreturned_positions: those of written inputs that the operator does not return.
    statistics: of a normalisation, which writes them if a flag among the inputs is set; None for other ops.
    defaults: values of the schema for arguments that the call lacks.
    """

    __slots__ = (
        "_optional_tensors",
        "_position_by_name",
        "always_written",
        "defaults",
        "names",
        "statistics",
        "unreturned_positions",
    )  # fmt: skip

    def __init__(self, layout: ArgumentLayout) -> None:
        """Take the names and positions of a layout; `self` and `input` name the same input."""
        self.names = layout.names
        self.always_written = layout.written_positions
        self.unreturned_positions = layout.unreturned_positions
        self.defaults: Mapping[str, Any] = layout.defaults
        self._optional_tensors = layout.optional_tensors
        self._position_by_name = {name: i for i, name in enumerate(self.names)}
        self.statistics = _running_statistics(self._position_by_name)
        # Schemas say `self` where torch's Python functions say `input`: tools may use either name.
        if "self" in self._position_by_name:
            self._position_by_name.setdefault("input", self._position_by_name["self"])
        elif "input" in self._position_by_name:
            self._position_by_name["self"] = self._position_by_name["input"]

    def inputs(self, args: Args, kwargs: Kwargs | None = None) -> list[Any]:
        """Return the inputs in the order of the schema; a call of this form has no keywords."""
        return list(args)

    def argument_indices(self, nargs: int, keywords: Sequence[str]) -> tuple[int | tuple[int, int], ...]:
        """Return the index of each input among the call's arguments, positional then keyword arguments.

        -1 stands for the schema's default; a pair (start, end) for a size that is spread over arguments.
        """
        return tuple(range(nargs))

    def call_arguments(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments and keyword arguments in the form of the call, for inputs that may be others."""
        return tuple(inputs), {}

    def index(self, name: str) -> int:
        """Return the position of an input by its name; `self` and `input` are the same.

        Raises KeyError for another name.
        """
        try:
            return self._position_by_name[name]
        except KeyError:
            raise KeyError(f"no input {name!r}; inputs are {', '.join(self.names)}") from None

    def written_positions(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of the inputs that a call with these values writes; None is not written.

        Statistics count if the flag for them is set.
        """
        positions = self.always_written
        if self.statistics is not None and inputs[self.statistics.flag_position]:
            positions += self.statistics.positions
        return tuple([i for i in positions if inputs[i] is not None])

    def attributes(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the values that are not tensors by name, with the defaults of absent arguments.

        None for an optional tensor is left out.
        """
        values_by_name = dict(self.defaults)
        for i, value in enumerate(inputs):
            if value is None and i in self._optional_tensors:
                continue
            if not holds_tensor(value):
                values_by_name[self.names[i]] = value
        return values_by_name


class _ReorderedBinding(Binding):
    """A form of call with keywords, a spread size, or an order other than the schema's.

    A spread size is one input whose elements are arguments of their own, as in `x.view(2, 3)`.
    """

    __slots__ = ("_default_inputs", "_filled", "_keywords", "_positional", "_size_input")

    def __init__(self, layout: ArgumentLayout) -> None:
        super().__init__(layout)
        self._positional = layout.positional
        self._size_input = layout.size_input
        self._keywords = layout.keywords
        self._filled = tuple(layout.filled.items())
        # Copied at each call: a list copy and the stores cost less than a build from a dict.
        self._default_inputs = [layout.filled.get(i) for i in range(len(layout.names))]

    def inputs(self, args: Args, kwargs: Kwargs | None = None) -> list[Any]:
        """Return the inputs in the order of the schema up to the last given one, with defaults in gaps."""
        values = self._default_inputs.copy()
        for i, value in zip(self._positional, args, strict=False):
            values[i] = value
        if self._size_input is not None:
            values[self._size_input] = tuple(args[len(self._positional) :])
        if kwargs:
            for keyword, i in self._keywords:
                values[i] = kwargs[keyword]
        return values

    def argument_indices(self, nargs: int, keywords: Sequence[str]) -> tuple[int | tuple[int, int], ...]:
        """Return the index of each input's argument; -1 for a default, (start, end) for a spread size."""
        indices: list[int | tuple[int, int]] = [-1] * len(self._default_inputs)
        if self._size_input is not None:
            indices[self._size_input] = len(self._positional), nargs
        for argument_index, i in enumerate(self._positional[:nargs]):
            indices[i] = argument_index
        for keyword, i in self._keywords:
            indices[i] = nargs + keywords.index(keyword)
        return tuple(indices)

    def call_arguments(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments in the form of the call; a default that was changed becomes a keyword."""
        args = tuple(inputs[i] for i in self._positional)
        if self._size_input is not None:
            size = inputs[self._size_input]
            args += tuple(size) if isinstance(size, list | tuple) and size else (size,)
        kwargs = {keyword: inputs[i] for keyword, i in self._keywords}
        # Defaults between given arguments are passed only if a routine changed them.
        for i, default in self._filled:
            if inputs[i] is not default:
                kwargs[self.names[i]] = inputs[i]
        return args, kwargs


class _OverloadedBinding:
    """Bindings of a form of call in which the types of the arguments decide the overload."""

    __slots__ = ("_binding_by_kinds", "_forms")

    def __init__(self, forms: tuple[CallForm, ...]) -> None:
        self._forms = forms
        self._binding_by_kinds: dict[str, Binding] = {}

    def resolve(self, args: Args, kwargs: Kwargs | None) -> Binding:
        """Return the binding for arguments of these types; each combination of types is resolved once."""
        kinds = kinds_of(args, kwargs)
        bound = self._binding_by_kinds.get(kinds)
        if bound is None:
            bound = _binding_of_layout(best_form(self._forms, kinds).layout)
            self._binding_by_kinds[kinds] = bound
        return bound


_BindingCache = dict[Any, Binding | _OverloadedBinding]
# Of torch's own callables, which live as long as torch, and of the user's, which may die.
_torch_bindings: _BindingCache = {}
_program_bindings: "WeakKeyDictionary[Any, _BindingCache]" = WeakKeyDictionary()


def binding(called: Any, args: Args, kwargs: Kwargs | None = None) -> Binding:
    """Return the binding of a call, by which its arguments become inputs of its operator in schema order.

    called: the callable of a target (its args begin with self for a method, and leave the
    class out for a classmethod), an OpOverload or OpOverloadPacket, an autograd.Function or
    its `apply`; anything else binds in call order under the names arg0, arg1, ...
    Costs one look-up, and about a microsecond where argument types decide the overload.
    """
    key = (called, len(args), tuple(kwargs) if kwargs else ())
    try:  # the hot path is one look-up: `get` would cost another call
        bound = _torch_bindings[key]
    except KeyError:
        bound = _cached_binding(called, args, kwargs)
    if type(bound) is _OverloadedBinding:
        return bound.resolve(args, kwargs)
    return bound  # type: ignore[return-value]


def _cached_binding(called: Any, args: Args, kwargs: Kwargs | None) -> Binding | _OverloadedBinding:
    """Return the binding of a callable for a form of call, and cache it as long as the callable lives.

    Nothing is cached for a callable that takes no weak reference.
    """
    nargs, keywords = len(args), tuple(kwargs or ())
    if called in by_callable():  # torch's own
        return _torch_bindings.setdefault((called, nargs, keywords), _new_binding(called, nargs, keywords))
    owner = getattr(called, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        called = owner  # its `apply` is another object at each access
    try:
        binding_by_form = _program_bindings.setdefault(called, {})
    except TypeError:  # no weak reference can be made
        return _new_binding(called, nargs, keywords)
    bound = binding_by_form.get((nargs, keywords))
    if bound is None:
        bound = binding_by_form[nargs, keywords] = _new_binding(called, nargs, keywords)
    return bound


def _new_binding(called: Any, nargs: int, keywords: tuple[str, ...]) -> Binding | _OverloadedBinding:
    """Return the binding of a form of call; one that looks at types if the layouts of overloads differ."""
    forms = call_forms(signatures(called), nargs, keywords)
    if len(forms) == 1 or len({form.layout for form in forms}) == 1:
        return _binding_of_layout(forms[0].layout)
    return _OverloadedBinding(forms)


def _binding_of_layout(layout: ArgumentLayout) -> Binding:
    """Return the binding of a layout: the plain one if all arguments come in the order of the schema."""
    in_order = layout.positional == tuple(range(len(layout.names)))
    return Binding(layout) if in_order else _ReorderedBinding(layout)


# Normalisations write their running statistics, if this flag is set, and no schema says so.
_STATISTICS_FLAGS = ("training", "train", "use_input_stats")


class RunningStatistics(NamedTuple):
    """Positions of statistics among a normalisation's inputs, and of the flag by which the op writes them."""

    flag_position: int
    positions: tuple[int, ...]


def _running_statistics(position_by_name: Mapping[str, int]) -> RunningStatistics | None:
    """Return the statistics of a normalisation, from the positions of its inputs; None for another op."""
    if "running_mean" not in position_by_name or "running_var" not in position_by_name:
        return None
    flag_position = next(
        (position_by_name[name] for name in _STATISTICS_FLAGS if name in position_by_name), None
    )
    if flag_position is None:
        return None
    positions = position_by_name["running_mean"], position_by_name["running_var"]
    return RunningStatistics(flag_position, positions)


def holds_tensor(value: Any) -> bool:
    """Return True if value is a tensor or a list or tuple with a tensor in it."""
    if isinstance(value, torch.Tensor):
        return True
    return isinstance(value, (list, tuple)) and any(holds_tensor(item) for item in value)


OutputSpec = Callable[[Sequence[Any]], Any]


def flatten_outputs(output: Any) -> tuple[list[Any], OutputSpec]:
    """Return an operator's outputs as a list, and a function that puts such a list back into their form.

    The elements of a tuple, a namedtuple or a list of tensors are outputs; None is no output, and anything
    else is one.
    """
    if output is None:
        return [], _no_output
    if isinstance(output, tuple):
        # The class of a named tuple takes its fields as separate arguments, `_make` as a list.
        return list(output), getattr(output, "_make", type(output))
    if isinstance(output, list) and holds_tensor(output):
        return output.copy(), list
    return [output], _only_output


def _no_output(outputs: Sequence[Any]) -> None:
    if outputs:
        raise ValueError(f"expected no output, got {len(outputs)}")


def _only_output(outputs: Sequence[Any]) -> Any:
    (output,) = outputs
    return output

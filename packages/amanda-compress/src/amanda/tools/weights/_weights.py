"""The weights of a tool: which are selected, the views by which ops read them, reasons for skipped ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import amanda
from amanda.errors import AmandaError
from amanda.tools.kit import Samples, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import PRODUCTS, SEVERAL_WEIGHTS
from amanda.tools.select import Globs, Selection, listed
from amanda.tools.weights._parameters import (
    ParameterStore,
    SharedState,
    describe_op,
    einsum_parameters,
    parameter_sizes,
    parameter_store,
)
from amanda.tools.weights._views import (
    AliasedWeightView,
    FindView,
    IndexedRows,
    WeightsOfSamples,
    order_of_axes,
    row_layout,
)
from amanda.tools.weights._weight import Weight, WeightView, why_unsupported
from amanda.tools.weights._weight_input import ParameterSlice, WeightInput, WeightReads

if TYPE_CHECKING:
    from amanda.tools.weights._tool import WeightTool


LOOKUPS = frozenset({"embedding", "embedding_bag", "ResourceGather", "ResourceGatherNd"})
"""Ops that look rows of a weight up."""


class SelectionOptions(TypedDict, total=False):
    """Options of a tool by which weights are selected, as keywords that a subclass passes on.

    type, module, exclude: globs of ops' words and of module paths; None for every convolution and product.
    """

    type: Globs
    module: Globs
    exclude: Globs


class WeightSelection(Selection):
    """Ops that read weights: convolutions and products unless types are given, and no op that makes a weight.

    Without paths, LoRA adapters are left.  type, module, exclude: see `amanda.tools.select.Selection`.
    Raises `error` for what is not a list of names.
    """

    def __init__(self, type: Globs, module: Globs, exclude: Globs, error: type[AmandaError]) -> None:
        self._options = {"type": type, "module": module, "exclude": exclude}
        super().__init__(
            listed("type", type, error), listed("module", module, error),
            exclude=listed("exclude", exclude, error),
        )  # fmt: skip

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the weight of an op is selected."""
        # A parametrization multiplies parameters to compute a weight: to prune its factors would not prune
        # the weight.
        if not self.has_modules and (WeightReads.computes_weight(context) or _is_adapter(context)):
            return False
        return self.fits(context)

    def leaves_adapter(self, context: amanda.OpContext) -> bool:
        """Return True if the op is left because it is of an adapter, and no module path is given."""
        return not self.has_modules and _is_adapter(context) and self.fits(context)

    def fits(self, context: amanda.OpContext, *names: str) -> bool:
        """Return True if modules and type of an op are selected; without types each product is."""
        op_type = context["type"]
        if not self.has_types and op_type not in PRODUCTS and op_type not in SEVERAL_WEIGHTS:
            return False
        return super().fits(context, *names)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options.items() if value is not None)


def _is_adapter(context: amanda.OpContext) -> bool:
    """Return True if the op is one of a LoRA adapter of peft, which is trained beside the model's weights."""
    return any(part.startswith("lora_") for path in context.get_scopes() for part in path.split("."))


W = TypeVar("W", bound=Weight)

LOOKED_UP = "an embedding reads it too"
CONTRACTED = "an einsum reads it too"
EINSUM = "the operands of an einsum are one list, of which none is changed"
"""Reason for skipping an einsum that reads a parameter."""
ADAPTER = "it is an adapter's, which is changed if `module` selects it"
SELECTED = "it reads what other ops select out of a parameter, which can be followed in eager PyTorch alone"
COMPUTED_SAMPLES = "each sample of a vmap has its own, and no module holds it"
INDEXED = "it reads elements of a parameter that an index selects, which are no weights by themselves"


class Weights(Generic[W]):
    """The weights of one tool, by parameter and part, or by the op that reads a computed one.

    reasons: why other weights are unchanged, by op.  skipped_elements: numbers of their elements, by holder.
    retracted: weights that were changed until an embedding turned out to read them too.
    """

    def __init__(self, tool: WeightTool[W]) -> None:
        self._tool = tool
        self.clear()

    def clear(self) -> None:
        """Forget all weights, views, reasons and counts."""
        self._weight_by_key: dict[Hashable, W] = {}
        self.reasons: dict[str, str] = {}
        self.skipped_elements: dict[Hashable, int] = {}
        self.retracted: list[W] = []
        self._skipped_keys: set[Hashable] = set()  # of weights that are not selected, or that the tool skips
        # Parameters that a lookup or an einsum reads too, which no product changes.
        self._skip_reason_by_parameter: dict[Hashable, str] = {}
        self._unselected_count, self._has_unweighted_product = 0, False
        self._view_by_key: dict[Hashable, AliasedWeightView | WeightsOfSamples] = {}
        self._weights_by_parameter: dict[Hashable, list[W]] = {}
        # Anew with the weights: numbers of readers count from the first read after `clear`.
        self._shared_state = SharedState()

    def __iter__(self) -> Iterator[W]:
        return iter(self._weight_by_key.values())

    def has_met(self, identity: Hashable) -> bool:
        """Return True if an op has read a parameter, also one that is left or not selected."""
        return identity in self._weights_by_parameter or identity in self._skip_reason_by_parameter

    @property
    def empty_reason(self) -> str:
        """A sentence if no weight was selected, or no op read a weight; "" otherwise."""
        nothing_left_out = not (self._unselected_count or self._has_unweighted_product)
        if self._weight_by_key or self.reasons or nothing_left_out:
            return ""
        if not self._unselected_count:
            return "None of the products that were met reads a parameter that a model holds"
        selection = str(self._tool.selection) or "the default of type"
        return f"{self._unselected_count} weights were met, of which {selection} selects none"

    def record_unweighted(self, context: amanda.OpContext) -> None:
        """Record a forward product that reads no weight; other ops are of no concern."""
        self._has_unweighted_product |= context["phase"] == "forward" and context["type"] in PRODUCTS

    def skip_unsupported_readers(self, context: amanda.OpContext) -> set[int]:
        """Record that weights of lookups, einsums, ops of several weights, and adapters stay unchanged.

        Products stop changing a weight that a lookup or an einsum reads too, since that would read it
        unchanged.  Returns the ids of the ops that changed such a weight until now.
        """
        if context["type"] in SEVERAL_WEIGHTS and self._tool.selection(context):
            self.skip(context, WeightReads.several_weights)
        if self._tool.selection.leaves_adapter(context):
            self.reasons[describe_op(context)] = ADAPTER
        reason, parameters = _parameters_read_unchanged(context)
        if reason == CONTRACTED and parameters and self._tool.selection(context):
            self.skip(context, EINSUM)
        outdated_ops: set[int] = set()
        for parameter in parameters:
            identity = parameter_store(parameter).identity(parameter)
            self._skip_reason_by_parameter[identity] = reason
            # A lookup may come after the product, as where the output layer of a language model is tied and
            # runs in another call.
            keys = [key for key in self._weights_by_parameter if identity in (key, _slot_of_sample(key))]
            weights = [weight for key in keys for weight in self._weights_by_parameter.pop(key)]
            outdated_ops |= self._retract(context, weights, reason)
        return outdated_ops

    def view_of_read(
        self, context: amanda.OpContext, read: WeightInput
    ) -> tuple[WeightView | None, FindView | None]:
        """Return the view of the weight that an op reads, and a function that finds it at each execution.

        (view, None) for an op that reads the same weight each time, (None, None) for a skipped one, and
        (None, function) where only an execution tells what is read.  A weight that is new is added.
        """
        value = context.get_inputs()[read.index]
        if read.is_lost:
            if self._tool.selection(context):
                self.skip(context, SELECTED)
            return None, None
        slices = () if read.holder is None else parameter_store(read.holder).slices(read.holder)
        if slices:  # of a stack, such as the layers of a scan, of which each execution reads one
            views = [self._find_or_add_view(context, value, parameter, read.layout) for parameter in slices]
            view_by_slice = dict(zip(slices, views, strict=True))
            return None, partial(_view_of_current_slice, view_by_slice, read.holder)
        find_view = partial(self._view_of_value, context, read.layout, read.holder)
        if read.is_handed_in:  # another tensor at each call
            return find_view(value, None), find_view
        if not read.is_followed:  # the same weight each time
            return find_view(value, None), None
        find_view = partial(self._view_of_slice, context, read.layout)
        return find_view(value, ParameterSlice.of_input(context, read.index)), find_view

    def _view_of_slice(
        self, context: amanda.OpContext, layout: str | None, value: Any, origin: ParameterSlice | None
    ) -> WeightView | None:
        """Return the view, added when new, of the slice or rows that an execution reads; None if skipped."""
        if origin is None:
            self.skip(context, WeightReads.unknown_part)
            return None
        if origin.form is None:
            rows = self._view_of_rows(context, origin, value, layout)
            return None if rows is None else IndexedRows(rows, origin)
        part_value = origin.holder.detach().as_strided(*origin.form)
        return self._find_or_add_view(context, part_value, origin.holder, layout)

    def _view_of_value(
        self, context: amanda.OpContext, layout: str | None, holder: Any, value: Any,
        _origin: ParameterSlice | None,
    ) -> WeightView | None:  # fmt: skip
        """Return the view of a value, plain or wrapped by a function transform; None for a skipped one.

        The samples of a vmap share one weight, or have one each.  _origin: unused, the holder is known.
        """
        samples = tensors_of(value).samples(value) if context.is_eager() else None
        if samples is None:
            return self._find_or_add_view(context, value, holder, layout)
        with samples.outside():
            store = parameter_store(samples.data)
            location = None if holder is None else store.locate(holder, samples.first)
            # One mask for all samples, where the model had one weight in this place before: it may have been
            # adapted in each sample since, as MAML does.
            if not samples.sizes or self._is_decided(location):  # no sizes: all samples have the same weight
                return self._find_or_add_view(context, samples.first, holder, layout)
            if location is None or self._tool.leaves_samples:
                if self._tool.selection(context):
                    self.skip(context, self._tool.leaves_samples if location else COMPUTED_SAMPLES)
                return None
            return self._view_of_batch(context, store, samples, location, holder, layout)

    def _view_of_batch(
        self, context: amanda.OpContext, store: ParameterStore, samples: Samples, location: Any, holder: Any,
        layout: str | None,
    ) -> WeightView | None:  # fmt: skip
        """Return the view of one weight a sample, added when new; None if one is skipped.  Notes the op."""
        identity, part = location
        view_key: Hashable = (identity, part, samples.sizes)
        if identity in self._skip_reason_by_parameter:
            if self._tool.selection(context):
                self.skip(context, self._skip_reason_by_parameter[identity])
        elif view_key not in self._view_by_key and view_key not in self._skipped_keys:
            # Skipped until all weights are added: a failure half way leaves the whole batch unchanged.
            self._skipped_keys.add(view_key)
            weights = self._weights_of_samples(context, store, samples, location, holder, layout)
            if weights is None:
                return None
            self._skipped_keys.discard(view_key)
            self._view_by_key[view_key] = WeightsOfSamples(samples.sizes, weights)
        view = self._view_by_key.get(view_key)
        for weight in getattr(view, "weights", ()):
            weight.readers.add(context.get_op_id())
        return view

    def _weights_of_samples(
        self, context: amanda.OpContext, store: ParameterStore, samples: Samples, location: Any, holder: Any,
        layout: str | None,
    ) -> list[W] | None:  # fmt: skip
        """Return the weight of each sample, added where it is new; None as soon as one is skipped."""
        identity, part = location
        weights: list[W] = []
        for numbers in np.ndindex(samples.sizes):
            # A batch of another size has the weights of the same numbers.
            sample_location = (identity, numbers), part
            if sample_location not in self._weight_by_key:
                read = _WeightRead(samples.data[numbers], holder, sample_location, layout, numbers)
                self._add_weight_or_view(context, store, sample_location, read)
            weight = self._weight_by_key.get(sample_location)
            if weight is None:
                return None
            weights.append(weight)
        return weights

    def _find_or_add_view(
        self, context: amanda.OpContext, value: Any, holder: Any, layout: str | None
    ) -> WeightView | None:
        """Return the weight that a plain value is, or a view of weights that it overlaps; add it when new.

        None for a weight that is skipped, not selected or without numbers.  The op is noted as a reader.
        """
        unread_reason = tensors_of(value).unread(value) if context.is_eager() else None
        if getattr(value, "is_meta", False) or unread_reason is not None:  # it may have numbers later
            if unread_reason is not None and self._tool.selection(context):
                self.skip(context, unread_reason)
            return None
        store = parameter_store(value, holder)
        location = None if holder is None else store.locate(holder, value)
        # A computed weight has no identity that lasts: the place of its op stands for it.
        key: Hashable = self._tool.place(context) if location is None else location
        identity = None if location is None else location[0]
        if identity is not None and identity in self._skip_reason_by_parameter:
            if self._tool.selection(context):
                self.skip(context, self._skip_reason_by_parameter[identity])
        # Skipped keys are remembered, so that an execution in a loop pays look-ups and no second analysis.
        elif not self._is_decided(key):
            self._add_weight_or_view(context, store, key, _WeightRead(value, holder, location, layout))
        view = self._weight_by_key.get(key) or self._view_by_key.get(key)
        if isinstance(view, Weight):
            view.readers.add(context.get_op_id())
        return view

    def _is_decided(self, key: Hashable) -> bool:
        """Return True if a key has a weight or a view already, or was skipped."""
        return key in self._weight_by_key or key in self._view_by_key or key in self._skipped_keys

    def _add_weight_or_view(
        self, context: amanda.OpContext, store: ParameterStore, key: Hashable, read: _WeightRead
    ) -> None:
        """Add the weight of a read, a view if it overlaps other weights, or mark the weight as skipped."""
        is_computed = read.location is None
        whole = None if is_computed else store.whole(read.holder)
        siblings = [] if is_computed else self._weights_by_parameter.setdefault(read.identity, [])
        if any(store.overlaps(read.part, weight.part, whole) for weight in siblings):
            # `siblings` is shared and grows: weights that are met later are in the view too.
            self._view_by_key[key] = AliasedWeightView(store, read.part, whole, siblings)
        elif not self._tool.selection(context):
            self._skipped_keys.add(key)
            self._unselected_count += 1
        elif not self._add_weight(context, store, key, read, whole):
            self._skipped_keys.add(key)

    def _view_of_rows(
        self, context: amanda.OpContext, origin: ParameterSlice, value: Any, layout: str | None
    ) -> AliasedWeightView | None:
        """Return the view, added when new, of all rows of which an op reads some; None for skipped rows."""
        holder, store = origin.holder, parameter_store(value)
        if not value.numel() or holder.is_meta:
            return None
        identity = store.identity(holder)
        key: Hashable = (identity, "rows")
        if identity in self._skip_reason_by_parameter:
            if self._tool.selection(context):
                self.skip(context, self._skip_reason_by_parameter[identity])
        elif key not in self._view_by_key and key not in self._skipped_keys:
            # Skipped until all rows are added: a failure half way leaves the whole parameter unchanged.
            self._skipped_keys.add(key)
            if self._tool.selection(context):
                self._add_rows(context, store, key, origin, value, layout)
            else:
                self._unselected_count += 1
        view = self._view_by_key.get(key)
        assert view is None or isinstance(view, AliasedWeightView)
        return view

    def _add_rows(
        self, context: amanda.OpContext, store: ParameterStore, key: Any, origin: ParameterSlice, value: Any,
        layout: Any,
    ) -> None:  # fmt: skip
        """Add a weight for each row of a parameter, and the view of all rows; no view if rows are skipped."""
        holder = origin.holder
        axes = order_of_axes(origin, value) if holder.dim() > 2 else None
        if axes is None or self._tool.leaves_rows:
            self.skip(context, INDEXED if axes is None else self._tool.leaves_rows)
            return
        layout, whole = row_layout(layout, axes), store.whole(holder)
        identity, _ = key
        siblings = self._weights_by_parameter.setdefault(identity, [])
        for row in holder.detach().unbind():
            read = _WeightRead(row, holder, store.locate(holder, row), layout)
            if any(store.overlaps(read.part, weight.part, whole) for weight in siblings):
                continue  # the weights of this parameter that were met before stay
            if not self._add_weight(context, store, read.location, read, whole):
                return
        for weight in siblings:
            weight.readers.add(context.get_op_id())
        self._skipped_keys.discard(key)
        self._view_by_key[key] = AliasedWeightView(store, None, whole, siblings)

    def _add_weight(
        self, context: amanda.OpContext, store: ParameterStore, key: Hashable, read: _WeightRead, whole: Any
    ) -> bool:
        """Add a weight with its state, and return True; record the reason if the tool skips the weight."""
        reason = why_unsupported(context, read.value)
        if reason is None:
            weight = self._make_weight(context, store, read, whole)
            reason = self._tool.on_weight(weight)
        if reason is not None:
            self.skip(context, reason)
            return False
        weight.end_setup()
        self._weight_by_key[key] = weight
        if read.location is not None:
            self._weights_by_parameter.setdefault(read.identity, []).append(weight)
        return True

    def _make_weight(
        self, context: amanda.OpContext, store: ParameterStore, read: _WeightRead, whole: Any
    ) -> W:
        """Create a weight whose state is saved under the parameter's path, else under its first reader."""
        path = None if read.location is None else context.get_variable_path(read.holder)
        variable = None if read.location is None else read.holder
        reader, suffix = context, ""
        if whole is not None and read.location is not None:
            is_named = path is not None
            reader, suffix = self._shared_state.key_for(context, read.identity, read.part, whole, is_named)
        # As the driver of JAX names the slices of a stack: "[0]" of the first sample.
        sample_suffix = "".join(f"[{number}]" for number in read.numbers)
        copy = tensors_of(read.value).copy

        def keep(name: str, make: Callable[[], Any]) -> Any:
            return self._tool.keep(reader, name + suffix + sample_suffix, make, copy, variable)

        if not path:
            path = "" if variable is None else store.name(variable)
        return self._tool.weight_type(
            context, value=read.value, layout=read.layout, store=store, location=read.location, whole=whole,
            number=len(self._weight_by_key), keep=keep, error=self._tool.error,
            path=path + sample_suffix, holder=_weak_reference(variable),
        )  # fmt: skip

    def skip(self, context: amanda.OpContext, reason: str) -> None:
        """Record why the weight of an op is left as it is, and how many elements it has."""
        self.reasons[describe_op(context)] = reason
        self.skipped_elements.update(parameter_sizes(context))

    def _retract(self, context: amanda.OpContext, weights: list[W], reason: str) -> set[int]:
        """Stop changing weights; return their readers' ids.  Raises an error for one changed in a file."""
        outdated_ops: set[int] = set()
        for weight in weights:
            # The changed weight is in the file already, so that it cannot be retracted.
            if context.is_static() and weight.is_ready:
                raise self._tool.error(
                    f"{context['type']} of {context.get_scope() or context.get_source()} looks up rows of a "
                    f"weight that {weight.type} of {weight.module or weight.source} reads changed; exclude "
                    "that"
                )
            weight.is_skipped = True
            self.skipped_elements[weight.holder] = sum(sibling.size for sibling in weights)
            self.reasons[f"{weight.type} of {weight.module or weight.source}"] = reason
            outdated_ops |= weight.readers
        self.retracted += weights
        retracted_ids = {id(weight) for weight in weights}
        self._weight_by_key = {
            key: weight for key, weight in self._weight_by_key.items() if id(weight) not in retracted_ids
        }
        self._view_by_key = {
            key: view for key, view in self._view_by_key.items() if not view.is_of(retracted_ids)
        }
        return outdated_ops


def _parameters_read_unchanged(context: amanda.OpContext) -> tuple[str, list[Any]]:
    """Return the parameters that a lookup or an einsum reads, which no tool changes there, and the reason."""
    if context["type"] in LOOKUPS and context.get_variable(0) is not None:
        return LOOKED_UP, [context.get_variable(0)]
    if context["type"] == "einsum" and context.namespace.matches("pytorch/*/eager"):
        return CONTRACTED, einsum_parameters(context)
    return "", []


def _slot_of_sample(identity: Hashable) -> Hashable:
    """Return the slot in the identity (slot, numbers) of a sample's weight; None for any other identity."""
    return identity[0] if isinstance(identity, tuple) and len(identity) == 2 else None


def _view_of_current_slice(
    view_by_slice: Mapping[Any, WeightView | None], holder: Any, value: Any, origin: ParameterSlice | None
) -> WeightView | None:
    """Return the weight view of the slice of a stack that the op reads now; None for a skipped slice.

    value, origin: unused, since the driver knows the slice.
    """
    return view_by_slice.get(parameter_store(holder).current_slice(holder))


class _WeightRead:
    """A value that an op reads as its weight, and the parameter, `holder`, that has the value.

    location: identity and part, from `ParameterStore.locate`; None for a weight that is computed.
    numbers: of the sample of a vmap that has the weight, one for each batch; () outside of a vmap.
    """

    def __init__(
        self, value: Any, holder: Any, location: Any, layout: str | None, numbers: Sequence[int] = ()
    ) -> None:
        self.value, self.holder, self.location, self.layout = value, holder, location, layout
        identity_and_part: tuple[Any, Any] = (None, None) if location is None else location
        self.identity, self.part = identity_and_part
        self.numbers = numbers


def _weak_reference(holder: Any) -> Callable[[], Any]:
    """Return a weak reference; a function that returns None for an object without weak references."""
    try:
        return weakref.ref(holder)
    except TypeError:
        # Some holders have no weak references, such as the tuple of an ONNX initializer.
        return lambda: None

"""Factors of inputs that go into the parameters which make these inputs, so that no op divides by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.options import deprecated
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._grid import QuantizeError
from amanda.tools.quantize.weights._calibrated import (
    UNREAD,
    CalibratedTool,
    CalibratedWeight,
    Samples,
)
from amanda.tools.results import Column, Result
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter, parameter_store

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from typing_extensions import Unpack

    from amanda.tools.quantize.weights._factors import FactorTracing
    from amanda.tools.weights import SelectionOptions

Axis = tuple[int, int]
"""The identity of a parameter, and an axis of it."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Weights that multiply one input, and the parameters that make it.

    slots: number of the factor of each channel of the input, (channels,); channels that a parameter makes
    together, such as those of queries that share a value, have the same.
    readers: the weights, by the axes of their inputs.  makers: the number of the factor of each place along
    an axis, or -1.  names: of all of these parameters, by identity.
    """

    slots: NDArray[Any]
    readers: Sequence[Axis]
    makers: Mapping[Axis, NDArray[Any]]
    names: Mapping[int, str]

    def scales(self, factors: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield parameters, axes, and what each is multiplied by along it.  factors: (channels,)."""
        factors = factors.cpu().double()  # a quotient in float32 would round once more
        for identity, axis in self.readers:
            yield identity, axis, factors
        by_slot = factors.new_ones(int(self.slots.max()) + 2)
        by_slot[self.slots] = factors  # the last one stays 1, for -1
        for (identity, axis), slots in self.makers.items():
            yield identity, axis, 1 / by_slot[slots]


class FoldResult(Result):
    """The weights whose factors of inputs are in parameters now, and which parameters these are.

    model: the model.  left: weights whose inputs ops go on dividing in a scope of the tool, and why.
    """

    name: ClassVar[str] = "folded"
    title = "Folded factors"
    columns: ClassVar[Sequence[Column]] = (
        Column("weight"), Column("factors", show="{:,}".format, total=True), Column("divided"),
    )  # fmt: skip

    def __init__(self, model: nn.Module, folds: Sequence[Fold], left: Mapping[str, str]) -> None:
        self.model, self.left = model, dict(left)
        self._rows = [
            (fold.names[reader], len(fold.slots), ", ".join(fold.names[one] for one, _ in fold.makers))
            for fold in folds for reader, _ in fold.readers
        ]  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each weight."""
        return self._rows

    def facts(self) -> Mapping[str, Any]:
        """Return what was left."""
        return {"left": self.left}

    def notes(self) -> Sequence[str]:
        """Return what was left."""
        return [
            f"The inputs of {name} are still divided in a scope: {why}." for name, why in self.left.items()
        ]


class FoldingTool(CalibratedTool):
    """A calibrated tool with a factor for each input of a weight, `smoothing`, by which inputs are divided.

    `prepare` before the calibration finds which parameters can take the factors, and has weights that
    multiply one input share them; `finalize` after it writes them.
    """

    def __init__(self, **selected: Unpack[SelectionOptions]) -> None:
        super().__init__(**selected)
        self._folds: dict[int, Fold] | None = None
        self._unfolded: dict[int, str] = {}
        self._shared: dict[Fold, Tensor] = {}

    def factors(
        self, given: Sequence[tuple[CalibratedWeight, Tensor, Samples]], slots: NDArray[Any] | None
    ) -> Tensor:
        """Return the factors of weights that multiply one input.

        given: weights, as matrices too, and what they were given.  slots: see `Fold`; None: all differ.
        """
        raise NotImplementedError

    def prepare(self, model: Callable[..., Any], *example: Any, **kwargs: Any) -> Any:
        """Find the parameters that make the inputs of products in a call of the model; call it at first.

        The weights that multiply one input share their factors in calibrations from now on: the largest
        magnitude of any, or the least error of all.  A normalisation, linear layer, convolution or parameter
        can take factors if products alone read what it makes: also through ReLU, pooling, a product of two
        tensors, and attention, of which it makes the values.  A cache of values that the model returns in an
        object of its own holds divided ones.
        The model is in evaluation mode meanwhile, and as it was afterwards.  Returns the model's result:
        after `load_state_dict`, with the state that was loaded.
        Raises QuantizeError for what is no torch.nn.Module, and where factors would change the results.
        """
        result = self._plan(model, example, kwargs)
        return super().prepare(model, *example, **kwargs) if self.waiting_state() else result

    @deprecated(use="prepare", since="amanda-compress 0.2", gone="0.4")
    def plan_fold(self, model: nn.Module, *example: Any, **named: Any) -> None:
        """Find the parameters that can take factors.  Deprecated: use `prepare`."""
        self._plan(model, example, named)

    def _plan(self, model: Any, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Find the parameters that can take factors, try them; return what the model returns."""
        import torch

        from amanda.tools.prune.channels.tracing import Module
        from amanda.tools.quantize.weights._factors import FactorTracing

        if not isinstance(model, torch.nn.Module):
            raise QuantizeError(
                f"{type(self).__name__}.prepare was given a {type(model).__name__}; give a torch.nn.Module"
            )
        subject, tracing = Module(model), FactorTracing(model)
        with subject.evaluating(), amanda.disabled():
            result = model(*example, **named)
            wanted = list(subject.floats(result))
        with subject.evaluating():
            tracing.follow(example, named)
        identities = {
            f"{path}.{name}" if path else name: self.identity_of(one, module)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, one in module.named_parameters(recurse=False)
        }
        folds, unfolded = _folds_of(tracing, identities)
        with subject.evaluating(), amanda.disabled(), _tried(model, folds):
            found = list(subject.floats(model(*example, **named)))
        for (one, epsilon), (other, _) in zip(wanted, found, strict=True):
            if one.size and not np.abs(one - other).max() <= max(np.abs(one).max() * epsilon**0.5, epsilon):
                raise QuantizeError(
                    f"the {type(model).__name__} computes something else with factors in its parameters: it "
                    "reads a tensor by other means than ops, draws random numbers, or computes NaN"
                )
        self._folds = {reader: fold for fold in folds for reader, _ in fold.readers}
        self._unfolded = unfolded
        return result

    @deprecated(use="finalize", since="amanda-compress 0.2", gone="0.4")
    def fold(self, model: nn.Module) -> FoldResult:
        """Write the factors into the parameters of a model.  Deprecated: use `finalize`."""
        if self._folds is None:
            raise QuantizeError(
                f"call prepare(model, example) of this {type(self).__name__} before its calibration: it "
                "finds the parameters that can take the factors"
            )
        with amanda.disabled(), ParameterStore.undone_on_error() as undo:
            return self.write_factors(model, undo)

    def write_factors(self, model: nn.Module, undo: list[Callable[[], Any]]) -> FoldResult:
        """Multiply weights of a model by their factors, and divide the parameters that make their inputs.

        The model computes the same within the rounding of its parameters, and no op divides by a factor that
        is written.  Weights whose factors have no such place stay, and ops go on dividing their inputs in a
        scope of the tool: see `left` of the result.
        undo: what undoes the changes is added to it.  Raises QuantizeError for another model.
        """
        try:
            return self._written(model, self._folds or {}, undo)
        except ParameterError as error:
            raise QuantizeError(str(error)) from error

    def _written(
        self, model: nn.Module, folds: Mapping[int, Fold], undo: list[Callable[[], Any]]
    ) -> FoldResult:
        held = {one.identity: one for one in parameter_store("torch").parameters(model)}
        weights = {one.holder: one for one in self.weights if one.is_ready and one.part is None}
        if not held.keys() & weights.keys():
            raise QuantizeError(
                f"{type(self).__name__} has calibrated no weight of this {type(model).__name__}: call it "
                "within tool.calibrating() first"
            )
        unplanned = "prepare(model, example) was not called before the calibration"
        unmet = unplanned if self._folds is None else "prepare met no product with the whole parameter"
        left, chosen = dict[str, str](), list[Fold]()
        for weight in self.weights:
            fold = None if weight.part is not None else folds.get(weight.holder)
            if fold is None:
                if weight.is_ready:
                    left[weight.name] = self._unfolded.get(weight.holder, unmet)
            elif fold not in chosen:
                why = self._misfit(fold, weights, held)
                if why is None:
                    chosen.append(fold)
                elif weight.is_ready:
                    left[weight.name] = why
        scales: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for fold in chosen:
            factors = weights[fold.readers[0][0]]["smoothing"]
            for identity, axis, scale in fold.scales(factors):
                scales[identity].append((axis, scale))
        for identity, own in scales.items():
            held[identity].change(partial(_scaled, scales=own), undo=undo)
        readers = {identity for fold in chosen for identity, _ in fold.readers}
        for identity, own in scales.items():
            if identity in weights:
                undo.append(_restoring(weights[identity]))
                self.on_folded(weights[identity], held[identity].read(), own, identity in readers)
        return FoldResult(model, chosen, left)

    def on_folded(
        self, weight: CalibratedWeight, value: Tensor, scales: Sequence[tuple[int, Tensor]], is_read: bool
    ) -> None:
        """Fit the state of a weight to its new value.

        scales: what the parameter was multiplied by along axes.  is_read: True if these are its factors, too.
        """
        if is_read:
            weight["smoothing"] = 1

    def solve(self, weight: CalibratedWeight, matrix: Tensor, samples: Samples) -> None:
        """Find the factors of a weight, or of all that share them."""
        fold = self._fold_of(weight)
        if fold is None:
            weight["smoothing"] = self.factors([(weight, matrix, samples)], None)
            return
        if fold not in self._shared:
            given = [
                (one, one.matrix(one.samples.weight), one.samples) for one in self.weights
                if self._fold_of(one) is fold and one.samples is not None and one.misfit == UNREAD
            ]  # fmt: skip
            for one, _, own in given:
                one.check(own)
            self._shared[fold] = self.factors(given, fold.slots)
        weight["smoothing"] = self._shared[fold]

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        """Return a context that begins a calibration anew, with factors anew."""
        with super()._collecting():
            try:
                yield
            finally:
                self._shared.clear()

    def _fold_of(self, weight: CalibratedWeight) -> Fold | None:
        fold = None if weight.part is not None else (self._folds or {}).get(weight.holder)
        own = weight.get("smoothing")
        return fold if fold is not None and own is not None and len(own) == len(fold.slots) else None

    def _misfit(
        self, fold: Fold, weights: Mapping[Any, CalibratedWeight], held: Mapping[int, StoredParameter]
    ) -> str | None:
        """Return why the factors of a fold cannot be written."""
        parts = {one.holder for one in self.weights if one.part is not None}
        for identity, _ in (*fold.readers, *fold.makers):
            if identity not in held:
                return f"{fold.names[identity]} is no parameter of the model"
            if identity in parts:
                return f"ops read {fold.names[identity]} in parts"
        for identity, _ in fold.readers:
            if identity not in weights:
                return f"the product with {fold.names[identity]} reads its input too, which has no factors"
            if len(weights[identity]["smoothing"]) != len(fold.slots):
                return "its factors differ within the window of a convolution"
        first, *others = [weights[identity]["smoothing"] for identity, _ in fold.readers]
        _, places = np.unique(fold.slots, return_index=True)
        if not all(bool((one == first).all()) for one in [*others, first[places[fold.slots]]]):
            return "its factors are of a calibration before prepare, and others of the same input differ"
        return None


def tied(values: Tensor, slots: NDArray[Any] | None, how: str) -> Tensor:
    """Return for each channel the amax or mean of the values of all channels that have its factor."""
    import torch

    if slots is None:
        return values
    index = torch.as_tensor(slots, device=values.device)
    start = values.new_zeros(int(slots.max()) + 1)
    return start.scatter_reduce(0, index, values, how, include_self=False)[index]


def _folds_of(tracing: FactorTracing, identities: Mapping[str, int]) -> tuple[list[Fold], dict[int, str]]:
    """Return the folds that a traced call has, and why there is none for other weights."""
    from amanda.tools.quantize.weights._factors import UNMADE

    labels = tracing.notes.labels
    multiplied = {
        label for work in tracing.notes.work if work.inputs is not None for label in work.inputs.tolist()
    }
    made, left = labels.output_labels(), labels.whole_roots()
    for root in labels.roots(np.array(sorted(multiplied & made), int)).tolist():
        left.setdefault(root, "another op reads its weight otherwise")
    names = {identity: name for name, identity in reversed(list(identities.items()))}
    readers: dict[Axis, NDArray[Any]] = {}
    makers: dict[Axis, NDArray[Any]] = {}
    for name, families in tracing.channels.items():
        for family in families if name in identities else ():
            axis, own = int(np.argmax(family.shape)), family.reshape(-1)
            kind = readers if int(own[0]) in multiplied else makers
            kind[identities[name], axis] = labels.roots(own)
    is_made = {root for own in makers.values() for root in own.tolist()}
    unfolded: dict[int, str] = {}
    alike: dict[tuple[int, ...], list[Axis]] = defaultdict(list)
    of_root: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for axis_of, roots in readers.items():
        key = tuple(roots.tolist())
        alike[key].append(axis_of)
        for root in key:
            of_root[root].add(key)
    folds = []
    for key, own in alike.items():
        why = next((left[root] for root in key if root in left), None)
        if why is None and not is_made.issuperset(key):
            why = UNMADE
        if why is None and any(len(of_root[root]) > 1 for root in key):
            why = "another product reads a part of its input, or more than that"
        if why is not None:
            unfolded.update({identity: why for identity, _ in own})
            continue
        slot = {root: i for i, root in enumerate(dict.fromkeys(key))}
        its = {
            axis_of: np.array([slot.get(root, -1) for root in roots.tolist()])
            for axis_of, roots in makers.items() if not slot.keys().isdisjoint(roots.tolist())
        }  # fmt: skip
        known = {identity: names[identity] for identity, _ in (*own, *its)}
        folds.append(Fold(np.array([slot[root] for root in key]), own, its, known))
    return folds, unfolded


@contextmanager
def _tried(model: Any, folds: Sequence[Fold]) -> Iterator[None]:
    """Return a context in which factors are in the parameters that round nothing: powers of two."""
    import torch

    held = {one.identity: one for one in parameter_store("torch").parameters(model)}
    undo: list[Callable[[], Any]] = []
    try:
        for fold in folds:
            factors = torch.as_tensor(2.0 ** (fold.slots % 3 - 1))
            for identity, axis, scale in fold.scales(factors):
                held[identity].change(partial(_scaled, scales=[(axis, scale)]), undo=undo)
        yield
    finally:
        for back in reversed(undo):
            back()


def _scaled(value: Tensor, scales: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return a tensor times vectors along axes, rounded once to its own type."""
    import torch

    made = value.to(torch.float64 if value.device.type != "mps" else torch.float32)
    for axis, scale in scales:
        extents = [-1 if i == axis else 1 for i in range(value.ndim)]
        made = made * scale.to(made).reshape(extents)
    return made.to(value.dtype)


def _restoring(weight: CalibratedWeight) -> Callable[[], None]:
    """Return what gives a weight the state back that it has now."""
    state = {
        name: weight[name].clone() for name in ("smoothing", "scale", "sums") if weight.get(name) is not None
    }

    def restore() -> None:
        for name, value in state.items():
            weight[name] = value

    return restore

"""Fold factors of inputs into the parameters that compute these inputs, so that no op divides by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.options import deprecated
from amanda.tools.libraries import numpy as np
from amanda.tools.quantize._fake_quantize import QuantizeError
from amanda.tools.quantize.weights._calibrated import (
    NOT_RUN,
    CalibratedTool,
    CalibratedWeight,
    InputSums,
)
from amanda.tools.quantize.weights._scale_tracing import Fold, find_folds
from amanda.tools.results import Column, Result
from amanda.tools.weights import ParameterError, ParameterStore, StoredParameter, parameter_store

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from typing_extensions import Unpack

    from amanda.tools.weights import SelectionOptions


class FoldResult(Result):
    """The weights whose input factors are folded, and the parameters that absorb these factors.

    model: the model.  left: reasons why ops still divide inputs of other weights in a scope of the tool.
    """

    name: ClassVar[str] = "folded"
    title = "Folded factors"
    columns: ClassVar[Sequence[Column]] = (
        Column("weight"), Column("factors", show="{:,}".format, total=True), Column("divided"),
    )  # fmt: skip

    def __init__(self, model: nn.Module, folds: Sequence[Fold], left: Mapping[str, str]) -> None:
        self.model, self.left = model, dict(left)
        self._rows = [
            (fold.names[reader], len(fold.slots),
             ", ".join(fold.names[producer] for producer, _ in fold.producers))
            for fold in folds for reader, _ in fold.readers
        ]  # fmt: skip

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each weight."""
        return self._rows

    def _facts(self) -> Mapping[str, Any]:
        """Return reasons for weights that are not folded."""
        return {"left": self.left}

    def notes(self) -> Sequence[str]:
        """Return reasons for weights that are not folded."""
        return [
            f"The inputs of {name} are still divided in a scope: {why}." for name, why in self.left.items()
        ]


class FoldingTool(CalibratedTool):
    """Base class of calibrated tools that divide each input of a weight by a factor, `smoothing`.

    `prepare` before the calibration finds the parameters that can absorb factors; weights that multiply one
    input share factors.  `finalize` after the calibration writes the factors.
    """

    def __init__(self, **selected: Unpack[SelectionOptions]) -> None:
        super().__init__(**selected)
        self._fold_by_weight: dict[int, Fold] | None = None  # by identity; None before `prepare`
        self._reason_by_unfolded: dict[int, str] = {}
        self._factors_by_fold: dict[Fold, Tensor] = {}

    def compute_factors(
        self, calibrated: Sequence[tuple[CalibratedWeight, Tensor, InputSums]], slots: NDArray[Any] | None
    ) -> Tensor:
        """Return the factors of weights that multiply one input.

        calibrated: weight, matrix (outputs, K) and inputs of each.  slots: see `Fold`; None: all differ.
        """
        raise NotImplementedError

    def prepare(self, model: Callable[..., Any], *example: Any, **kwargs: Any) -> Any:
        """Find the parameters that make the inputs of products in a call of the model; call it at first.

        The weights that multiply one input share their factors in calibrations from now on: the largest
        magnitude of any, or the least error of all.  A normalisation, linear layer, convolution or parameter
        can take factors if products alone read what it makes: also through ReLU, pooling, a product of two
        tensors, and attention, of which it makes the values.  A cache of values that the model returns in an
        object of its own holds divided ones.
        The model runs three times, in evaluation mode, and is afterwards as it was.  Returns its result:
        after `load_state_dict`, with the state that was loaded.
        Raises QuantizeError for what is not a torch.nn.Module, and where factors would change the results.
        """
        result = self._set_folds(model, example, kwargs)
        return super().prepare(model, *example, **kwargs) if self.waiting_state() else result

    @deprecated(use="prepare", since="amanda-compress 0.2", gone="0.4")
    def plan_fold(self, model: nn.Module, *example: Any, **named: Any) -> None:
        """Find the parameters that can take factors.  Deprecated: use `prepare`."""
        self._set_folds(model, example, named)

    def _set_folds(self, model: Any, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Set the folds and the reasons for other weights; return the model's result.

        The model runs plain, followed by rules, and as a trial with factors.

        Raises QuantizeError as `prepare` does.
        """
        import torch

        from amanda.tools.prune.channels import TorchModel
        from amanda.tools.quantize.weights._scale_tracing import FactorTracing

        if not isinstance(model, torch.nn.Module):
            raise QuantizeError(
                f"{type(self).__name__}.prepare was given a {type(model).__name__}; give a torch.nn.Module"
            )
        torch_model, tracing = TorchModel(model), FactorTracing(model)
        # Outside of all tools, as the reference for the trial.
        with torch_model.evaluating(), amanda.disabled():
            result = model(*example, **named)
            expected_arrays = list(torch_model.float_arrays(result))
        with torch_model.evaluating():
            tracing.follow(example, named)
        identity_by_name = {  # of parameters; tied ones have several names
            f"{path}.{name}" if path else name: self.identity_of(parameter, module)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, parameter in module.named_parameters(recurse=False)
        }
        # Ops do not show every reader of a tensor, such as `tolist`: the trial run shows if results change.
        folds, reason_by_unfolded = find_folds(tracing, identity_by_name)
        with torch_model.evaluating(), amanda.disabled(), _with_trial_factors(model, folds):
            trial_arrays = list(torch_model.float_arrays(model(*example, **named)))
        _check_trial(model, expected_arrays, trial_arrays)
        self._fold_by_weight = {reader: fold for fold in folds for reader, _ in fold.readers}
        self._reason_by_unfolded = reason_by_unfolded
        return result

    @deprecated(use="finalize", since="amanda-compress 0.2", gone="0.4")
    def fold(self, model: nn.Module) -> FoldResult:
        """Write the factors into the parameters of a model, after `prepare`.  Deprecated: use `finalize`."""
        if self._fold_by_weight is None:
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
        undo: receives functions that take the changes back.  Raises QuantizeError for another model.
        """
        try:
            return self._write_folds(model, self._fold_by_weight or {}, undo)
        except ParameterError as error:
            raise QuantizeError(str(error)) from error

    def _write_folds(
        self, model: nn.Module, folds: Mapping[int, Fold], undo: list[Callable[[], Any]]
    ) -> FoldResult:
        """Scale all parameters of folds that can be written, and update the state of their weights.

        Raises QuantizeError for a model without a calibrated weight.
        """
        parameter_by_identity = {
            parameter.identity: parameter for parameter in parameter_store("torch").parameters(model)
        }
        # A part has factors for a part of the inputs, which no axis of the parameter takes.
        weight_by_identity = {
            weight.holder: weight for weight in self.weights if weight.is_ready and weight.part is None
        }
        if not parameter_by_identity.keys() & weight_by_identity.keys():
            raise QuantizeError(
                f"{type(self).__name__} has calibrated no weight of this {type(model).__name__}: call it "
                "within tool.calibrating() first"
            )
        written_folds, skipped = self._select_folds(folds, weight_by_identity, parameter_by_identity)
        # All multipliers of a parameter first: it is written once, and rounded once.
        scales_by_identity: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
        for fold in written_folds:
            # All readers of a fold have the same factors.
            first_reader, _ = fold.readers[0]
            for identity, axis, scale in fold.scales(weight_by_identity[first_reader]["smoothing"]):
                scales_by_identity[identity].append((axis, scale))
        for identity, scales in scales_by_identity.items():
            parameter_by_identity[identity].change(partial(_scale_axes, scales=scales), undo=undo)
        # The state of weights has to follow their parameters.
        readers = {identity for fold in written_folds for identity, _ in fold.readers}
        for identity, scales in scales_by_identity.items():
            if identity in weight_by_identity:
                # State and parameters are undone together.
                weight = weight_by_identity[identity]
                undo.append(_state_restorer(weight))
                new_value, inputs_are_folded = parameter_by_identity[identity].read(), identity in readers
                self.on_folded(weight, new_value, scales, inputs_are_folded)
        return FoldResult(model, written_folds, skipped)

    def _select_folds(
        self, folds: Mapping[int, Fold], weight_by_identity: Mapping[Any, CalibratedWeight],
        parameter_by_identity: Mapping[int, StoredParameter],
    ) -> tuple[list[Fold], dict[str, str]]:  # fmt: skip
        """Return the folds that can be written, and reasons for the other calibrated weights, by name."""
        if self._fold_by_weight is None:
            default_reason = "prepare(model, example) was not called before the calibration"
        else:
            default_reason = "prepare met no product with the whole parameter"
        selected: list[Fold] = []
        skipped: dict[str, str] = {}
        for weight in self.weights:
            # A part of a parameter has no fold.
            fold = None if weight.part is not None else folds.get(weight.holder)
            if fold in selected:  # by another weight of the same input
                continue
            if fold is None:
                why: str | None = self._reason_by_unfolded.get(weight.holder, default_reason)
            else:
                why = self._why_not_writable(fold, weight_by_identity, parameter_by_identity)
                if why is None:
                    selected.append(fold)
            if why is not None and weight.is_ready:
                skipped[weight.name] = why
        return selected, skipped

    def on_folded(
        self, weight: CalibratedWeight, value: Tensor, scales: Sequence[tuple[int, Tensor]],
        inputs_are_folded: bool,
    ) -> None:  # fmt: skip
        """Update the state of a weight whose parameter was scaled to `value`.

        scales: vectors by which the parameter was multiplied, each with its axis.
        inputs_are_folded: True if the factors of the weight's inputs are among these, so that they are now 1.
        """
        if inputs_are_folded:
            weight["smoothing"] = 1

    def solve(self, weight: CalibratedWeight, matrix: Tensor, input_sums: InputSums) -> None:
        """Compute and store the factors of a weight; those of a fold are computed at its first weight.

        Raises QuantizeError for NaN and infinity in the inputs of any weight of the fold.
        """
        fold = self._fold_of(weight)
        if fold is None:
            weight["smoothing"] = self.compute_factors([(weight, matrix, input_sums)], None)
            return
        # The first weight of a fold computes for its siblings; `_factors_by_fold` lasts for one calibration.
        if fold not in self._factors_by_fold:
            calibrated = []
            for sibling in self.weights:
                sums = sibling.input_sums
                # Any other reason than NOT_RUN is of an op whose inputs cannot be collected.
                if self._fold_of(sibling) is fold and sums is not None and sibling.skip_reason == NOT_RUN:
                    calibrated.append((sibling, sibling.matrix(sums.weight), sums))
            for sibling, _, sums in calibrated:
                sibling.check(sums)
            self._factors_by_fold[fold] = self.compute_factors(calibrated, fold.slots)
        weight["smoothing"] = self._factors_by_fold[fold]

    @contextmanager
    def _new_calibration(self) -> Iterator[None]:
        """Return a context that begins a calibration anew, with factors anew."""
        with super()._new_calibration():
            try:
                yield
            finally:
                self._factors_by_fold.clear()

    def _fold_of(self, weight: CalibratedWeight) -> Fold | None:
        """Return the fold whose input a weight multiplies.

        None without a fold, and where the weight has another number of factors than the fold has channels.
        """
        fold = None if weight.part is not None else (self._fold_by_weight or {}).get(weight.holder)
        factors = weight.get("smoothing")
        if fold is None or factors is None or len(factors) != len(fold.slots):
            return None
        return fold

    def _why_not_writable(
        self, fold: Fold, weight_by_identity: Mapping[Any, CalibratedWeight],
        parameter_by_identity: Mapping[int, StoredParameter],
    ) -> str | None:  # fmt: skip
        """Return why the factors of a fold cannot be written; None if they can."""
        part_holders = {weight.holder for weight in self.weights if weight.part is not None}
        for identity, _ in (*fold.readers, *fold.producers):
            if identity not in parameter_by_identity:
                return f"{fold.names[identity]} is no parameter of the model"
            if identity in part_holders:
                return f"ops read {fold.names[identity]} in parts"
        for identity, _ in fold.readers:
            if identity not in weight_by_identity:
                return f"the product with {fold.names[identity]} reads its input too, which has no factors"
            if len(weight_by_identity[identity]["smoothing"]) != len(fold.slots):
                return "its factors differ within the window of a convolution"
        first_factors, *further_factors = [
            weight_by_identity[identity]["smoothing"] for identity, _ in fold.readers
        ]
        # All channels of a slot have to have the factor of the first channel of the slot.
        _, first_channels = np.unique(fold.slots, return_index=True)
        factors_by_slot = first_factors[first_channels[fold.slots]]
        if not all(bool((factors == first_factors).all()) for factors in [*further_factors, factors_by_slot]):
            return "its factors are of a calibration before prepare, and others of the same input differ"
        return None


def reduce_by_slot(values: Tensor, slots: NDArray[Any] | None, reduction: str) -> Tensor:
    """Return for each channel the amax or mean of the values of all channels that have its factor.

    reduction: "amax" or "mean".  slots: see `Fold`; None: each channel has a factor of its own.
    """
    import torch

    if slots is None:
        return values
    slot_of_channel = torch.as_tensor(slots, device=values.device)
    # Channels of one slot get the same factor, such as heads that share a value in grouped-query attention.
    value_by_slot = values.new_zeros(int(slots.max()) + 1)
    value_by_slot = value_by_slot.scatter_reduce(0, slot_of_channel, values, reduction, include_self=False)
    return value_by_slot[slot_of_channel]


def _check_trial(
    model: Any, expected_arrays: Sequence[tuple[Any, float]], trial_arrays: Sequence[tuple[Any, float]]
) -> None:
    """Raise QuantizeError if a model computes something else with factors; arrays: each with its epsilon."""
    for (expected_values, epsilon), (values, _) in zip(expected_arrays, trial_arrays, strict=True):
        if not expected_values.size:
            continue
        # Half of the digits may differ, as sums are rounded otherwise.
        bound = max(np.abs(expected_values).max() * epsilon**0.5, epsilon)
        # `not <=` instead of `>`: NaN compares False and has to raise.
        if not np.abs(expected_values - values).max() <= bound:
            raise QuantizeError(
                f"the {type(model).__name__} computes something else with factors in its parameters: it "
                "reads a tensor by other means than ops, draws random numbers, or computes NaN"
            )


@contextmanager
def _with_trial_factors(model: Any, folds: Sequence[Fold]) -> Iterator[None]:
    """Return a context with trial factors in the parameters: powers of two; its end restores parameters."""
    import torch

    parameter_by_identity = {
        parameter.identity: parameter for parameter in parameter_store("torch").parameters(model)
    }
    undo: list[Callable[[], Any]] = []
    try:
        for fold in folds:
            # Neighbours differ, so that a permutation of channels shows too.
            factors = torch.as_tensor(2.0 ** (fold.slots % 3 - 1))
            for identity, axis, scale in fold.scales(factors):
                parameter_by_identity[identity].change(
                    partial(_scale_axes, scales=[(axis, scale)]), undo=undo
                )
        yield
    finally:
        for write_back in reversed(undo):
            write_back()


def _scale_axes(value: Tensor, scales: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Return a tensor times vectors, rounded once to its own type.  scales: pairs of axis and vector."""
    import torch

    # Apple's GPUs have no float64.
    scaled = value.to(torch.float64 if value.device.type != "mps" else torch.float32)
    for axis, scale in scales:
        extents = [-1 if i == axis else 1 for i in range(value.ndim)]
        scaled = scaled * scale.to(scaled).reshape(extents)
    return scaled.to(value.dtype)


def _state_restorer(weight: CalibratedWeight) -> Callable[[], None]:
    """Return a function that restores the present state of a weight: factors, scales and sums."""
    state = {
        name: weight[name].clone() for name in ("smoothing", "scale", "sums") if weight.get(name) is not None
    }

    def restore() -> None:
        for name, value in state.items():
            weight[name] = value

    return restore

"""Quantizers: the scale of one tensor that an op reads, the quantised tensor, and its noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from amanda.tools.kit import tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import backend_of, distributed, whole
from amanda.tools.quantize._fake_quantize import (
    Groups,
    QuantizeError,
    Scale,
    as_array,
    choose_qparams,
    fake_quantize,
    fake_quantize_gradient,
    straight_through,
)
from amanda.tools.quantize._observers import Observer, extremes
from amanda.tools.quantize._result import sqnr

if TYPE_CHECKING:
    from amanda.tools.quantize._tool import QuantizeOptions


class Noise:
    """Sums of squares of values and of their quantisation errors, over executions."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0

    def add(self, x: Any, quantised: Any) -> None:
        """Add a tensor and the quantised tensor."""
        # Noise of 16 bits is 96 dB below the signal: sums in float32 would not hold both.
        exact, rounded = (as_array(tensor).astype(np.float64) for tensor in (x, quantised))
        self.signal += float(np.square(exact).sum())
        self.noise += float(np.square(rounded - exact).sum())

    @property
    def sqnr(self) -> float | None:
        """Signal-to-quantisation-noise ratio in dB, infinite without noise; None before a measurement."""
        return sqnr(self.signal, self.noise) if self.signal or self.noise else None


class Quantizer:
    """The quantizer of one tensor of one op, with a scale from a calibration.

    A weight without a calibration gets the scale of its first value.
    name: "weight", or "input 0" by its position in the op's schema.  axes: of the channels that have scales
    of their own.  groups: of a weight that has scales for groups, whose rows then have the scales.
    parts: names of the state, such as "scale", each with True if trained.  keep: `Tool.keep` for the op.
    has_scale: True once there is a scale.  calibrated, executions: numbers of values that calibrated it, and
    that were quantised.
    qparams: arguments of the last `fake_quantize` after the value.
    Takes loaded state; raises QuantizeError for state of another shape.
    """

    def __init__(
        self, name: str, is_weight: bool, axes: Sequence[int], options: QuantizeOptions,
        parts: Mapping[str, bool], value: Any, keep: Callable[..., Any], groups: Groups | None = None,
    ) -> None:  # fmt: skip
        self.name, self.is_weight, self.options, self.groups = name, is_weight, options, groups
        self.axes = tuple(axes) if groups is None else (0,)
        # The operations are looked up once, and not by the type of each value.
        self.xp, self.grid, self.noise = tensors_of(value), options.grid(is_weight), Noise()
        self.observer: Observer | None = None
        self.state: dict[str, Any] = {}
        self.trained = [part for part, is_trained in parts.items() if is_trained]
        self.collected: dict[str, Any] = {}  # gradients of the trained state
        self.qparams: tuple[Any, ...] = ()
        self.calibrated = self.executions = 0
        if groups is not None:
            channels = prod(value.shape) // groups.size
        else:
            channels = prod(value.shape[axis] for axis in axes)
        # NaN marks a scale that is not set: it saves and loads as any number, and spoils a result that uses
        # it too early.
        unset = np.full((channels,) if self.axes else (), np.nan, np.float32)
        for part, is_trained in parts.items():
            # On the device of the first value; a trained part is a parameter of the framework.
            load = partial(self.xp.state, like=value, trained=is_trained)
            key = f"{name}.{part}".replace(" ", "")
            array = self.state[part] = keep(key, partial(load, unset), load=load, renew=self.xp.update)
            # A scalar serves all channels, as in files of per_channel=False.
            if tuple(array.shape) not in (unset.shape, ()):
                raise QuantizeError(
                    f"{part} that was loaded for {name} is of shape {tuple(array.shape)}, not {unset.shape}: "
                    "it belongs to another model"
                )
        # Read once, since a look at the array waits for the device.
        self.has_scale = bool(parts) and bool(np.isfinite(self.array("scale")).all())

    @property
    def group_size(self) -> int | None:
        """The number of consecutive inputs that share a scale; None where all of an output do."""
        return None if self.groups is None or self.groups.are_outputs else self.groups.size

    def observe(self, x: Any) -> None:
        """Add a value to the calibration, of a tensor in shards the whole value."""
        self._observe(self._to_groups(whole(x)))

    def __call__(self, x: Any, frozen: bool, qparams: Sequence[Any] = ()) -> Any:
        """Return the quantised value; may set the scale before, and `qparams` to what was computed with.

        frozen: keep the scale as it is.  qparams: of the first execution, scale and zero point first, for a
        recomputation, which then changes no scale.
        """
        full = whole(x)  # of a tensor in shards, a scale is of all of it
        rows = self._to_groups(full)
        quantised = self._fake_quantise(rows, *qparams[:2]) if qparams else self._quantise(rows, frozen)
        quantised = quantised if self.groups is None else self.groups.joined(quantised, x.shape)
        # The program goes on with shards, as it had them.
        return quantised if full is x else distributed(quantised, x, placed=True)

    def clipped_gradient(self, x: Any, *qparams: Any, gradient: Any) -> Any:
        """Return the straight-through gradient, 0 where the value was clipped; in shards as `gradient` is."""
        clipped_gradient = fake_quantize_gradient(
            self._to_groups(whole(gradient)), self._to_groups(whole(x)), *qparams
        )
        if self.groups is not None:
            clipped_gradient = self.groups.joined(clipped_gradient, x.shape)
        return distributed(clipped_gradient, gradient, placed=True)

    def _to_groups(self, x: Any) -> Any:
        """Return a value as (groups, size); unchanged without groups."""
        return x if self.groups is None else self.groups.split(x)

    def _observe(self, x: Any) -> None:
        """Add a value to the calibration, and begin one if none runs."""
        if self.observer is None:
            self.observer = self.options.make_observer(self.is_weight, self.axes)
        self.observer.observe(x)

    def finish_calibration(self) -> None:
        """End the calibration: set the scale from the observed range, if a value was observed."""
        if self.observer is not None and self.observer.seen:
            self.has_scale = False  # so that a loaded zero point is replaced too
            self._set_scale(*self.observer.range())
        self.forget_observations()

    def forget_observations(self) -> None:
        """Forget the values that were observed, and how many: `calibration` counts from 0 again."""
        self.observer, self.calibrated = None, 0

    def _set_scale(self, least: Any, most: Any) -> tuple[Any, Any]:
        """Store scale, zero point or offset, and ends of a range as state; return scale and zero point."""
        scale, zero_point = self._choose_qparams(least, most)
        self._assign_state(scale=scale, least=least, most=most)
        if "offset" in self.state:
            # LSQ+ learns an offset in the units of the value, not an integer, which has no gradient.
            self._assign_state(offset=-zero_point * scale)
        # The zero point of a symmetric grid is always 0: a write at each step would repeat it.
        if not (self.has_scale and self.grid.symmetric):
            self._assign_state(zero_point=zero_point)
        self.has_scale = True
        return scale, zero_point

    def _quantise(self, x: Any, frozen: bool) -> Any:
        """Return the quantised value; a weight without a scale is calibrated by this value.

        Raises QuantizeError for an activation without a scale.
        """
        if not self.has_scale:
            if not self.is_weight:
                raise QuantizeError(
                    f"{self.name} has no scale: calibrate with batches that execute this op, "
                    "`with amanda.apply(tool), tool.calibrating(): ...`, or set `calibration`; its shape is "
                    f"{tuple(x.shape)}, in {backend_of(x)}"
                )
            # A weight is there before any batch: its first value calibrates it.
            self._observe(x)
            self.finish_calibration()
        return self._fake_quantise(x, self._read("scale"), self._read("zero_point"))

    def scale(self) -> Scale | None:
        """Return the scale in arrays, an offset as a fractional zero point; None without a lasting scale."""
        if not self.has_scale or not self.state:
            return None
        scale = self.array("scale")
        if "offset" in self.state:
            # Results and files have zero points; that of a learned offset is a fraction.
            zero_point = -self.array("offset") / scale
        else:
            zero_point = self.array("zero_point") if "zero_point" in self.state else scale * 0
        return Scale(scale, zero_point, self.grid, self.axes, self.groups)

    def array(self, part: str) -> Any:
        """Return a part of the state as an array."""
        return as_array(self._read(part))

    def _read(self, part: str) -> Any:
        return self.xp.read(self.state[part])

    def _assign_state(self, **values: Any) -> None:
        """Write values into the parts of the state that exist."""
        for part, value in values.items():
            if part in self.state:
                self.xp.assign(self.state[part], value)

    def _choose_qparams(self, least: Any, most: Any) -> tuple[Any, Any]:
        return choose_qparams(least, most, self.grid, self.options.rounding)

    def _fake_quantise(self, x: Any, scale: Any, zero_point: Any) -> Any:
        """Return the quantised value, with a gradient if the method trains.

        Stores in `qparams` all that the value was computed with: scale, zero point, grid, axes, rounding.
        """
        # Only training needs a gradient, for which some kernels write a mask.
        compute = straight_through if self.options.trains else fake_quantize
        self.qparams = scale, zero_point, self.grid, self.axes, self.options.rounding
        return compute(x, *self.qparams)


class DynamicQuantizer(Quantizer):
    """A quantizer that computes a new scale for each value, without calibration or state."""

    def observe(self, x: Any) -> None:
        """Do nothing: each value has its own scale."""

    def _quantise(self, x: Any, frozen: bool) -> Any:
        """Return the value, quantised by a scale of its own: from the extremes, or the `weight_observer`."""
        if not self.is_weight or self.options.weight_observer == "minmax":
            return self._fake_quantise(x, *self._choose_qparams(*extremes(x, self.axes)))
        observer = self.options.make_observer(self.is_weight, self.axes)
        observer.observe(x)
        # Observers return arrays of NumPy, and the values may be on a GPU.
        wide = self.xp.wide(x)
        scale, zero_point = self._choose_qparams(*observer.range())
        return self._fake_quantise(x, self.xp.cast(scale, wide), self.xp.cast(zero_point, wide))


class QatQuantizer(Quantizer):
    """A quantizer for training, with straight-through gradients, whose scale follows the values until frozen.

    A weight has the scale of its present value, an activation that of moving averages of the extremes.
    """

    def _quantise(self, x: Any, frozen: bool) -> Any:
        """Set the scale, unless it is frozen and there is one; return the value quantised by it.

        A weight's scale is that of this value, an activation's that of moving averages of the extremes.
        The gradient passes where the value was not clipped.
        """
        if frozen and self.has_scale:
            return super()._quantise(x, frozen)
        # Of each value: the weight changes with each step of the optimizer.
        least, most = extremes(x, self.axes)
        if self.has_scale and not self.is_weight:
            least, most = self._moving_average("least", least), self._moving_average("most", most)
        return self._fake_quantise(x, *self._set_scale(least, most))

    def _moving_average(self, part: str, new: Any) -> Any:
        """Return the moving average of a bound with a new value; part: "least" or "most" of the state."""
        old = tensors_of(new).cast(self._read(part), new)
        # In this form as in torch.ao's MovingAverageMinMaxObserver, so that ranges are bit-equal.
        return old + (new - old) * np.float32(self.options.averaging)

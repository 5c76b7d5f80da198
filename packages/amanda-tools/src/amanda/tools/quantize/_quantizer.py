"""One tensor that an op reads: how its scale is found, and what takes its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from amanda.tools.kit import Tensors, tensors_of
from amanda.tools.quantize._arithmetic import as_array, group_size
from amanda.tools.quantize._fake import fake_quantize, straight_through
from amanda.tools.quantize._grid import Grid, QuantizeError, choose_qparams
from amanda.tools.quantize._lsq import gradient_scale, lsq_gradients, lsq_plus_scale, lsq_quantize, lsq_scale
from amanda.tools.quantize._observers import MseObserver, Observer, extremes
from amanda.tools.quantize._options import Options
from amanda.tools.quantize._result import Noise

Keep = Callable[[str, Any, bool], Any]
"""Returns state of the tool by name: a number or an array that it starts from, and True if it is trained."""


class Quantizer(ABC):
    """One tensor of one op.

    name: "weight", or "input 0" by its place in the op's schema.  axes: of the channels that have scales
    of their own.  settled: True once there is a scale.
    """

    parts: Mapping[str, bool] = {"scale": False, "zero_point": False}
    """Names of the state, each with True if it is trained."""

    def __init__(
        self, name: str, weight: bool, axes: Sequence[int], channels: int, options: Options, xp: Tensors
    ) -> None:
        self.name, self.is_weight, self.axes, self.channels = name, weight, tuple(axes), channels
        self.options, self.xp, self.grid = options, xp, options.grid(weight)
        self.state: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}
        self.noise = Noise()
        self.observer: Observer | None = None
        self.settled = False

    def keep(self, keep: Keep) -> None:
        """Make the state, or find what was loaded."""
        empty = np.full((self.channels,) if self.axes else (), np.nan, np.float32)
        for part, trained in self.parts.items():
            made = self.state[part] = keep(f"{self.name}.{part}", empty, trained)
            if tuple(made.shape) not in (empty.shape, ()):
                raise QuantizeError(
                    f"{part} that was loaded for {self.name} is of shape {tuple(made.shape)}, "
                    f"not {empty.shape}: it belongs to another model"
                )
        self.settled = bool(self.state) and bool(np.isfinite(self._array("scale")).all())

    def observe(self, x: Any) -> None:
        """Take a value of a calibration into account."""
        if self.observer is None:
            self.observer = self.options.make_observer(self.is_weight, self.axes)
        self.observer.observe(x)

    def settle(self) -> None:
        """Take the scale that follows from what was observed, if anything was."""
        if self.observer is not None and self.observer.seen:
            self._start_from(*self.observer.range())
            self.settled = True
        self.observer = None

    def _start_from(self, least: Any, most: Any) -> None:
        scale, zero_point = self._qparams(least, most)
        self._assign(scale=scale, zero_point=zero_point)

    @abstractmethod
    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return what takes the place of `x`."""

    def qparams(self) -> tuple[Any, Any] | None:
        """Return scale and zero point as arrays; None as long as there are none."""
        if not self.settled or not self.state:
            return None
        return self._array("scale"), self._array("zero_point")

    def arrays(self) -> dict[str, Any]:
        """Return state as arrays of float32, zero points of int32; nothing as long as there is no scale."""
        kept = self.state if self.settled else ()
        types = {part: "int32" if part == "zero_point" else "float32" for part in kept}
        return {part: self._array(part).astype(dtype) for part, dtype in types.items()}

    def _array(self, part: str) -> Any:
        return as_array(self._read(part))

    def _read(self, part: str) -> Any:
        return self.xp.read(self.state[part])

    def _assign(self, **values: Any) -> None:
        for part, value in values.items():
            self.xp.assign(self.state[part], value)

    def _qparams(self, least: Any, most: Any) -> tuple[Any, Any]:
        return choose_qparams(least, most, self.grid, self.options.rounding)

    def _fake(self, x: Any, scale: Any, zero_point: Any) -> Any:
        compute = straight_through if self.options.trains else fake_quantize
        return compute(x, scale, zero_point, self.grid, self.axes, self.options.rounding)


class Static(Quantizer):
    """The scale of calibration; that of a weight, without calibration, of what it is at first."""

    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return the value on the grid."""
        if not self.settled:
            if not self.is_weight:
                raise QuantizeError(
                    f"{self.name} has no scale: calibrate with batches that execute this op, "
                    "`with amanda.apply(tool), tool.calibrating(): ...`, or set `calibration`"
                )
            self.observe(x)
            self.settle()
        return self._fake(x, self._read("scale"), self._read("zero_point"))


class Fresh(Quantizer):
    """The scale of the value itself, at each execution: there is nothing to calibrate."""

    parts: Mapping[str, bool] = {}

    def observe(self, x: Any) -> None:
        """Do nothing."""

    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return the value on a grid of its own."""
        if not self.is_weight or self.options.weight_observer == "minmax":
            return self._fake(x, *self._qparams(*extremes(x, self.axes)))
        observer = self.options.make_observer(self.is_weight, self.axes)
        observer.observe(x)
        wide = self.xp.wide(x)
        return self._fake(x, *(self.xp.cast(one, wide) for one in self._qparams(*observer.range())))


class Trained(Quantizer):
    """Training with the straight-through estimator: the scale follows the values until it is frozen.

    That of a weight is the present weight's; that of an activation comes of moving averages of its extremes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.is_weight:
            self.parts = {**self.parts, "least": False, "most": False}

    def _start_from(self, least: Any, most: Any) -> None:
        if not self.is_weight:
            self._assign(least=least, most=most)
        super()._start_from(least, most)

    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return the value on the grid, whose gradient passes where it was not clipped."""
        if frozen and self.settled:
            return self._fake(x, self._read("scale"), self._read("zero_point"))
        return self._fake(x, *self._follow(x))

    def _follow(self, x: Any) -> tuple[Any, Any]:
        """Return scale and zero point with this value taken into account."""
        least, most = extremes(x, self.axes)
        if not self.is_weight:
            if self.settled:
                least, most = self._averaged("least", least), self._averaged("most", most)
            self._assign(least=least, most=most)
        scale, zero_point = self._qparams(least, most)
        self._assign(scale=scale)
        if not (self.settled and self.grid.symmetric):  # whose zero point is zero
            self._assign(zero_point=zero_point)
        self.settled = True
        return scale, zero_point

    def _averaged(self, part: str, new: Any) -> Any:
        old = tensors_of(new).cast(self._read(part), new)
        return old + (new - old) * np.float32(self.options.averaging)


class Learned(Quantizer):
    """LSQ and LSQ+: the scale, and an offset of LSQ+'s activations, are parameters of the tool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_offset = self.options.method == "lsq+" and not self.is_weight
        if not self.is_weight:
            self.grid = Grid.of(self.options.activation_bits or 8, symmetric=False)
        other = {"offset": True} if self.has_offset else {} if self.is_weight else {"low": False}
        self.parts = {"scale": True, **other}

    def keep(self, keep: Keep) -> None:
        """Make the state; LSQ's activations are unsigned where the first are."""
        super().keep(keep)
        if self.settled and "low" in self.state:
            self._shift_to(int(self._array("low")))

    def _shift_to(self, low: int) -> None:
        self.grid = Grid(low, low + self.grid.high - self.grid.low)

    def observe(self, x: Any) -> None:
        """Start the scale, unless there is one, from the first value; LSQ+'s from the range of all."""
        if self.settled:
            return
        if self.has_offset:
            self.observer = self.observer or MseObserver(self.grid)
            self.observer.observe(x)
            return
        x = self.xp.detach(x)
        if "low" in self.state:
            signed = bool(as_array(x).min(initial=0) < 0)
            self._shift_to(-((self.grid.high - self.grid.low + 1) // 2) if signed else 0)
            self._assign(low=self.grid.low)
        start = lsq_plus_scale if self.options.method == "lsq+" else lsq_scale
        self._assign(scale=start(x, self.grid, self.axes))
        self.settled = True

    def _start_from(self, least: Any, most: Any) -> None:
        scale, zero_point = self._qparams(least, most)
        self._assign(scale=scale, offset=-zero_point * scale)

    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return the value on the grid, with gradients for itself, the scale and the offset."""
        if not self.settled:
            self.observe(x)
            self.settle()
        grid, axes = self.grid, self.axes
        trained = [part for part, is_trained in self.parts.items() if is_trained]
        count = group_size(x, axes) // (1 if self.is_weight or not x.shape else max(x.shape[0], 1))
        factor = gradient_scale(max(count, 1), grid)

        def forward(x: Any, scale: Any, offset: Any = None) -> Any:
            return lsq_quantize(x, scale, grid, offset, axes)

        def backward(gradient: Any, x: Any, scale: Any, offset: Any = None) -> Any:
            return lsq_gradients(gradient, x, scale, grid, offset, axes, factor)

        def collect(*gradients: Any) -> None:
            for part, gradient in zip(trained, gradients, strict=True):
                earlier = self.collected.get(part)
                self.collected[part] = gradient if earlier is None else earlier + gradient

        return self.xp.with_gradient(forward, backward, [x, *map(self._read, trained)], collect)

    def qparams(self) -> tuple[Any, Any] | None:
        """Return the scale, and the zero point that an offset comes to, which is no integer."""
        if not self.settled:
            return None
        scale = self._array("scale")
        return scale, -self._array("offset") / scale if self.has_offset else scale * 0


QUANTIZERS: Mapping[str, type[Quantizer]] = {
    "static": Static, "dynamic": Fresh, "qat": Trained, "lsq": Learned, "lsq+": Learned
}  # fmt: skip
"""Quantizers of activations by method; "dynamic" has Static ones for weights."""

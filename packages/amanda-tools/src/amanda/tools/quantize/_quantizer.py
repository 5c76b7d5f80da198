"""One tensor that an op reads: how its scale is found, and what takes its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from amanda.tools.kit import tensors_of
from amanda.tools.quantize._arithmetic import as_array, group_size
from amanda.tools.quantize._fake import fake_quantize, fake_quantize_gradient
from amanda.tools.quantize._grid import Grid, QuantizeError, choose_qparams
from amanda.tools.quantize._kernels import kernel_for
from amanda.tools.quantize._lsq import gradient_scale, lsq_gradients, lsq_plus_scale, lsq_quantize, lsq_scale
from amanda.tools.quantize._noise import Noise
from amanda.tools.quantize._observers import MseObserver, Observer, extremes
from amanda.tools.quantize._options import Options

Keep = Callable[[str, Any, bool], Any]
"""Gives state of the tool by name: a number or an array that it starts from, and whether it is trained."""


class Quantizer(ABC):
    """One tensor of one op.

    name: "weight", or "input 0" by its place in the op's schema.  axes: of the channels that have scales
    of their own.  settled: whether there is a scale.
    """

    def __init__(
        self, name: str, weight: bool, axes: Sequence[int], channels: int, options: Options, xp: Any
    ) -> None:
        self.name, self.is_weight, self.axes, self.channels = name, weight, tuple(axes), channels
        self.options, self.xp = options, xp
        self.grid: Grid = options.grid(weight)
        self.state: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}
        self.noise = Noise()
        self.observer: Observer | None = None
        self.settled = False

    parts: Mapping[str, bool] = {"scale": False, "zero_point": False}
    """What is kept of it, and whether it is trained."""

    def keep(self, keep: Keep) -> None:
        """Make its state, or find what was loaded."""
        empty = np.full((self.channels,) if self.axes else (), np.nan, np.float32)
        for part, trained in self.parts.items():
            made = self.state[part] = keep(f"{self.name}.{part}", empty, trained)
            if tuple(made.shape) not in (empty.shape, ()):
                raise QuantizeError(
                    f"{part} that was loaded for {self.name} is of shape {tuple(made.shape)}, "
                    f"not {empty.shape}: it belongs to another model"
                )
        self.settled = bool(self.state) and bool(np.isfinite(self._read("scale")).all())

    def _read(self, part: str) -> Any:
        return as_array(self.xp.read(self.state[part]))

    def observe(self, x: Any) -> None:
        """See a value in calibration."""
        if self.observer is None:
            self.observer = self.options.make_observer(self.is_weight, self.axes)
        self.observer.observe(x)

    def settle(self) -> None:
        """Take the scale that follows from what was seen, if anything was."""
        if self.observer is not None and self.observer.seen:
            self._assign(*self._qparams(*self.observer.range()))
            self.settled = True
        self.observer = None

    def _qparams(self, least: Any, most: Any) -> tuple[Any, Any]:
        return choose_qparams(least, most, self.grid, self.options.rounding)

    def _assign(self, scale: Any, zero_point: Any) -> None:
        self.xp.assign(self.state["scale"], scale)
        self.xp.assign(self.state["zero_point"], zero_point)

    def _fake(self, x: Any, scale: Any, zero_point: Any) -> Any:
        return fake_quantize(x, scale, zero_point, self.grid, self.axes, self.options.rounding)

    @abstractmethod
    def __call__(self, x: Any, frozen: bool) -> Any:
        """Return the quantised `x`."""

    def arrays(self) -> dict[str, Any]:
        """Return the state as arrays of float32, zero points as int32; nothing without a scale."""
        found = {part: self._read(part) for part in self.state} if self.settled else {}
        return {
            part: one.astype("int32" if part == "zero_point" else "float32") for part, one in found.items()
        }

    def qparams(self) -> tuple[Any, Any] | None:
        """Scale and zero point as arrays; None as long as there are none."""
        if not self.settled or not self.state:
            return None
        return self._read("scale"), self._read("zero_point")


class Static(Quantizer):
    """The scale of calibration; that of a weight, without calibration, of what it is at first."""

    def __call__(self, x: Any, frozen: bool) -> Any:
        """The value on the grid."""
        if not self.settled:
            if not self.is_weight:
                raise QuantizeError(
                    f"{self.name} has no scale: calibrate with batches that execute this op, "
                    "`with amanda.apply(tool), tool.calibrating(): ...`, or set `calibration`"
                )
            self.observe(x)
            self.settle()
        return self._fake(x, self.xp.read(self.state["scale"]), self.xp.read(self.state["zero_point"]))


class Dynamic(Quantizer):
    """The scale of the value itself, at each execution."""

    parts: Mapping[str, bool] = {}

    def observe(self, x: Any) -> None:
        """Nothing: there is nothing to calibrate."""

    def __call__(self, x: Any, frozen: bool) -> Any:
        """The value on a grid of its own."""
        return self._fake(x, *self._qparams(*extremes(x, self.axes)))


class Anew(Quantizer):
    """The scale of what is read this time, for a weight of which the data choose the elements."""

    parts: Mapping[str, bool] = {}

    def observe(self, x: Any) -> None:
        """Nothing: each value has a scale of its own."""

    def __call__(self, x: Any, frozen: bool) -> Any:
        """The value on a grid of its own, whose gradient passes where it was not clipped."""
        if self.options.weight_observer == "minmax":
            extent = extremes(self.xp.detach(x), self.axes)
        else:
            observer = self.options.make_observer(self.is_weight, self.axes)
            observer.observe(self.xp.detach(x))
            extent = observer.range()
        scale, zero_point = (self.xp.cast(one, self.xp.wide(x)) for one in self._qparams(*extent))
        grid, axes, rounding = self.grid, self.axes, self.options.rounding

        def forward(x: Any) -> Any:
            return fake_quantize(x, scale, zero_point, grid, axes, rounding)

        def backward(gradient: Any, x: Any) -> tuple[Any]:
            return (fake_quantize_gradient(gradient, x, scale, zero_point, grid, axes, rounding),)

        return self.xp.with_gradient(forward, backward, [x])


class Trained(Quantizer):
    """Training with the straight-through estimator: the scale follows the values until it is frozen.

    That of a weight is the present weight's; that of an activation comes of moving averages of its extremes.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if not self.is_weight:
            self.parts = {**self.parts, "least": False, "most": False}

    def settle(self) -> None:
        """Take the range of calibration as what the averages start from."""
        if self.observer is not None and self.observer.seen and not self.is_weight:
            for part, value in zip(("least", "most"), self.observer.range(), strict=True):
                self.xp.assign(self.state[part], value)
        super().settle()

    def __call__(self, x: Any, frozen: bool) -> Any:
        """The value on the grid, whose gradient passes where it was not clipped."""
        grid, axes, rounding = self.grid, self.axes, self.options.rounding
        if frozen and self.settled:
            scale, zero_point = (self.xp.read(self.state[part]) for part in ("scale", "zero_point"))
        else:
            scale, zero_point = self._follow(x)
        if rounding == "half_even" and kernel_for(x, axes) is not None:
            return fake_quantize(x, scale, zero_point, grid, axes)

        def forward(x: Any) -> Any:
            return fake_quantize(x, scale, zero_point, grid, axes, rounding)

        def backward(gradient: Any, x: Any) -> tuple[Any]:
            return (fake_quantize_gradient(gradient, x, scale, zero_point, grid, axes, rounding),)

        return self.xp.with_gradient(forward, backward, [x])

    def _follow(self, x: Any) -> tuple[Any, Any]:
        """Scale and zero point with this value taken into account."""
        least, most = extremes(x, self.axes)
        if not self.is_weight:
            if self.settled:
                least, most = self._averaged("least", least), self._averaged("most", most)
            self.xp.assign(self.state["least"], least)
            self.xp.assign(self.state["most"], most)
        scale, zero_point = self._qparams(least, most)
        self.xp.assign(self.state["scale"], scale)
        if not (self.settled and self.grid.symmetric):  # whose zero point is zero
            self.xp.assign(self.state["zero_point"], zero_point)
        self.settled = True
        return scale, zero_point

    def _averaged(self, part: str, new: Any) -> Any:
        old = tensors_of(new).cast(self.xp.read(self.state[part]), new)
        return old + (new - old) * np.float32(self.options.averaging)


class Learned(Quantizer):
    """LSQ and LSQ+: the scale, and an offset of LSQ+'s activations, are parameters of the tool."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has_offset = self.options.method == "lsq+" and not self.is_weight
        self.parts = {"scale": True, "offset": True} if self.has_offset else {"scale": True}
        if not self.is_weight and not self.has_offset:
            self.parts = {**self.parts, "low": False}

    def keep(self, keep: Keep) -> None:
        """Make its state; LSQ's activations are unsigned where the first are."""
        if not self.is_weight:
            self.grid = Grid.of(self.options.activation_bits or 8, symmetric=False)
        super().keep(keep)
        if self.settled and "low" in self.state:
            self._shift_to(int(self._read("low")))

    def _shift_to(self, low: int) -> None:
        self.grid = Grid(low, low + self.grid.high - self.grid.low)

    def observe(self, x: Any) -> None:
        """See a value in calibration: the scale starts from the first, LSQ+'s from the range of all.

        One that is there stays.
        """
        if self.settled:
            return
        if self.has_offset:
            self.observer = self.observer or MseObserver(self.grid)
            self.observer.observe(x)
        else:
            self._start(x)

    def settle(self) -> None:
        """Take what LSQ+ starts from."""
        if self.observer is not None and self.observer.seen:
            scale, zero_point = self._qparams(*self.observer.range())
            self.xp.assign(self.state["scale"], scale)
            self.xp.assign(self.state["offset"], -zero_point * scale)
            self.settled = True
        self.observer = None

    def _start(self, x: Any) -> None:
        x = self.xp.detach(x)
        if "low" in self.state:
            signed = bool(as_array(x).min(initial=0) < 0)
            self._shift_to(-((self.grid.high - self.grid.low + 1) // 2) if signed else 0)
            self.xp.assign(self.state["low"], self.grid.low)
        start = lsq_plus_scale if self.options.method == "lsq+" else lsq_scale
        self.xp.assign(self.state["scale"], start(x, self.grid, self.axes))
        self.settled = True

    def __call__(self, x: Any, frozen: bool) -> Any:
        """The value on the grid, with gradients for itself, the scale and the offset."""
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

        tensors = [x, *(self.xp.read(self.state[part]) for part in trained)]
        return self.xp.with_gradient(forward, backward, tensors, collect)

    def qparams(self) -> tuple[Any, Any] | None:
        """Scale, and the zero point that an offset comes to, which is no integer."""
        if not self.settled:
            return None
        scale = self._read("scale")
        return scale, -self._read("offset") / scale if self.has_offset else scale * 0


def make_quantizer(
    name: str, weight: bool, axes: Sequence[int], channels: int, options: Options, xp: Any, anew: bool = False
) -> Quantizer:
    """The quantizer of a tensor, by the method; anew: its elements are others each time."""
    kind: type[Quantizer] = Anew if anew else {
        "static": Static, "dynamic": Static if weight else Dynamic, "qat": Trained, "lsq": Learned,
        "lsq+": Learned,
    }[options.method]  # fmt: skip
    return kind(name, weight, axes, channels, options, xp)

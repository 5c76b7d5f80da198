"""Sweeps of sparsity and of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

from amanda.options import Name, NotEmpty, Range, Share, checked
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.sweep._errors import SweepError
from amanda.tools.sweep._prices import Cost
from amanda.tools.sweep._sweep import Sweep

Number = TypeVar("Number", int, float)


class SparsitySweep(Sweep[float]):
    """Prunes the weight of each op alone, and all of them, ever more.

    evaluate, metric, progress, compiled: see `Sweep`.  options: of `PruneTool`, such as pattern and type.
    cost: "size", the bytes of weights that are not zero, without indices, "flops" or a function: see `Sweep`.
    With scope="global" the weights are ranked together in a first evaluation of each point; an importance of
    inputs is computed of these, and one of gradients needs an evaluation that runs a backward pass.

    Raises what PruneTool does for an option or a level that cannot be.

    >>> sweep = SparsitySweep(lambda: 1.0, sparsities=[0.5, 0.9], pattern="structured", progress=False)
    """

    @checked(error=SweepError)
    def __init__(
        self,
        evaluate: Callable[[], Any],
        sparsities: Annotated[Iterable[Share], NotEmpty] = (0.3, 0.5, 0.7, 0.8, 0.9),
        metric: Name = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
        cost: Cost = "size",
        **options: Any,
    ) -> None:
        def make(sparsity: float) -> PruneTool:
            return PruneTool(sparsity=sparsity, **options)

        def prepare(tool: PruneTool) -> None:
            if tool.needs_preparation:
                with tool.calibrating():
                    evaluate()

        mild = _ordered("sparsities", sparsities)
        super().__init__(
            evaluate, make, mild, prepare, "sparsity", metric, progress, compiled, cost,
            lambda level, weight: 1 - level,
        )  # fmt: skip
        self._check_levels()


class BitsSweep(Sweep[int]):
    """Quantises what each op alone reads, and all of them, to ever fewer bits.

    evaluate, metric, progress, compiled: see `Sweep`.  weights, activations: which of the two.  calibrate:
    runs the model on examples, by which the scales of activations are found; without it they are found at
    each execution.  cost: "size", the bytes of weights at their bits, without scales, or a function: see
    `Sweep`.  options: of `QuantizeTool`, such as type, observer, per_channel.

    Raises what QuantizeTool does for an option or a level that cannot be.

    >>> sweep = BitsSweep(lambda: 1.0, bits=[8, 4], activations=False, progress=False)
    """

    @checked(error=SweepError)
    def __init__(
        self,
        evaluate: Callable[[], Any],
        bits: Annotated[Iterable[Annotated[int, Range(2, 16)]], NotEmpty] = (8, 6, 5, 4, 3, 2),
        weights: bool = True,
        activations: bool = True,
        calibrate: Callable[[], Any] | None = None,
        metric: Name = "metric",
        progress: bool = True,
        compiled: Literal["eager", "instrument"] = "eager",
        cost: Cost = "size",
        **options: Any,
    ) -> None:
        def make(level: int) -> QuantizeTool:
            return QuantizeTool(
                method="dynamic" if calibrate is None else "static", weight_bits=level if weights else None,
                activation_bits=level if activations else None, **options,
            )  # fmt: skip

        def prepare(tool: QuantizeTool) -> None:
            if calibrate is not None:
                with tool.calibrating():
                    calibrate()

        mild = _ordered("bits", bits)[::-1]
        if cost == "flops":
            raise SweepError("cost is 'flops', of which fewer bits save none; give 'size' or a function")
        super().__init__(
            evaluate, make, mild, prepare, "bits", metric, progress, compiled, cost,
            lambda level, weight: level * weight.numbers / 8 / weight.size if weights else 1.0,
        )  # fmt: skip
        self._check_levels()


def _ordered(name: str, levels: Iterable[Number]) -> list[Number]:
    """Return levels in rising order, as a sweep wants them from mild to harsh."""
    try:
        return sorted(levels)
    except TypeError as error:
        raise SweepError(f"{name} is {levels!r}; give a list of numbers") from error

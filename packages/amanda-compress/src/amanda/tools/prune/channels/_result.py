"""The result of pruning channels: a row for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

from amanda.tools.prune.channels._plan import Plan
from amanda.tools.results import NOTHING, Column, Result, shortened


class ChannelPruneResult(Result):
    """The groups of channels, and how many of each are kept.

    parameters, kept_parameters: elements of the model's parameters, and how many are kept.  flops: the share
    of multiplications of convolutions and products with weights that is kept.  latency: the share of the
    time of a call, where the budget is of that; else None.  left: weights whose output
    channels are left whole, and why.  unread: parameters that the call of `prepare` did not read.
    model: what `finalize` has changed.
    """

    model: Any = None
    name: ClassVar[str] = "channel_prune"
    title = "Pruned channels"
    columns: ClassVar[Sequence[Column]] = (
        Column("module", show=partial(shortened, width=44)), Column("weights", number=True),
        Column("width", number=True), Column("channels", show="{:,}".format, total=True),
        Column("kept", show="{:,}".format, total=True),
        Column("sparsity", show="{:.4f}".format, number=True, unit="share"),
    )  # fmt: skip

    def __init__(self, plan: Plan | None) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self.parameters = self.kept_parameters = 0
        self.flops, self.left, self.unread = 1.0, dict[str, str](), list[str]()
        self.latency: float | None = None
        if plan is None:
            return
        self.flops, self.left, self.latency = plan.work, plan.left, plan.latency
        for group, kept in zip(plan.groups, plan.kept, strict=True):
            count, left = len(group) * group.width, int(kept.sum()) * group.width
            weights = len({one.name for one in group.members if one.is_made})
            path = plan.tracing.layer(group.name)
            self._rows.append((path, weights, group.width, count, left, 1 - left / count))
        shares: dict[str, float] = {}
        for name, _, kept in plan.axes():
            shares[name] = shares.get(name, 1.0) * float(kept.mean())
        self.unread = [name for name in plan.subject.parameters() if name not in plan.tracing.channels]
        for name, parameter in plan.subject.parameters().items():
            self.parameters += prod(parameter.shape)
            self.kept_parameters += round(prod(parameter.shape) * shares.get(name, 1.0))

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each group: its first layer, and how many layers' outputs share the channels."""
        return self._rows

    def facts(self) -> Mapping[str, Any]:
        """Return totals, and what was left whole."""
        return {
            "parameters": self.parameters, "kept_parameters": self.kept_parameters, "flops": self.flops,
            "latency": self.latency, "left": self.left, "unread": self.unread,
        }  # fmt: skip

    @property
    def leading(self) -> int:
        """The totals come first."""
        return 1

    def notes(self) -> Sequence[str]:
        """Return totals, and what was left whole."""
        if not self.parameters:
            return [NOTHING]
        return [
            f"{self.kept_parameters:,} of {self.parameters:,} parameters and {self.flops:.1%} of the "
            "multiplications by weights are kept.",
            *(
                []
                if self.latency is None
                else [f"A call takes {self.latency:.1%} of the time that it took with all channels."]
            ),
            *(
                [f"Not read in the call of prepare, and left: {', '.join(self.unread)}."]
                if self.unread
                else []
            ),
            *(f"The output channels of {name} are left whole: {why}." for name, why in self.left.items()),
        ]

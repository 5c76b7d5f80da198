"""The plan of a removal: made of one call of a model, and tried out on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import amanda
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._difference import first_difference
from amanda.tools.prune.channels._groups import ChannelGroup, groups_of, left_whole
from amanda.tools.prune.channels._importance import Budget, alive_labels, scores, share_of_work
from amanda.tools.prune.channels._labels import varying
from amanda.tools.prune.channels._subject import Subject
from amanda.tools.prune.channels._tracing import Step, Tracing
from amanda.tools.select import Paths, unmatched

_HALVINGS, _CALLS = 6, 8


@dataclass(frozen=True)
class Choice:
    """Options of the tool that choose channels.

    module, exclude: globs of layers' paths; None for all layers, and for none.
    """

    budget: Budget
    importance: Any
    seed: int
    module: Sequence[str] | None
    exclude: Sequence[str] | None


@dataclass
class Plan:
    """A choice of channels to remove of a model.

    groups, kept: the groups, and which of the channels of each are kept.  left: weights whose outputs are
    left whole, and why.  alive: for each label whether its channel is kept.  work: share of multiplications.
    latency: share of the time of a call, where that was measured.
    """

    subject: Subject
    tracing: Tracing
    groups: list[ChannelGroup] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    alive: Any = None
    work: float = 1.0
    latency: float | None = None

    def choose(self, choice: Choice) -> None:
        """Choose what is kept."""
        tensors = self.subject.tensors()
        notes = self.tracing.notes
        notes.labels.settle()
        self.groups = groups_of(self.tracing)
        worth = [
            scores(group, i, tensors, choice.importance, choice.seed) for i, group in enumerate(self.groups)
        ]
        self.kept = choice.budget.kept(self.groups, worth, notes.labels, notes.work)
        self.alive = alive_labels(notes.labels, self.groups, self.kept)
        self.work = share_of_work(notes.work, self.alive)
        self.left = left_whole(self.tracing) | self.tracing.unfollowed

    def axes(self) -> Iterator[tuple[str, int, Any]]:
        """Yield the axes of parameters and buffers that become shorter, and which places on them are kept."""
        for name, families in self.tracing.channels.items():
            for family in families:
                (axis,) = varying(family)
                kept = self.alive[family].reshape(-1)
                if not kept.all():
                    yield name, axis, kept


def select(plan: Plan, choice: Choice) -> None:
    """Leave whole what the options do not select; raise PruneError for an option that fits no weight."""
    labels = plan.tracing.notes.labels
    made = labels.made()
    modules: dict[str, list[Any]] = {}
    for name, families in plan.tracing.channels.items():
        own = [one for one in families if made.issuperset(one.reshape(-1).tolist())]
        if own:
            modules.setdefault(plan.tracing.layer(name), []).extend(own)
    is_chosen, is_excluded = Paths("module", choice.module), Paths("exclude", choice.exclude or ())
    chosen_paths = {path for path in modules if is_chosen(path)}
    excluded_paths = {path for path in modules if is_excluded(path)}
    noun = "layer with channels"
    if texts := [*unmatched([is_chosen], noun=noun), *unmatched([is_excluded], "excluded", noun)]:
        raise PruneError("; ".join(texts))
    for path, own in modules.items():
        if path in excluded_paths:
            labels.leave(own, f"{path} is excluded")
    if choice.module is not None:
        chosen = {
            root for path, own in modules.items() for one in own if path in chosen_paths
            for root in labels.roots(one).reshape(-1).tolist()
        }  # fmt: skip
        for own in modules.values():
            for one in own:
                others = one[~np.isin(labels.roots(one), list(chosen))]
                labels.leave(others, "`module` does not select it")


def made_plan(
    subject: Subject, example: Sequence[Any], named: Mapping[str, Any], choice: Choice
) -> tuple[Plan, Any]:
    """Return a plan, and what the smaller model returns; ops that it does not suit are left whole.

    Raises PruneError where the smaller model cannot run whatever is left whole.
    """
    subject(*example, **named)  # some models keep tensors of their first call
    tracing = subject.tracing()
    tracing.follow(example, named)
    plan = Plan(subject, tracing)
    select(plan, choice)
    if choice.budget.of != "latency":
        return plan, _fitted(plan, choice, example, named)
    low, high, labels = 0.0, 1.0, tracing.notes.labels

    def fitted(sparsity: float) -> Any:
        tracing.notes.labels = deepcopy(labels)  # what one share does not suit may be removed of another
        return _fitted(plan, replace(choice, budget=choice.budget.of_channels(sparsity)), example, named)

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fitted(middle)
        if _share_of_time(plan, example, named) > 1 - choice.budget.sparsity:
            low = middle
        else:
            high = middle
    result = fitted(high)
    plan.latency = _share_of_time(plan, example, named)
    return plan, result


def _fitted(plan: Plan, choice: Choice, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Choose channels, and leave whole what the model cannot do without; return what the smaller one does."""
    tracing = plan.tracing
    while True:
        plan.choose(choice)
        steps: Sequence[Step] = ()
        result, error = None, ""
        removal = plan.subject.removal(plan)
        try:
            removal.apply()
            trial = plan.subject.tracing()
            steps = trial.steps
            result = trial.follow(example, named)
        except Exception as raised:  # of any kind: the model's code does not suit the sizes
            error = f"{type(raised).__name__}: {raised}"
        finally:
            removal.undo()
        step = first_difference(tracing, plan.alive, steps)
        if step is None and not error:
            return result
        if step is None or not _leave(tracing, step, error):
            where = "" if step is None else f" at {step.place}"
            raise PruneError(
                f"ChannelPruneTool cannot remove channels of this model: it fails{where}: {error}"
            )


def _share_of_time(plan: Plan, example: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Return the time of a call of the smaller model as a share of the whole one's, measured one by one."""
    whole = _seconds(plan.subject, example, named)
    removal = plan.subject.removal(plan)
    try:
        removal.apply()
        return _seconds(plan.subject, example, named) / whole
    finally:
        removal.undo()


def _seconds(subject: Subject, example: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Return the time of the fastest of several calls, which other work on the machine disturbs least."""
    seconds = []
    for _ in range(_CALLS):
        begun = perf_counter()
        with amanda.disabled():
            subject.time(*example, **named)
        seconds.append(perf_counter() - begun)
    return min(seconds)


def _leave(tracing: Tracing, step: Step, error: str) -> bool:
    """Leave the channels whole that an op reads and makes, and those of the same line elsewhere.

    Where that is nothing new, leave those of its module, or of the next one around it that has others.
    Returns False if there are none.
    """
    labels, before = tracing.notes.labels, len(tracing.notes.labels.left())
    why = error.splitlines()[0] if error else "its result would have other channels"
    reason = f"{step.place} at {step.source} does not suit fewer of them ({why})"
    alike = [one for one in tracing.steps if (one.type, one.source) == (step.type, step.source)]
    path = step.module
    while True:
        for one in alike:
            labels.leave([family for families, _ in (*one.read, *one.made) for family in families], reason)
        labels.settle()
        if len(labels.left()) > before:
            return True
        if len(alike) == len(tracing.steps):
            return False
        alike = [one for one in tracing.steps if f"{one.module}.".startswith(f"{path}." if path else "")]
        path = path.rpartition(".")[0]

"""The plan of a removal: made in a call of a model, and tried out on the smaller model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from time import perf_counter
from typing import Any

import amanda
from amanda.tools.libraries import numpy as np
from amanda.tools.prune._masks import PruneError
from amanda.tools.prune.channels._groups import (
    Budget,
    ChannelGroup,
    alive_labels,
    groups_of,
    reasons_left_whole,
    scores,
    share_of_work,
)
from amanda.tools.prune.channels._labels import Part, varying
from amanda.tools.prune.channels._prunable_model import PrunableModel
from amanda.tools.prune.channels._tracing import TracedOp, Tracing
from amanda.tools.select import Paths, unmatched


def first_difference(expected: Tracing, alive: Any, steps: Sequence[TracedOp]) -> TracedOp | None:
    """Return the first op whose results have other extents than the labels say, or that has not run."""
    for i, step in enumerate(expected.steps):
        if i >= len(steps):
            return step
        trial_step = steps[i]
        if (step.type, step.module) != (trial_step.type, trial_step.module):
            return step
        if len(step.outputs) != len(trial_step.outputs):
            return step
        for part, (_, shape) in zip(step.outputs, trial_step.outputs, strict=True):
            if prod(shape) + prod(part[1]) and expected.extents(part, alive) != shape:  # or has no elements
                return step
        if step.moved is not None and not _move_alike(step, trial_step, expected, alive):
            return step
    return None


def _move_alike(step: TracedOp, trial_step: TracedOp, expected: Tracing, alive: Any) -> bool:
    """Return True if an op moves the channels that are kept as it moved them among all, of the same step."""
    roots = expected.notes.labels.roots
    for family in step.inputs[0][0]:
        if not alive[family].all() and step.moved is not None and trial_step.moved is not None:
            read = _shortened(family, ((family,), family.shape), expected, alive)
            triples = zip(step.moved(family), step.outputs, trial_step.moved(read), strict=True)
            for expected_labels, part, trial_labels in triples:
                short = roots(_shortened(expected_labels, part, expected, alive))
                if short.size and not np.array_equal(short, roots(trial_labels)):
                    return False
    return True


def _shortened(array: Any, part: Part, expected: Tracing, alive: Any) -> Any:
    """Return an array without the places at which a tensor of its shape has channels that are not kept."""
    keep_masks = [expected.places(part[0], axis, alive) for axis in range(array.ndim)]
    whole = (np.arange(extent) for extent in array.shape)
    positions = [
        all_positions if keep_mask is None else np.flatnonzero(keep_mask)
        for all_positions, keep_mask in zip(whole, keep_masks, strict=True)
    ]
    return array[np.ix_(*positions)]


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

    groups, keep_masks: the groups, and masks of their kept channels.  whole_layers: weights whose outputs
    are left whole, and the reasons.  alive: for each label whether its channel is kept.  work: share of
    multiplications that remain.  latency: share of the time of a call, where that was measured.
    """

    subject: PrunableModel
    tracing: Tracing
    groups: list[ChannelGroup] = field(default_factory=list)
    keep_masks: list[Any] = field(default_factory=list)
    whole_layers: dict[str, str] = field(default_factory=dict)
    alive: Any = None
    work: float = 1.0
    latency: float | None = None

    def choose(self, choice: Choice) -> None:
        """Choose what is kept."""
        tensors = self.subject.tensors()
        notes = self.tracing.notes
        notes.labels.settle()
        self.groups = groups_of(self.tracing)
        importances = [
            scores(group, i, tensors, choice.importance, choice.seed) for i, group in enumerate(self.groups)
        ]
        self.keep_masks = choice.budget.choose(self.groups, importances, notes.labels, notes.work)
        self.alive = alive_labels(notes.labels, self.groups, self.keep_masks)
        self.work = share_of_work(notes.work, self.alive)
        self.whole_layers = reasons_left_whole(self.tracing) | self.tracing.unfollowed

    def axes(self) -> Iterator[tuple[str, int, Any]]:
        """Yield the axes of parameters and buffers that become shorter, and which places on them are kept."""
        for name, families in self.tracing.channels.items():
            for family in families:
                (axis,) = varying(family)
                keep_mask = self.alive[family].reshape(-1)
                if not keep_mask.all():
                    yield name, axis, keep_mask


def leave_unselected(plan: Plan, choice: Choice) -> None:
    """Leave whole what the options do not select; raise PruneError for an option that fits no weight."""
    labels = plan.tracing.notes.labels
    output_labels = labels.output_labels()
    modules: dict[str, list[Any]] = {}
    for name, families in plan.tracing.channels.items():
        outputs = [family for family in families if output_labels.issuperset(family.reshape(-1).tolist())]
        if outputs:
            modules.setdefault(plan.tracing.layer(name), []).extend(outputs)
    is_chosen, is_excluded = Paths("module", choice.module), Paths("exclude", choice.exclude or ())
    chosen_paths = {path for path in modules if is_chosen(path)}
    excluded_paths = {path for path in modules if is_excluded(path)}
    noun = "layer with channels"
    if texts := [*unmatched([is_chosen], noun=noun), *unmatched([is_excluded], "excluded", noun)]:
        raise PruneError("; ".join(texts))
    for path, outputs in modules.items():
        if path in excluded_paths:
            labels.leave(outputs, f"{path} is excluded")
    if choice.module is not None:
        chosen_roots = {
            root for path, outputs in modules.items() for family in outputs if path in chosen_paths
            for root in labels.roots(family).reshape(-1).tolist()
        }  # fmt: skip
        for outputs in modules.values():
            for family in outputs:
                unselected = family[~np.isin(labels.roots(family), list(chosen_roots))]
                labels.leave(unselected, "`module` does not select it")


def make_plan(
    subject: PrunableModel, example: Sequence[Any], named: Mapping[str, Any], choice: Choice
) -> tuple[Plan, Any]:
    """Return a plan, and what the smaller model returns; ops that it does not suit are left whole.

    Raises PruneError where the smaller model cannot run whatever is left whole.
    """
    subject(*example, **named)  # some models keep tensors of their first call
    tracing = subject.tracing()
    tracing.follow(example, named)
    plan = Plan(subject, tracing)
    leave_unselected(plan, choice)
    if choice.budget.of != "latency":
        return plan, _try_until_it_runs(plan, choice, example, named)
    low, high, labels = 0.0, 1.0, tracing.notes.labels

    def fitted(sparsity: float) -> Any:
        tracing.notes.labels = deepcopy(labels)  # what one share does not suit may be removed of another
        return _try_until_it_runs(
            plan, replace(choice, budget=choice.budget.of_channels(sparsity)), example, named
        )

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


def _try_until_it_runs(plan: Plan, choice: Choice, example: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Choose channels, and leave whole what the model cannot do without; return what the smaller one does."""
    tracing = plan.tracing
    while True:
        plan.choose(choice)
        steps: Sequence[TracedOp] = ()
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
        if step is None or not _leave_whole(tracing, step, error):
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


def _seconds(subject: PrunableModel, example: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Return the time of the fastest of several calls, which other work on the machine disturbs least."""
    seconds = []
    for _ in range(_CALLS):
        begun = perf_counter()
        with amanda.disabled():
            subject.time(*example, **named)
        seconds.append(perf_counter() - begun)
    return min(seconds)


def _leave_whole(tracing: Tracing, step: TracedOp, error: str) -> bool:
    """Leave the channels whole that an op reads and makes, and those of the same line elsewhere.

    Where that is nothing new, leave those of its module, or of the next one around it that has others.
    Returns False if there are none.
    """
    labels, before = tracing.notes.labels, len(tracing.notes.labels.whole_roots())
    why = error.splitlines()[0] if error else "its result would have other channels"
    reason = f"{step.place} at {step.source} does not suit fewer of them ({why})"
    alike = [
        step_alike
        for step_alike in tracing.steps
        if (step_alike.type, step_alike.source) == (step.type, step.source)
    ]
    path = step.module
    while True:
        for step_alike in alike:
            labels.leave(
                [family for families, _ in (*step_alike.inputs, *step_alike.outputs) for family in families],
                reason,
            )
        labels.settle()
        if len(labels.whole_roots()) > before:
            return True
        if len(alike) == len(tracing.steps):
            return False
        alike = [
            step_alike
            for step_alike in tracing.steps
            if f"{step_alike.module}.".startswith(f"{path}." if path else "")
        ]
        path = path.rpartition(".")[0]

"""Calls of layers in a Keras model, and the stage that each is in."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda.tools.partition._cut import PartitionError

if TYPE_CHECKING:
    from amanda.tools.partition._result import PartitionResult

logger = logging.getLogger("amanda")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer in a model.  node: Keras' own record.  inputs, outputs: its symbolic tensors."""

    node: Any
    layer: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def again(self, values: dict[int, Any]) -> Sequence[Any]:
        """Return what the layer gives for values in the place of its tensors, by their `id`."""
        import tensorflow as tf

        if hasattr(self.node, "operation"):
            arguments, named = self.node.arguments.fill_in(values)
        else:
            given = {str(id(one)): [values[id(one)]] * len(self.inputs) for one in self.inputs}
            arguments, named = self.node.map_arguments(given)
        made: Sequence[Any] = tf.nest.flatten(self.layer(*arguments, **named))
        return made


def calls_of(network: Any) -> Iterator[Call]:
    """Yield the calls of layers in the order in which Keras makes them."""
    import tensorflow as tf

    by_depth = getattr(network, "_nodes_by_depth", None) or {}
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.is_input:
                continue
            if hasattr(node, "operation"):
                yield Call(node, node.operation, node.input_tensors, node.outputs)
            else:
                inputs, outputs = tf.nest.flatten(node.keras_inputs), tf.nest.flatten(node.outputs)
                yield Call(node, node.layer, inputs, outputs)


def stages_of(result: PartitionResult, model: Any, calls: Sequence[Call]) -> tuple[list[int], list[str]]:
    """Return the stage of each call, and sentences on layers that the cut goes through.

    A call is in the stage that has most of its cost, but in none before those of the calls that it reads.
    """
    planned = _planned(result, calls)
    if not any(planned):
        raise PartitionError(
            f"none of the {len(result.work.ops)} ops that were traced is in a layer of {model.name}; run "
            "this model in a scope of the tool"
        )
    stages: list[int] = []
    made_in: dict[int, int] = {}
    for call, own in zip(calls, planned, strict=True):
        most = max(own, key=lambda stage: (own[stage], -stage), default=0)
        stages.append(max([most, *(made_in.get(id(one), 0) for one in call.inputs)]))
        made_in |= {id(one): stages[-1] for one in call.outputs}
    for number in set(range(result.request.stages)) - set(stages):
        _fill(number, calls, stages, planned)
    return stages, _moved(calls, stages, planned)


def _planned(result: PartitionResult, calls: Sequence[Call]) -> list[dict[int, float]]:
    """Return what each call costs in each stage; calls of one layer share its ops in their order."""
    ops: dict[str, list[tuple[int, float]]] = defaultdict(list)
    stage_of = [] if result.stage_of is None else result.stage_of.tolist()
    for op, stage, cost in zip(result.work.ops, stage_of, result.work.total, strict=True):
        ops[op.module.partition(".")[0]].append((stage, float(cost)))
    planned, seen = [], Counter[str]()
    for call in calls:
        name = call.layer.name
        number, several = seen[name], sum(one.layer is call.layer for one in calls)
        seen[name] += 1
        size, rest = divmod(len(ops[name]), several)
        costs: dict[int, float] = defaultdict(float)
        for stage, cost in ops[name] if rest else ops[name][number * size : (number + 1) * size]:
            costs[stage] += cost
        planned.append(costs)
    return planned


def _fill(
    number: int, calls: Sequence[Call], stages: list[int], planned: Sequence[dict[int, float]]
) -> None:  # fmt: skip
    """Move a call of which the cut had a part in an empty stage there, if others stay where it was."""
    for i, call in enumerate(calls):
        given = {id(one) for one in call.inputs}
        made = {id(one) for one in call.outputs}
        before = [stages[j] for j, one in enumerate(calls) if given & {id(value) for value in one.outputs}]
        after = [stages[j] for j, one in enumerate(calls) if made & {id(value) for value in one.inputs}]
        fits = max(before, default=0) <= number <= min(after, default=number)
        if fits and number in planned[i] and stages.count(stages[i]) > 1:
            stages[i] = number
            return


def _moved(
    calls: Sequence[Call], stages: Sequence[int], planned: Sequence[dict[int, float]]
) -> list[str]:  # fmt: skip
    """Say which layers the cut went through, and which are called in several stages."""
    told = []
    for call, stage, costs in zip(calls, stages, planned, strict=True):
        parts = sorted(one for one, cost in costs.items() if cost and one != stage)
        if parts:
            listed = ", ".join(map(str, parts))
            told.append(
                f"The cut moved to the edge of layer {call.layer.name}: it is in stage {stage}, not partly "
                f"in {listed}."
            )
    for name in dict.fromkeys(call.layer.name for call in calls):
        where = {stage for call, stage in zip(calls, stages, strict=True) if call.layer.name == name}
        if len(where) > 1:
            listed = ", ".join(map(str, sorted(where)))
            told.append(f"Layer {name} is called in stages {listed}, which share it.")
    for sentence in told:
        logger.info("submodels: %s", sentence)
    return told

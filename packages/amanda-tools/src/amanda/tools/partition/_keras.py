"""Submodels of a Keras model, cut at the edges of its layers, with the layers and variables of the model."""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.errors import ToolError
from amanda.tools.kit._requirements import check
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


@dataclass
class Submodels:
    """The models of the stages, and sentences on where they are not what was planned."""

    models: list[Any]
    remarks: list[str] = field(default_factory=list)


def submodels(result: PartitionResult, model: Any) -> Submodels:
    """Return a model for each stage; see `PartitionResult.submodels`."""
    keras = _keras_of(model)
    network = getattr(model, "_functional", None) or model
    calls = list(_calls(network))
    if not calls:
        raise PartitionError(_refusal(model))
    stages, remarks = _stages(result, model, calls)
    count = result.request.stages
    missing = sorted(set(range(count)) - set(stages))
    if missing:
        whole = ", ".join(one.layer.name for one in calls[:8])
        raise PartitionError(
            f"stage {missing[0]} of {count} has no whole layer of {model.name}, whose layers are {whole}: "
            "the cut falls inside of a layer; give fewer stages, or make smaller layers"
        )
    made = [
        _submodel(keras, model, network, calls, stages, number, number == count - 1)
        for number in range(count)
    ]
    return Submodels(made, remarks)


def _keras_of(model: Any) -> Any:
    """Return the Keras that a model is of: keras, or tf_keras.  Raises ToolError for what is no model."""
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(model, keras.Model):
            check("partition", name)
            return keras
    raise ToolError(
        f"submodels was given a {type(model).__name__}; it takes the functional or sequential model of Keras "
        "that was traced"
    )


def _refusal(model: Any) -> str:
    return (
        f"{model.name} is a {type(model).__name__}, whose layers are called by code of its own or which has "
        "no inputs yet; submodels needs a functional or a sequential model, made with keras.Input"
    )


def _calls(network: Any) -> Iterator[Call]:
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


def _stages(result: PartitionResult, model: Any, calls: Sequence[Call]) -> tuple[list[int], list[str]]:
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


def _submodel(
    keras: Any, model: Any, network: Any, calls: Sequence[Call], stages: Sequence[int], number: int,
    is_last: bool,
) -> Any:  # fmt: skip
    """Return the model of a stage.

    The model takes what the stage before gives, and gives what the stage after takes: what it makes itself,
    and what later stages need of earlier ones.
    """
    import tensorflow as tf

    given = list(network.inputs) if number == 0 else _passed(network, calls, stages, number)
    places = [_input(keras, one, one.name if number == 0 else None) for one in given]
    values = dict(zip(map(id, given), places, strict=True))
    for call, stage in zip(calls, stages, strict=True):
        if stage == number:
            values |= zip(map(id, call.outputs), call.again(values), strict=True)
    inputs: Any = places[0] if len(places) == 1 else places
    if number == 0:
        inputs = tf.nest.map_structure(lambda one: values[id(one)], _structure(network, "inputs"))
    if is_last:
        outputs: Any = tf.nest.map_structure(lambda one: values[id(one)], _structure(network, "outputs"))
    else:
        outputs = [values[id(one)] for one in _passed(network, calls, stages, number + 1)]
        outputs = outputs[0] if len(outputs) == 1 else outputs
    return keras.Model(inputs, outputs, name=f"{model.name}_stage{number}")


def _passed(network: Any, calls: Sequence[Call], stages: Sequence[int], number: int) -> list[Any]:
    """Return the tensors that exist before a stage and that it, a later one or the model's outputs need."""
    before = {id(one): one for one in network.inputs}
    needed: dict[int, Any] = {}
    for call, stage in zip(calls, stages, strict=True):
        if stage < number:
            before |= {id(one): one for one in call.outputs}
        else:
            needed |= {id(one): one for one in call.inputs}
    needed |= {id(one): one for one in network.outputs}
    return [one for key, one in before.items() if key in needed]


def _structure(network: Any, side: str) -> Any:
    """Return the inputs or outputs in the lists and dicts in which the model has them."""
    found = getattr(network, f"_{side}_struct", None)
    return getattr(network, f"_nested_{side}") if found is None else found


def _input(keras: Any, tensor: Any, name: str | None) -> Any:
    """Return a new input like a tensor of the model."""
    if hasattr(tensor, "type_spec"):
        return keras.Input(type_spec=tensor.type_spec, name=name)
    return keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, sparse=tensor.sparse, name=name)

"""Submodels of a Keras model, cut at the edges of its layers, with the layers and variables of the model."""

from __future__ import annotations

import logging
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.errors import ToolError
from amanda.tools.kit import RequiredNames
from amanda.tools.partition._cut import PartitionError

if TYPE_CHECKING:
    from amanda.tools.partition._result import PartitionResult

_KERAS_NAMES = RequiredNames(
    "amanda.tools.partition",
    "keras",
    "keras.src.ops.node:Node.input_tensors",
    "keras.src.ops.symbolic_arguments:SymbolicArguments.fill_in",
)

_TF_KERAS_NAMES = RequiredNames(
    "amanda.tools.partition",
    "tf_keras",
    "tf_keras.src.engine.node:Node.keras_inputs",
    "tf_keras.src.engine.node:Node.map_arguments",
)


@dataclass
class Submodels:
    """The models of the stages, and remarks on layers that are in another stage than planned."""

    models: list[Any]
    remarks: list[str] = field(default_factory=list)


def submodels(result: PartitionResult, model: Any) -> Submodels:
    """Return a model for each stage; see `PartitionResult.submodels`."""
    keras = _keras_of(model)
    network = getattr(model, "_functional", None) or model
    calls = list(calls_of(network))
    if not calls:
        raise PartitionError(_unsupported_text(model))
    stages, remarks = stages_of(result, model, calls)
    count = result.request.stages
    missing = sorted(set(range(count)) - set(stages))
    if missing:
        layer_names = ", ".join(call.layer.name for call in calls[:8])
        raise PartitionError(
            f"stage {missing[0]} of {count} has no whole layer of {model.name}, whose layers are "
            f"{layer_names}: the cut falls inside of a layer; give fewer stages, or make smaller layers"
        )
    models = [
        _build_submodel(keras, model, network, calls, stages, number, number == count - 1)
        for number in range(count)
    ]
    return Submodels(models, remarks)


def _keras_of(model: Any) -> Any:
    """Return the package of a model, keras or tf_keras.  Raises ToolError for an object that is no model."""
    for name in ("keras", "tf_keras"):
        keras = sys.modules.get(name)
        if keras is not None and isinstance(model, keras.Model):
            (_KERAS_NAMES if name == "keras" else _TF_KERAS_NAMES).check()
            return keras
    raise ToolError(
        f"submodels was given a {type(model).__name__}; it takes the functional or sequential model of Keras "
        "that was traced"
    )


def _unsupported_text(model: Any) -> str:
    """Return the text of the error for a model without a graph of layers."""
    return (
        f"{model.name} is a {type(model).__name__}, whose layers are called by code of its own or which has "
        "no inputs yet; submodels needs a functional or a sequential model, made with keras.Input"
    )


def _build_submodel(
    keras: Any, model: Any, network: Any, calls: Sequence[LayerCall], stages: Sequence[int], number: int,
    is_last: bool,
) -> Any:  # fmt: skip
    """Return the model of a stage, whose inputs are the outputs of the stage before.

    Its outputs are the tensors that later stages read, of this stage and of earlier ones.
    """
    import tensorflow as tf

    tensors = list(network.inputs) if number == 0 else _tensors_between(network, calls, stages, number)
    placeholders = [_new_input(keras, tensor, tensor.name if number == 0 else None) for tensor in tensors]
    values = dict(zip(map(id, tensors), placeholders, strict=True))
    for call, stage in zip(calls, stages, strict=True):
        if stage == number:
            values |= zip(map(id, call.outputs), call.call_again(values), strict=True)
    inputs: Any = placeholders[0] if len(placeholders) == 1 else placeholders
    if number == 0:
        inputs = tf.nest.map_structure(
            lambda tensor: values[id(tensor)], _nested_structure(network, "inputs")
        )
    if is_last:
        outputs: Any = tf.nest.map_structure(
            lambda tensor: values[id(tensor)], _nested_structure(network, "outputs")
        )
    else:
        outputs = [values[id(tensor)] for tensor in _tensors_between(network, calls, stages, number + 1)]
        outputs = outputs[0] if len(outputs) == 1 else outputs
    return keras.Model(inputs, outputs, name=f"{model.name}_stage{number}")


def _tensors_between(
    network: Any, calls: Sequence[LayerCall], stages: Sequence[int], number: int
) -> list[Any]:
    """Return the tensors of earlier stages that a stage, a later one or the model's outputs need."""
    available = {id(tensor): tensor for tensor in network.inputs}
    read_later: dict[int, Any] = {}
    for call, stage in zip(calls, stages, strict=True):
        if stage < number:
            available |= {id(tensor): tensor for tensor in call.outputs}
        else:
            read_later |= {id(tensor): tensor for tensor in call.inputs}
    read_later |= {id(tensor): tensor for tensor in network.outputs}
    return [tensor for key, tensor in available.items() if key in read_later]


def _nested_structure(network: Any, side: str) -> Any:
    """Return the inputs or outputs in the lists and dicts in which the model has them."""
    structure = getattr(network, f"_{side}_struct", None)
    return getattr(network, f"_nested_{side}") if structure is None else structure


def _new_input(keras: Any, tensor: Any, name: str | None) -> Any:
    """Return a new input like a tensor of the model."""
    if hasattr(tensor, "type_spec"):
        return keras.Input(type_spec=tensor.type_spec, name=name)
    return keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, sparse=tensor.sparse, name=name)


logger = logging.getLogger("amanda")


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer in a model.  node: Keras' record of the call.  inputs, outputs: symbolic tensors."""

    node: Any
    layer: Any
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def call_again(self, values: dict[int, Any]) -> Sequence[Any]:
        """Return the outputs of the layer on other tensors.  values: by `id` of the tensor they replace."""
        import tensorflow as tf

        if hasattr(self.node, "operation"):
            arguments, keywords = self.node.arguments.fill_in(values)
        else:
            values_by_key = {
                str(id(tensor)): [values[id(tensor)]] * len(self.inputs) for tensor in self.inputs
            }
            arguments, keywords = self.node.map_arguments(values_by_key)
        outputs: Sequence[Any] = tf.nest.flatten(self.layer(*arguments, **keywords))
        return outputs


def calls_of(network: Any) -> Iterator[LayerCall]:
    """Yield the calls of layers in the order in which Keras runs them."""
    import tensorflow as tf

    by_depth = getattr(network, "_nodes_by_depth", None) or {}
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.is_input:
                continue
            if hasattr(node, "operation"):
                yield LayerCall(node, node.operation, node.input_tensors, node.outputs)
            else:
                inputs, outputs = tf.nest.flatten(node.keras_inputs), tf.nest.flatten(node.outputs)
                yield LayerCall(node, node.layer, inputs, outputs)


def stages_of(result: PartitionResult, model: Any, calls: Sequence[LayerCall]) -> tuple[list[int], list[str]]:
    """Return the stage of each call, and remarks on layers that the cut goes through.

    A call is in the stage that has most of its cost, but in no earlier stage than the tensors that it reads.
    """
    costs_by_stage = _costs_by_stage(result, calls)
    if not any(costs_by_stage):
        raise PartitionError(
            f"none of the {len(result.work.ops)} ops that were traced is in a layer of {model.name}; run "
            "this model in a scope of the tool"
        )
    stages: list[int] = []
    stage_of_tensor: dict[int, int] = {}
    for call, costs in zip(calls, costs_by_stage, strict=True):
        heaviest_stage = max(costs, key=lambda stage: (costs[stage], -stage), default=0)
        stages.append(max([heaviest_stage, *(stage_of_tensor.get(id(tensor), 0) for tensor in call.inputs)]))
        stage_of_tensor |= {id(tensor): stages[-1] for tensor in call.outputs}
    for number in set(range(result.request.stages)) - set(stages):
        _move_into_empty_stage(number, calls, stages, costs_by_stage)
    return stages, _moved_remarks(calls, stages, costs_by_stage)


def _costs_by_stage(result: PartitionResult, calls: Sequence[LayerCall]) -> list[dict[int, float]]:
    """Return the cost of each call in each stage; calls of a shared layer divide its ops in their order."""
    ops: dict[str, list[tuple[int, float]]] = defaultdict(list)
    stage_of = [] if result.stage_of is None else result.stage_of.tolist()
    for op, stage, cost in zip(result.work.ops, stage_of, result.work.total, strict=True):
        ops[op.module.partition(".")[0]].append((stage, float(cost)))
    costs_by_stage, num_calls = [], Counter[str]()
    for call in calls:
        name = call.layer.name
        number, calls_of_layer = num_calls[name], sum(other_call.layer is call.layer for other_call in calls)
        num_calls[name] += 1
        size, remainder = divmod(len(ops[name]), calls_of_layer)
        costs: dict[int, float] = defaultdict(float)
        for stage, cost in ops[name] if remainder else ops[name][number * size : (number + 1) * size]:
            costs[stage] += cost
        costs_by_stage.append(costs)
    return costs_by_stage


def _move_into_empty_stage(
    number: int, calls: Sequence[LayerCall], stages: list[int], costs_by_stage: Sequence[dict[int, float]]
) -> None:  # fmt: skip
    """Move a call into an empty stage that had a part of it, if its old stage keeps another call."""
    inputs = [{id(tensor) for tensor in call.inputs} for call in calls]
    outputs = [{id(tensor) for tensor in call.outputs} for call in calls]
    for i in range(len(calls)):
        earlier_stages = [
            stage for stage, tensors in zip(stages, outputs, strict=True) if inputs[i] & tensors
        ]
        later_stages = [stage for stage, tensors in zip(stages, inputs, strict=True) if outputs[i] & tensors]
        fits = max(earlier_stages, default=0) <= number <= min(later_stages, default=number)
        if fits and number in costs_by_stage[i] and stages.count(stages[i]) > 1:
            stages[i] = number
            return


def _moved_remarks(
    calls: Sequence[LayerCall], stages: Sequence[int], costs_by_stage: Sequence[dict[int, float]]
) -> list[str]:  # fmt: skip
    """Return remarks on layers that the cut went through, and on layers that several stages call."""
    remarks = []
    for call, stage, costs in zip(calls, stages, costs_by_stage, strict=True):
        other_stages = sorted(
            part_stage for part_stage, cost in costs.items() if cost and part_stage != stage
        )
        if other_stages:
            listed = ", ".join(map(str, other_stages))
            remarks.append(
                f"The cut moved to the edge of layer {call.layer.name}: it is in stage {stage}, not partly "
                f"in {listed}."
            )
    for name in dict.fromkeys(call.layer.name for call in calls):
        call_stages = {stage for call, stage in zip(calls, stages, strict=True) if call.layer.name == name}
        if len(call_stages) > 1:
            listed = ", ".join(map(str, sorted(call_stages)))
            remarks.append(f"Layer {name} is called in stages {listed}, which share it.")
    for sentence in remarks:
        logger.info("submodels: %s", sentence)
    return remarks

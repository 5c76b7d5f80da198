"""Submodels of a Keras model, cut at the edges of its layers, with the layers and variables of the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amanda.errors import ToolError
from amanda.tools.kit import check
from amanda.tools.partition._cut import PartitionError
from amanda.tools.partition._keras_layers import Call, calls_of, stages_of

if TYPE_CHECKING:
    from amanda.tools.partition._result import PartitionResult


@dataclass
class Submodels:
    """The models of the stages, and sentences on where they are not what was planned."""

    models: list[Any]
    remarks: list[str] = field(default_factory=list)


def submodels(result: PartitionResult, model: Any) -> Submodels:
    """Return a model for each stage; see `PartitionResult.submodels`."""
    keras = _keras_of(model)
    network = getattr(model, "_functional", None) or model
    calls = list(calls_of(network))
    if not calls:
        raise PartitionError(_refusal(model))
    stages, remarks = stages_of(result, model, calls)
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

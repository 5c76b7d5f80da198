"""FunctionDefs of edited functions, and nodes that bring the execution's number to them and to loops.

In a loop the number is a vector of the execution's number and the round of each loop. A loop that computes
gradients counts from the last round of its forward loop back to the first. So gradients find the values of
their own round, even if rounds run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from amanda.backend import digest
from tensorflow.core.framework import function_pb2, op_def_pb2
from tensorflow.python.framework import ops

from ._body import Body, RewrittenBody
from ._nodes import INT64, constant, new_node, op_def, opaque_identity

if TYPE_CHECKING:
    import tensorflow as tf

    from ._rewrite import BodyRewriter

NUMBER = "amanda_number"
"""Name of the argument of an edited function for the execution's number."""


def numbered_copy(
    definition: Any,
    rewritten: RewrittenBody,
    body: Body,
    round_increment: int = 0,
    is_condition: bool = False,
) -> Any:
    """Return a FunctionDef of an edited body, with the execution's number as its last argument.

    The name contains a digest of the content, so that equal copies are one function.  XLA does not compile
    the copy, and a call of it waits for all routines.
    round_increment: of a loop's body, the change of the number from round to round; the next round's number
    is then an output, too.  0 for other functions.
    is_condition: True for the condition of a loop. TensorFlow runs only those of its nodes that the result
    needs.
    """
    copy = _replace_nodes(definition, rewritten)
    # XLA cannot compile calls of Python.
    for attribute in ("_XlaMustCompile", "_xla_compile_id"):
        copy.attr.pop(attribute, None)
    copy.signature.input_arg.append(op_def_pb2.OpDef.ArgDef(name=NUMBER, type=INT64))
    nodes_with_routines = _nodes_with_routines(rewritten)
    _add_control_outputs(copy, nodes_with_routines)
    if round_increment:
        nodes, next_number_ref = next_round(NUMBER, body.loop_depth, round_increment)
        copy.node_def.extend(nodes)
        copy.signature.output_arg.append(op_def_pb2.OpDef.ArgDef(name=f"{NUMBER}_out", type=INT64))
        copy.ret[f"{NUMBER}_out"] = next_number_ref
    # TensorFlow inlines the condition of a loop, and then runs what its result needs, without control
    # outputs.
    if is_condition:
        _delay_results(copy, nodes_with_routines)
    if nodes_with_routines:
        copy.signature.is_stateful = True
    return _name_by_content(copy, definition)


def _nodes_with_routines(rewritten: RewrittenBody) -> list[str]:
    """Return the names of the nodes that call routines, themselves or in functions, each once."""
    names = [name for inserted_names in rewritten.inserted_names_by_op.values() for name in inserted_names]
    # A call may have been replaced after its functions were edited.
    names += [rewritten.replacement_by_name.get(name, name) for name in rewritten.edited_call_names]
    return list(dict.fromkeys(names))


def _add_control_outputs(copy: Any, names: Iterable[str]) -> None:
    """Make nodes control outputs of a function, which are not pruned, and for which a call waits."""
    for name in names:
        key = f"amanda_{name}".replace("/", "_")
        copy.control_ret[key] = name
        copy.signature.control_output.append(key)


def _delay_results(copy: Any, nodes: Iterable[str]) -> None:
    """Make each result of a function wait for these nodes; no effect without nodes."""
    control_inputs = [f"^{node_name}" for node_name in nodes]
    if not control_inputs:
        return
    for argument in copy.signature.output_arg:
        inputs = [copy.ret[argument.name], *control_inputs]
        barrier = opaque_identity(f"amanda/waiting/{argument.name}", inputs, argument.type)
        copy.node_def.append(barrier)
        copy.ret[argument.name] = f"{barrier.name}:output:0"


def edited_definition(definition: Any, rewritten: RewrittenBody) -> Any:
    """Return a FunctionDef of an edited body that has no calls of Python, and so takes no number.

    The name contains a digest of the content.
    """
    copy = _replace_nodes(definition, rewritten)
    definitions = (op_def(node.op) for node in copy.node_def)
    if any(definition is not None and definition.is_stateful for definition in definitions):
        copy.signature.is_stateful = True
    return _name_by_content(copy, definition)


def _replace_nodes(definition: Any, rewritten: RewrittenBody) -> Any:
    """Return a copy of a function with the nodes, results and control outputs of its edited body."""
    copy = function_pb2.FunctionDef()
    copy.CopyFrom(definition)
    del copy.node_def[:]
    copy.node_def.extend(rewritten.nodes)
    for argument, text in zip(definition.signature.output_arg, rewritten.outputs, strict=True):
        copy.ret[argument.name] = text
    for key, name in definition.control_ret.items():
        copy.control_ret[key] = rewritten.replacement_by_name.get(name, name)
    return copy


def _name_by_content(copy: Any, definition: Any) -> Any:
    """Name a copy of a function after the function and a digest of the copy's content; return the copy."""
    content = digest(copy.SerializeToString(deterministic=True))
    copy.signature.name = f"{definition.signature.name}_amanda_{content:016x}"
    return copy


LOOPS = ("While", "StatelessWhile")
_COUNTER, _ROUND_COUNT = 0, 2
"""Index of the counter among a loop's results, and of the number of rounds among a gradient loop's inputs."""
_INT32 = 3


def add_loop_number(rewriter: BodyRewriter, op: tf.Operation, number_ref: str) -> tuple[str, int]:
    """Add nodes that append the first round to the number for a loop; return the new number's ref.

    Returns also the change from round to round: 1, or -1 for a loop that goes through rounds in reverse.
    """
    body, inserted_nodes = rewriter.body, rewriter.insertions.nodes
    name = f"amanda/rounds{len(inserted_nodes)}"
    has_dead_values = body.syntax.dead_values
    # With dead values there are frames, and constants need a control input to run in that of the number.
    control_inputs = [f"^{number_ref.partition(':')[0]}"] if has_dead_values else []

    def add(node: Any, output: str = "output") -> str:
        """Insert a node; return the ref of its output, which a FunctionDef spells by the output's name."""
        inserted_nodes.append(node)
        return str(node.name) if has_dead_values else f"{node.name}:{output}:0"

    def add_constant(key: str, value: Any) -> str:
        return add(constant(f"{name}/{key}", value, control_inputs))

    is_reverse = _runs_in_reverse(op, body.find_captured)
    if is_reverse:
        count_ref = rewriter.refs.of_input(op, _ROUND_COUNT)
        # The rounds of the forward loop are counted from 0, so the last one has the number of rounds less 1.
        round_count = add(new_node(f"{name}/times", "Cast", [count_ref], SrcT=_INT32, DstT=INT64), "y")
        minus_one = add_constant("one", np.array([-1], np.int64))
        first_round = add(new_node(f"{name}/first", "AddV2", [round_count, minus_one], T=INT64), "z")
    else:
        first_round = add_constant("first", np.array([0], np.int64))
    axis = add_constant("axis", np.int32(0))
    # Outside of loops the number is a scalar, which becomes the first element of the vector.
    if not body.loop_depth_of(op):
        number_ref = add(new_node(f"{name}/vector", "ExpandDims", [number_ref, axis], T=INT64, Tdim=_INT32))
    loop_number = add(
        new_node(f"{name}/number", "ConcatV2", [number_ref, first_round, axis], 2, T=INT64, Tidx=_INT32)
    )
    return loop_number, -1 if is_reverse else 1


def next_round(number_ref: str, depth: int, round_increment: int) -> tuple[list[Any], str]:
    """Return nodes at the end of a loop's body that compute the next round's number, and its ref.

    depth: number of elements of the number that stay: the execution and the rounds of the loops around.
    """
    increment = constant("amanda/step", np.array([0] * depth + [round_increment], np.int64))
    next_number = new_node("amanda/next_round", "AddV2", [number_ref, "amanda/step:output:0"], T=INT64)
    return [increment, next_number], "amanda/next_round:z:0"


def _runs_in_reverse(op: tf.Operation, find_captured: Callable[[Any], Any]) -> bool:
    """Return True if a loop goes through the rounds of another loop in reverse, as a loop of gradients."""
    # Such a loop gets its number of rounds from the counter of the other loop.
    if len(op.inputs) <= _ROUND_COUNT:
        return False
    captured_count = find_captured(op.inputs[_ROUND_COUNT])
    round_count = op.inputs[_ROUND_COUNT] if captured_count is None else captured_count
    counted_loop = round_count.op
    if counted_loop.type not in LOOPS or round_count.value_index != _COUNTER:
        return False
    if counted_loop.graph is not op.graph:
        find_captured = captured_lookup(counted_loop.graph)
    return not _runs_in_reverse(counted_loop, find_captured)  # gradients of gradients go forward again


def captured_lookup(graph: Any) -> Callable[[Any], Any]:
    """Return a lookup of the symbol of another graph that a placeholder stands for; None for others."""
    external_by_placeholder = {
        (internal.op, internal.value_index): external
        for external, internal in getattr(graph, "captures", ())
        if not isinstance(external, ops.EagerTensor)
    }
    return lambda tensor: external_by_placeholder.get((tensor.op, tensor.value_index))

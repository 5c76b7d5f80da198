"""Definitions of functions with edited bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amanda.backend import digest
from tensorflow.core.framework import function_pb2, op_def_pb2

from ._body import Body, RewrittenBody
from ._loop_numbers import next_round
from ._nodes import INT64, opaque_identity
from ._syntax import op_def

NUMBER = "amanda_number"
"""Name of the argument of an edited function for the execution's number."""


def numbered_copy(
    definition: Any, rewritten: RewrittenBody, body: Body, step: int = 0, condition: bool = False
) -> Any:
    """Return a FunctionDef of an edited body, with the execution's number as its last argument.

    The name contains a digest of the content, so that equal copies are one function.
    step: of a loop's body, the change of the number from round to round; the number is then an output, too.
    condition: True for the condition of a loop. TensorFlow runs only those of its nodes that the result
    needs.
    """
    copy = _replace_nodes(definition, rewritten)
    # XLA cannot compile calls of Python.
    for attribute in ("_XlaMustCompile", "_xla_compile_id"):
        copy.attr.pop(attribute, None)
    copy.signature.input_arg.append(op_def_pb2.OpDef.ArgDef(name=NUMBER, type=INT64))
    inserted = dict.fromkeys(name for names in rewritten.inserted.values() for name in names)
    inserted |= dict.fromkeys(rewritten.removed.get(name, name) for name in rewritten.called_nodes)
    for name in inserted:
        key = f"amanda_{name}".replace("/", "_")
        # TensorFlow prunes nodes that no result needs; a control output keeps a node, and the call waits for
        # it.
        copy.control_ret[key] = name
        copy.signature.control_output.append(key)
    if step:
        nodes, number = next_round(NUMBER, body.depth, step)
        copy.node_def.extend(nodes)
        copy.signature.output_arg.append(op_def_pb2.OpDef.ArgDef(name=f"{NUMBER}_out", type=INT64))
        copy.ret[f"{NUMBER}_out"] = number
    # TensorFlow inlines the condition of a loop, and then runs what its result needs, without control
    # outputs.
    if condition:
        _delay_results(copy, inserted)
    if inserted:
        copy.signature.is_stateful = True
    return _name_by_content(copy, definition)


def _delay_results(copy: Any, nodes: Iterable[str]) -> None:
    """Make each result of a function wait for these nodes."""
    control_inputs = [f"^{node_name}" for node_name in nodes]
    for argument in copy.signature.output_arg if control_inputs else ():
        inputs = [copy.ret[argument.name], *control_inputs]
        barrier = opaque_identity(f"amanda/waiting/{argument.name}", inputs, argument.type)
        copy.node_def.append(barrier)
        copy.ret[argument.name] = f"{barrier.name}:output:0"


def edited_definition(definition: Any, rewritten: RewrittenBody) -> Any:
    """Return a FunctionDef of an edited body without calls of Python; its name contains a digest."""
    copy = _replace_nodes(definition, rewritten)
    definitions = (op_def(node.op) for node in copy.node_def)
    if any(definition is not None and definition.is_stateful for definition in definitions):
        copy.signature.is_stateful = True
    return _name_by_content(copy, definition)


def _replace_nodes(definition: Any, rewritten: RewrittenBody) -> Any:
    """Return a copy of a function with the nodes and results of its edited body."""
    copy = function_pb2.FunctionDef()
    copy.CopyFrom(definition)
    del copy.node_def[:]
    copy.node_def.extend(rewritten.nodes)
    for argument, text in zip(definition.signature.output_arg, rewritten.outputs, strict=True):
        copy.ret[argument.name] = text
    for key, name in definition.control_ret.items():
        copy.control_ret[key] = rewritten.removed.get(name, name)
    return copy


def _name_by_content(copy: Any, definition: Any) -> Any:
    content = digest(copy.SerializeToString(deterministic=True))
    copy.signature.name = f"{definition.signature.name}_amanda_{content:016x}"
    return copy

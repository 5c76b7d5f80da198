"""Definitions of functions with edited bodies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amanda.backend import digest
from tensorflow.core.framework import function_pb2, op_def_pb2

from ._body import Body, Rewritten
from ._nodes import INT64, passed
from ._rounds import next_round
from ._syntax import op_def

NUMBER = "amanda_number"
"""The argument of an edited function that carries the execution's number."""


def copy_of(definition: Any, rewritten: Rewritten, body: Body, step: int = 0, condition: bool = False) -> Any:
    """A FunctionDef of an edited body, which takes the execution's number as its last argument.

    Its name tells its content, so that equal copies are one function.
    step: of a loop's body how the number changes with each round: it is the last output then.
    condition: whether it is the condition of a loop, of which TensorFlow runs what its result needs alone.
    """
    copy = _edited(definition, rewritten)
    for attribute in ("_XlaMustCompile", "_xla_compile_id"):
        copy.attr.pop(attribute, None)
    copy.signature.input_arg.append(op_def_pb2.OpDef.ArgDef(name=NUMBER, type=INT64))
    inserted = dict.fromkeys(name for names in rewritten.inserted.values() for name in names)
    inserted |= dict.fromkeys(rewritten.removed.get(name, name) for name in rewritten.called)
    for name in inserted:
        key = f"amanda_{name}".replace("/", "_")
        copy.control_ret[key] = name
        copy.signature.control_output.append(key)
    if step:
        nodes, number = next_round(NUMBER, body.depth, step)
        copy.node_def.extend(nodes)
        copy.signature.output_arg.append(op_def_pb2.OpDef.ArgDef(name=f"{NUMBER}_out", type=INT64))
        copy.ret[f"{NUMBER}_out"] = number
    if condition:
        _delay_results(copy, inserted)
    if inserted:
        copy.signature.is_stateful = True
    return _named(copy, definition)


def _delay_results(copy: Any, nodes: Iterable[str]) -> None:
    """Make each result of a function come after these nodes."""
    waits = [f"^{one}" for one in nodes]
    for argument in copy.signature.output_arg if waits else ():
        inputs = [copy.ret[argument.name], *waits]
        node = passed(f"amanda/waiting/{argument.name}", inputs, argument.type)
        copy.node_def.append(node)
        copy.ret[argument.name] = f"{node.name}:output:0"


def edited(definition: Any, rewritten: Rewritten) -> Any:
    """A FunctionDef of an edited body with routines that are native, under a name that tells its content."""
    copy = _edited(definition, rewritten)
    if any((known := op_def(node.op)) is not None and known.is_stateful for node in copy.node_def):
        copy.signature.is_stateful = True
    return _named(copy, definition)


def _edited(definition: Any, rewritten: Rewritten) -> Any:
    """The function with the nodes and results of its edited body."""
    copy = function_pb2.FunctionDef()
    copy.CopyFrom(definition)
    del copy.node_def[:]
    copy.node_def.extend(rewritten.nodes)
    for argument, text in zip(definition.signature.output_arg, rewritten.outputs, strict=True):
        copy.ret[argument.name] = text
    for key, name in definition.control_ret.items():
        copy.control_ret[key] = rewritten.removed.get(name, name)
    return copy


def _named(copy: Any, definition: Any) -> Any:
    content = digest(copy.SerializeToString(deterministic=True))
    copy.signature.name = f"{definition.signature.name}_amanda_{content:016x}"
    return copy

"""Executions of the ops of matches, as the tool records them and as replacements read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda.backend import TensorMap
from amanda.tools.rewrite._pattern import PatternError
from amanda.tools.rewrite._program import MatchSite, ProgramNode


@dataclass(eq=False)
class OpExecution:
    """An execution of an op of a match.

    producers: the executions that made the inputs.  compute: function of the inputs that returns the output.
    is_used: True once the match was replaced.  reader: the first reader of the output outside of the match.
    """

    node: ProgramNode
    inputs: Sequence[Any]
    compute: Callable[..., Any]
    producers: Sequence[OpExecution | None] = ()
    is_used: bool = False
    reader: str = ""

    @property
    def is_intact(self) -> bool:
        """True if the inputs of the op were not written since it was called."""
        return True

    def is_read(self) -> bool:
        """Return True if an op outside of the match has read the output, or a hook wants its gradient."""
        return bool(self.reader)


class OpExecutions:
    """Records of executions by their outputs, in a framework whose ops cannot be delayed.

    on_read: called with each execution whose output is read outside of the match.
    """

    def __init__(self, on_read: Callable[[OpExecution], None]) -> None:
        self._on_read = on_read
        self._by_output = TensorMap[OpExecution]()

    def run_or_delay(self, node: ProgramNode, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return the output of an op, or a tensor that stands for the output until it is read."""
        producers, value = self.producers(inputs), compute(*inputs)
        if hasattr(value, "dtype"):
            self._by_output[value] = OpExecution(node, inputs, compute, producers)
        return value

    def producers(self, inputs: Sequence[Any]) -> list[OpExecution | None]:
        """Return the execution that made each input."""
        return [self.execution_of(value) for value in inputs]

    def execution_of(self, value: Any) -> OpExecution | None:
        """Return the execution that made a value."""
        return self._by_output.get(value)

    def compute_delayed(self, written: Sequence[Any] = ()) -> None:
        """Compute each delayed op that reads a tensor of `written`; without tensors, each delayed op."""


class OpCall:
    """An op of a match at an execution; a call computes the op.

    type: StandardMapping's word.  name: the framework's name.  inputs: in the order of the schema; None for
    an input that another op of the match makes.  attributes: the arguments that are not tensors, by name.
    """

    def __init__(self, execution: OpExecution, site: MatchSite) -> None:
        node = execution.node
        self.type, self.name, self.framework = node.type, node.name, node.framework
        self.attributes, self.rewrites = node.attributes, node.rewrites
        inner_edges = site.binding.edges
        self.inputs: tuple[Any, ...] = tuple(
            [None if (node.id, i) in inner_edges else value for i, value in enumerate(execution.inputs)]
        )
        self._compute = execution.compute

    def __call__(self, *inputs: Any) -> Any:
        """Return the op's result for all of its inputs; without arguments, for those of this execution."""
        return self._compute(*(inputs or self.inputs))


class Match:
    """A match at an execution.  ops: the named ops.

    `match["query"]` is the value of a Capture; `"mask" in match` is False if its op is absent.
    """

    def __init__(self, site: MatchSite, executions: Mapping[int, OpExecution]) -> None:
        self._calls = {index: OpCall(execution, site) for index, execution in executions.items()}
        self._site = site
        self._captures = site.binding.captures
        self.framework = self._calls[site.last].framework
        self.ops = {
            op.name: self._calls[op_id] for op, op_id in site.binding.ops.items() if op.name is not None
        }

    def __getitem__(self, name: str) -> Any:
        if name not in self._captures:
            names = ", ".join(self._captures) or "nothing"
            raise PatternError(f"the match has captured {names}, not {name!r}; `in` tells what is there")
        index, position = self._captures[name]
        return self._calls[index].inputs[position]

    def __contains__(self, name: str) -> bool:
        return name in self._captures

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a Capture; the default if its op is absent."""
        if name not in self:
            return default
        return self[name]

    def original(self) -> Any:
        """Compute the ops of the match as the program does; return the output of the last op."""
        outputs: dict[int, Any] = {}

        def output_of(op_id: int) -> Any:
            if op_id not in outputs:
                inputs = list(self._calls[op_id].inputs)
                for (reader, position), producer in self._site.binding.edges.items():
                    if reader == op_id:
                        inputs[position] = output_of(producer)
                outputs[op_id] = self._calls[op_id](*inputs)
            return outputs[op_id]

        return output_of(self._site.last)

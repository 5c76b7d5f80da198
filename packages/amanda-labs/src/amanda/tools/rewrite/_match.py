"""A match at one execution, for replacements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amanda.tools.rewrite._pattern import PatternError
from amanda.tools.rewrite._program import Site
from amanda.tools.rewrite._steps import Step


class OpCall:
    """One op of a match at one execution.

    type: StandardMapping's word.  name: the framework's own.  inputs: in the order of the schema; None for an
    input that another op of the match makes.  attributes: the arguments that are not tensors, by name.
    A call computes the op, with as many inputs as the op has.
    """

    def __init__(self, step: Step, site: Site) -> None:
        node = step.node
        self.type, self.name, self.framework = node.type, node.name, node.framework
        self.attributes, self.rewrites = node.attributes, node.rewrites
        made = site.found.edges
        self.inputs: tuple[Any, ...] = tuple(
            [None if (node.id, i) in made else one for i, one in enumerate(step.inputs)]
        )
        self._compute = step.compute

    def __call__(self, *inputs: Any) -> Any:
        """Return the op's result for these inputs; without any, for those of this execution."""
        return self._compute(*(inputs or self.inputs))


class Match:
    """A match at one execution: `match["query"]` is a captured value, `"mask" in match` whether there is one.

    ops: the named ops.
    """

    def __init__(self, site: Site, steps: Mapping[int, Step]) -> None:
        self._calls = {index: OpCall(step, site) for index, step in steps.items()}
        self._site = site
        self._captures = site.found.captures
        self.framework = self._calls[site.last].framework
        self.ops = {op.name: self._calls[one] for op, one in site.found.ops.items() if op.name is not None}

    def __getitem__(self, name: str) -> Any:
        if name not in self._captures:
            known = ", ".join(self._captures) or "nothing"
            raise PatternError(f"the match has captured {known}, not {name!r}; `in` tells what is there")
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
        """Compute the ops of the match one by one; return the output of the last."""
        made: dict[int, Any] = {}

        def value(op_id: int) -> Any:
            if op_id not in made:
                inputs = list(self._calls[op_id].inputs)
                for (reader, position), maker in self._site.found.edges.items():
                    if reader == op_id:
                        inputs[position] = value(maker)
                made[op_id] = self._calls[op_id](*inputs)
            return made[op_id]

        return value(self._site.last)

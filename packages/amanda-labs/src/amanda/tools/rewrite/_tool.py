"""The tool: finds matches of patterns as ops are analysed, and replaces each match as one op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import amanda
from amanda.options import Name, checked
from amanda.tools.kit import leaves
from amanda.tools.mapping import StandardMapping
from amanda.tools.rewrite._frameworks import frameworks
from amanda.tools.rewrite._match import Match
from amanda.tools.rewrite._named import chosen
from amanda.tools.rewrite._pattern import PatternError, Rule
from amanda.tools.rewrite._program import Edge, Node, Program, Site
from amanda.tools.rewrite._pytorch import HOOKS
from amanda.tools.rewrite._result import RewriteResult
from amanda.tools.rewrite._steps import Step, Steps

logger = logging.getLogger("amanda")

FIRST = "the match was not known yet"
OTHERWISE = "control flow: its ops came otherwise"
WRITTEN = "what its ops were given was written in between"
COMPILED = 'in graphs of compiled="instrument" single ops are replaced, and no matches of several'
DECLINED = "the rule's condition does not hold"


class RewriteTool(amanda.Tool):
    """A tool that replaces subgraphs: a rule's replacement computes each match of the rule's pattern.

    rules: `Rule`s, or names of built-in ones ("fold_batch_norm"); one or several.  Of overlapping matches the
    one that begins first is replaced, then the longest, then that of the first rule.  `result` has the
    matches, with the number of replacements or the reason why there are none; `clear` starts anew.
    """

    calibrates_when_prepared = (
        True  # all ops of a file, and so all matches, are known before the first op changes
    )
    is_copied_when_used = False

    @checked(error=PatternError)
    def __init__(self, rules: Sequence[Name | Rule] | Name | Rule = ()) -> None:
        super().__init__()
        self.rules = tuple(chosen(rules))
        self.depends_on(StandardMapping(), frameworks())
        self.add_inst_for_op(self._enter)
        self.add_inst_for_op(self._leave, require_outputs=True)
        self.clear()

    @property
    def result(self) -> RewriteResult:
        """Return the matches so far."""
        return RewriteResult(self._program.matches())

    def clear(self) -> None:
        """Forget the matches, and analyse ops anew."""
        self.load_state_dict({})
        self._program = Program(self.rules)
        self._steps: dict[str, Steps] = {}

    def scope_left(self) -> None:
        """Compute the delayed ops whose outputs are still referred to, before their inputs change."""
        for steps in self._steps.values():
            with suppress(Exception):  # a reader gets the error
                steps.settle()

    def _enter(self, context: amanda.OpContext) -> None:
        framework = context.namespace[0]
        if framework not in self._steps:
            self._steps[framework] = context["steps"](self._read)
        steps = self._steps[framework]
        for value in leaves(context.get_inputs()):
            step = steps.of(value)
            if step is not None:
                self._program.made_by(step.node, value)
        node = self._program.enter(context)
        self._decide(except_for=node)
        site = self._program.site_of(node.id)
        if site is None:
            if node.in_place and node.is_eager and context.get_inputs():
                context.insert_before_op(self._settle, inputs=[0], steps=steps)
        elif not node.is_eager:
            if node.id == site.last:
                self._instrument_graph(context, node, site)
        elif node.id == site.last:
            context.replace_op(self._replace, node=node, site=site, steps=steps)
        else:
            context.replace_op(self._put_off, node=node, steps=steps)

    def _leave(self, context: amanda.OpContext) -> None:
        self._program.leave(context)

    def _decide(self, except_for: Node | None = None) -> None:
        changed = self._program.decide()
        if except_for is not None:
            changed.discard(except_for.id)
        if changed:
            self.analyse_again(changed)

    def _instrument_graph(self, context: amanda.OpContext, last: Node, site: Site) -> None:
        """Replace the last op of a match in a graph; the others stay, and run only if they are read."""
        nodes, edges = self._program.nodes, site.found.edges
        read = [
            (index, i)
            for index in site.members
            for i in range(len(nodes[index].flow.inputs))
            if (index, i) not in edges
        ]
        symbols = {one: nodes[one[0]].values[one[1]]() for one in read}
        if site.rule.when is not None and not site.rule.when(_in_graph(site, nodes, symbols)):
            site.fallbacks[DECLINED] += 1
            return
        own = [one for one in read if one[0] == last.id]
        others = [one for one in read if one[0] != last.id]
        if others and not context["reads_others"]:
            site.fallbacks[COMPILED] += 1
            return
        positions = [position for _, position in own]
        replace: Callable[..., Any] = self._replace_in_graph
        if context.is_static():
            replace = amanda.traceable(partial(replace))  # by a mark of its own: others are Python
        context.replace_op(replace, inputs=positions, reads=others, edges=[*own, *others], site=site)

    @staticmethod
    def _put_off(*inputs: Any, node: Node, steps: Steps, original: Callable[..., Any]) -> Any:
        return steps.take(node, inputs, original)

    def _replace(
        self, *inputs: Any, node: Node, site: Site, steps: Steps, original: Callable[..., Any]
    ) -> Any:
        found = {node.id: Step(node, inputs, original, steps.makers(inputs))}
        reason = _gather(site, node.id, found)
        read = next((step for step in found.values() if step.is_read()), None)
        if read is not None and not reason:
            self._break(site, read)
            return NotImplemented
        if not reason:
            match = Match(site, found)
            if site.rule.when is None or site.rule.when(match):
                result = _replaced(site, match)
                site.replaced += 1
                for step in found.values():
                    step.is_used = True
                return result
            reason = DECLINED
        site.fallbacks[reason] += 1
        for step in found.values():
            step.reader = step.reader or "the match itself"
        return NotImplemented

    def _replace_in_graph(
        self, *inputs: Any, edges: Sequence[Edge], site: Site, reads: Sequence[Any] = ()
    ) -> Any:
        given = dict(zip(edges, (*inputs, *reads), strict=True))
        result = _replaced(site, _in_graph(site, self._program.nodes, given))
        site.replaced += 1
        return result

    @staticmethod
    @amanda.observer
    def _settle(written: Any, steps: Steps) -> None:
        steps.settle(leaves([written]))

    def _read(self, step: Step) -> None:
        """Stop replacing a match: an op outside of it reads the output of a delayed op."""
        site = self._program.site_of(step.node.id)
        if site is not None and step.is_used:
            if step.reader in HOOKS:
                logger.warning(
                    "%s was called on what %s at %s makes after its match was replaced: no gradient arrives "
                    "there in this execution; rewrite replaces the match no more",
                    step.reader, step.node.type, step.node.source,
                )  # fmt: skip
            self._break(site, step)
        elif site is not None:
            site.fallbacks[OTHERWISE] += 1

    def _break(self, site: Site, step: Step) -> None:
        """Stop replacing a match of which a single op is read."""
        site.broken = f"what {step.node.type} makes is read by {step.reader}"
        self._decide()


def _replaced(site: Site, match: Match) -> Any:
    result = site.rule.replacement(match)
    if result is None:
        raise PatternError(f"the replacement of rule {site.rule.name!r} gave None; it returns the new output")
    return result


def _gather(site: Site, reader: int, found: dict[int, Step]) -> str:
    """Collect the executions that lead to one; return the reason if they are not the match, else ""."""
    if not found[reader].is_intact:
        return WRITTEN
    for position, step in enumerate(found[reader].makers):
        maker = site.found.edges.get((reader, position))
        if maker is None:
            continue
        if step is None or step.node.id != maker:
            return FIRST if not site.replaced and not site.fallbacks else OTHERWISE
        if found.setdefault(maker, step) is not step:
            return OTHERWISE
        reason = _gather(site, maker, found)
        if reason:
            return reason
    return ""


def _in_graph(site: Site, nodes: Mapping[int, Node], given: Mapping[Edge, Any]) -> Match:
    """Return a match in a graph, from its inputs, without those that its own ops make."""
    steps = {}
    for index in site.members:
        node = nodes[index]
        inputs = [given.get((index, i)) for i in range(len(node.flow.inputs))]
        steps[index] = Step(node, inputs, partial(_computed, node))
    return Match(site, steps)


def _computed(node: Node, *inputs: Any) -> Any:
    assert node.compute is not None
    return node.compute(inputs)

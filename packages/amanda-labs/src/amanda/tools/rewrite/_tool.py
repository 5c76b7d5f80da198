"""The tool: finds matches of patterns as ops are analysed, and replaces each match as one op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar

import amanda
from amanda.options import Name, checked
from amanda.tools.kit import leaves
from amanda.tools.mapping import MappingTool, StandardMapping
from amanda.tools.results import Column, Result, check_schema, shortened
from amanda.tools.rewrite._program import (
    Edge,
    Match,
    MatchSite,
    OpExecution,
    OpExecutions,
    ProgramMatches,
    ProgramNode,
    Rewritten,
)
from amanda.tools.rewrite._pytorch import HOOKS, TorchOpExecutions
from amanda.tools.rewrite._rules import (
    PatternError,
    Rule,
    expand_rules,
    fold_in_pytorch,
    fold_in_tensorflow,
    fused_attention,
)

logger = logging.getLogger("amanda")

FIRST_EXECUTION = "the match was not known yet"
OTHER_CONTROL_FLOW = "control flow: its ops ran in another way"
INPUTS_WRITTEN = "an input of its ops was written in between"
COMPILED_GRAPH = 'graphs of compiled="instrument" can only replace matches of a single op'
CONDITION_FAILED = "the rule's condition does not hold"


class RewriteTool(amanda.Tool):
    """Replace subgraphs of a model, such as a convolution with its batch norm, by other computations.

    Args:
        rules: A `Rule`, the name of a built-in rule ("fold_batch_norm"), or a list of these.  Of overlapping
            matches, the one that begins first is replaced; of these the longest; of these the one of the
            first rule.

    `result` lists the matches, with the number of replacements or the reason for none; `clear` empties it.
    """

    purpose = "change"

    # All ops of a file, and so all matches, are known before the first op changes.
    calibrates_when_prepared = True
    is_copied_when_used = False

    @checked(error=PatternError)
    def __init__(self, rules: Sequence[Name | Rule] | Name | Rule = ()) -> None:
        super().__init__()
        self.rules = tuple(expand_rules(rules))
        self.depends_on(StandardMapping(), framework_rules())
        self.add_inst_for_op(self._analyse_op)
        self.add_inst_for_op(self._record_outputs, require_outputs=True)
        self.clear()

    @property
    def result(self) -> RewriteResult:
        """Return the matches so far."""
        return RewriteResult(self._program.list_outcomes())

    def clear(self) -> None:
        """Forget the matches, and analyse the ops again."""
        self.load_state_dict({})
        self._program = ProgramMatches(self.rules)
        self._executions: dict[str, OpExecutions] = {}

    def scope_left(self) -> None:
        """Compute the delayed ops whose outputs are still referred to, before their inputs change."""
        for executions in self._executions.values():
            with suppress(Exception):  # the op computes again for a reader, who gets the error
                executions.compute_delayed()

    def _analyse_op(self, context: amanda.OpContext) -> None:
        """Record an op, choose the matches to replace, and instrument the op as a member of its match.

        In eager mode the last op of a match is replaced, and the others are delayed until they are read.
        """
        framework = context.namespace[0]
        if framework not in self._executions:
            self._executions[framework] = context["executions"](self._on_read)
        executions = self._executions[framework]
        # Stand-ins are unknown to the data flow until an op reads them.
        for value in leaves(context.get_inputs()):
            execution = executions.execution_of(value)
            if execution is not None:
                self._program.record_output(execution.node, value)
        node = self._program.record_op(context)
        # Its plan is being made now, from the choice below.
        self._choose_matches(node_under_analysis=node)
        site = self._program.site_of(node.id)
        if site is None:  # the op is in no match that is replaced
            # Delayed ops that read the memory are computed before it is written.
            if node.in_place and node.is_eager and context.get_inputs():
                context.insert_before_op(self._compute_readers, inputs=[0], executions=executions)
        elif node.id == site.last:
            if node.is_eager:
                context.replace_op(self._replace_match, node=node, site=site, executions=executions)
            else:
                self._instrument_graph(context, node, site)
        elif node.is_eager:
            context.replace_op(self._delay_op, node=node, executions=executions)

    def _record_outputs(self, context: amanda.OpContext) -> None:
        self._program.record_outputs(context)

    def _choose_matches(self, node_under_analysis: ProgramNode | None = None) -> None:
        """Choose the matches to replace, and let the ops whose match has changed be analysed again."""
        changed_ids = self._program.choose_matches()
        if node_under_analysis is not None:
            changed_ids.discard(node_under_analysis.id)
        if changed_ids:
            self.analyse_again(changed_ids)

    def _instrument_graph(self, context: amanda.OpContext, last: ProgramNode, site: MatchSite) -> None:
        """Replace the last op of a match in a graph; the other ops stay, and run only if they are read.

        Counts a fallback, and replaces nothing, if the rule's condition fails or the graph cannot do it.
        """
        nodes = self._program.nodes
        # Inputs of the members, an edge being the id of an op and a position, that ops outside make.
        outer_edges = [
            (op_id, position)
            for op_id in site.members
            for position in range(len(nodes[op_id].flow.inputs))
            if (op_id, position) not in site.binding.producer_ids
        ]
        # Symbols were held weakly: the condition sees None for those that are gone.
        symbols = {(op_id, i): nodes[op_id].input_symbols[i]() for op_id, i in outer_edges}
        if site.rule.when is not None and not site.rule.when(_graph_match(site, nodes, symbols)):
            site.fallbacks[CONDITION_FAILED] += 1
            return
        edges_of_last = [(op_id, position) for op_id, position in outer_edges if op_id == last.id]
        edges_of_others = [(op_id, position) for op_id, position in outer_edges if op_id != last.id]
        # PyTorch's compiled graphs hand a replacement the inputs of its own op alone.
        if edges_of_others and not context["reads_other_ops"]:
            site.fallbacks[COMPILED_GRAPH] += 1
            return
        positions = [position for _, position in edges_of_last]
        replace: Callable[..., Any] = self._replace_in_graph
        if context.is_static():
            # A new object for each op carries the mark: the bound method runs in Python elsewhere.
            replace = amanda.traceable(partial(replace))
        context.replace_op(
            replace, inputs=positions, reads=edges_of_others, edges=[*edges_of_last, *edges_of_others],
            site=site,
        )  # fmt: skip

    @staticmethod
    def _delay_op(
        *inputs: Any, node: ProgramNode, executions: OpExecutions, original: Callable[..., Any]
    ) -> Any:
        """Return a stand-in for the output of an op, or the output of an op that is not delayed."""
        return executions.run_or_delay(node, inputs, original)

    def _replace_match(
        self,
        *inputs: Any,
        node: ProgramNode,
        site: MatchSite,
        executions: OpExecutions,
        original: Callable[..., Any],
    ) -> Any:
        """Return the output that the rule computes from a match; NotImplemented to compute the original.

        node: the last op.  A fallback is counted with its reason; a match of which an output was read is
        given up.  Raises PatternError for a replacement that gives None.
        """
        execution_by_id = {node.id: OpExecution(node, inputs, original, executions.producers(inputs))}
        # Adds the other members, back from this one.  Control flow may run the same ops in another order than
        # when the match was found.
        reason = _collect_executions(site, node.id, execution_by_id)
        if not reason:
            # Checked now: an output may have been read between its op and this one.
            read_executions = [execution for execution in execution_by_id.values() if execution.is_read()]
            if read_executions:
                self._stop_replacing(site, read_executions[0])
                return NotImplemented
            match = Match(site, execution_by_id)
            if site.rule.when is None or site.rule.when(match):
                result = _call_replacement(site, match)
                site.replaced += 1
                for execution in execution_by_id.values():
                    execution.is_used = True
                return result
            reason = CONDITION_FAILED
        site.fallbacks[reason] += 1
        for execution in execution_by_id.values():
            # The original computes, and reads the outputs of the delayed ops: no read from outside.
            execution.reader = execution.reader or "the match itself"
        return NotImplemented

    def _replace_in_graph(
        self, *inputs: Any, edges: Sequence[Edge], site: MatchSite, reads: Sequence[Any] = ()
    ) -> Any:
        """Return the output that the rule computes from symbols, and count the replacement."""
        values = dict(zip(edges, (*inputs, *reads), strict=True))
        result = _call_replacement(site, _graph_match(site, self._program.nodes, values))
        site.replaced += 1
        return result

    @staticmethod
    @amanda.observer
    def _compute_readers(written: Any, executions: OpExecutions) -> None:
        executions.compute_delayed(leaves([written]))

    def _on_read(self, execution: OpExecution) -> None:
        """Count a fallback, or stop replacing a match, when the output of a delayed op is read.

        The reader is outside of the match.  A match that was replaced already is not replaced any more, with
        a warning if the reader is a hook.
        """
        site = self._program.site_of(execution.node.id)
        # Too late for this execution: the output is computed besides the replacement, and the match given up.
        if site is not None and execution.is_used:
            if execution.reader in HOOKS:
                logger.warning(
                    "%s was called on an output of %s at %s after its match was replaced: the output gets no "
                    "gradient in this execution; rewrite will no longer replace the match",
                    execution.reader, execution.node.type, execution.node.source,
                )  # fmt: skip
            self._stop_replacing(site, execution)
        elif site is not None:
            site.fallbacks[OTHER_CONTROL_FLOW] += 1

    def _stop_replacing(self, site: MatchSite, execution: OpExecution) -> None:
        """Stop replacing a match, since the output of an execution within it is read; choose matches anew."""
        site.broken = f"what {execution.node.type} makes is read by {execution.reader}"
        self._choose_matches()


def _call_replacement(site: MatchSite, match: Match) -> Any:
    """Return the output that a rule's replacement computes; raise PatternError for None."""
    result = site.rule.replacement(match)
    if result is None:
        raise PatternError(f"the replacement of rule {site.rule.name!r} gave None; it returns the new output")
    return result


def _collect_executions(site: MatchSite, reader_id: int, executions: dict[int, OpExecution]) -> str:
    """Add the executions of a match to `executions`, by op id, from a reader back.

    reader_id: of an op that is there already.  Returns the reason for a fallback; "" if all are found, and
    none of their inputs was written since.
    """
    if not executions[reader_id].is_intact:
        return INPUTS_WRITTEN
    for position, execution in enumerate(executions[reader_id].producers):
        producer_id = site.binding.producer_ids.get((reader_id, position))
        if producer_id is None:  # an input from outside of the match
            continue
        if execution is None or execution.node.id != producer_id:
            is_first = not site.replaced and not site.fallbacks
            return FIRST_EXECUTION if is_first else OTHER_CONTROL_FLOW
        # Two inputs that one op of the pattern makes have to come from one execution.
        if executions.setdefault(producer_id, execution) is not execution:
            return OTHER_CONTROL_FLOW
        reason = _collect_executions(site, producer_id, executions)
        if reason:
            return reason
    return ""


def _graph_match(site: MatchSite, nodes: Mapping[int, ProgramNode], values: Mapping[Edge, Any]) -> Match:
    """Return a match in a graph.  values: of the inputs that ops outside of the match make."""
    executions = {}
    for op_id in site.members:
        node = nodes[op_id]
        inputs = [values.get((op_id, position)) for position in range(len(node.flow.inputs))]
        executions[op_id] = OpExecution(node, inputs, partial(_compute_node, node))
    return Match(site, executions)


def _compute_node(node: ProgramNode, *inputs: Any) -> Any:
    assert node.compute is not None
    return node.compute(inputs)


def framework_rules() -> MappingTool:
    """Return mapping rules that write these keys into a context.

    executions: the class that records executions.
    rewrites: the framework's replacements, by name of rule.
    channels_last: True if convolutions have the channels last, in the ops that Keras makes.
    reads_other_ops: True if a replacement in a graph may read inputs of other ops.
    """
    return MappingTool([["*", _map_all], ["pytorch", _map_pytorch], ["tensorflow", _map_tensorflow]])


def _map_all(context: amanda.OpContext) -> None:
    context["executions"], context["rewrites"] = OpExecutions, {}
    context["channels_last"], context["reads_other_ops"] = False, True


def _map_pytorch(context: amanda.OpContext) -> None:
    context["executions"], context["reads_other_ops"] = TorchOpExecutions, False
    context["rewrites"] = {"fold_batch_norm": fold_in_pytorch, "fuse_attention": fused_attention}


def _map_tensorflow(context: amanda.OpContext) -> None:
    context["rewrites"] = {"fold_batch_norm": fold_in_tensorflow}
    context["channels_last"] = (context.get_attrs().get("data_format") or b"NHWC") in (b"NHWC", "NHWC")


class RewriteResult(Result):
    """A row for each match, in the order of execution."""

    name: ClassVar[str] = "rewrite"
    title = "Rewritten subgraphs"
    columns: ClassVar[Sequence[Column]] = (
        Column("phase", shown=False), Column("type"), Column("module", show=partial(shortened, width=40)),
        Column("source", show=partial(shortened, width=40)), Column("rule"), Column("ops"),
        Column("replaced", show="{:,}".format, total=True),
        Column("fallbacks", show="{:,}".format, total=True), Column("why"),
    )  # fmt: skip

    def __init__(self, matches: Sequence[Rewritten]) -> None:
        self.matches = tuple(matches)

    def count(self, rule: str | None = None) -> int:
        """Return the number of matches that are replaced.

        Args:
            rule: Name of a rule; None for all.
        """
        return sum(not match.obstacle and rule in (None, match.rule) for match in self.matches)

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return a row for each match."""
        return [
            (match.phase, match.type, match.module, match.source, match.rule, " ".join(match.ops),
             match.replaced, sum(match.fallbacks.values()), match.why)
            for match in self.matches
        ]  # fmt: skip

    def _facts(self) -> Mapping[str, Any]:
        """Return the matches."""
        return {"matches": [asdict(match) for match in self.matches]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RewriteResult:
        """Return the result that `to_dict` described; raise ValueError for other schemas."""
        check_schema(content, cls.name, cls.version)
        return cls([Rewritten(**{**entry, "ops": tuple(entry["ops"])}) for entry in content["matches"]])

    def merged(self, *results: RewriteResult) -> RewriteResult:
        """Return the matches of this and other runs or ranks."""
        return RewriteResult([match for result in (self, *results) for match in result.matches])

    def notes(self) -> Sequence[str]:
        """Return the number of matches of each rule."""
        if not self.matches:
            return ["No rule's pattern was met."]
        rules = dict.fromkeys(match.rule for match in self.matches)
        counts = ", ".join(f"{rule}: {self.count(rule)}" for rule in rules)
        return [f"Matches that are replaced: {counts}."]

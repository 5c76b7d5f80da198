"""Routines at the operations of a body: how they are grouped, which are traced, which values are saved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import tensorflow as tf
from amanda.backend import Action, Insertion, NotTraceable, OpFacts, Rewriter, Side, Value, digest
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, ops

from ._autodiff import SavedKey, SavedTensor
from ._body import AutodiffPlace, Body, TensorFlowRewriting
from ._facts import GraphTensorOps
from ._insertions import Insertions, may_end_loop
from ._nodes import constant, new_node
from ._sides import OpSide, dtype_enum, is_plain, op_side
from ._slots import RoutineNode


class ForeignInput(NamedTuple):
    """An input of another operation that a replacement reads: value, op id and flat position."""

    value: Value
    op_id: int
    position: int


_NO_INPUT = -1
"""Position of a value of a node that is no input of the operation."""


class RoutineRewriter(Rewriter[tf.Operation]):
    """Puts routines among the nodes of a body; the base of the body's rewriter.

    replacement_by_name: by the name of a replaced operation's node, the node that runs instead.
    """

    insertion_type = RoutineNode
    rewriting: TensorFlowRewriting

    def __init__(self, body: Body, rewriting: TensorFlowRewriting) -> None:
        super().__init__(rewriting)
        self.body = body
        self.insertions = Insertions(body, rewriting)
        self.replacement_by_name: dict[str, str] = {}
        self._saved_count_by_op_id: dict[int, int] = {}

    def nodes(self) -> Iterable[tf.Operation]:
        """Return the operations, in order."""
        return self.body.ops

    def write_node(self, node: tf.Operation, inputs: Side, outputs: Side) -> None:
        """Do nothing: nodes are edited once all routines are in place."""

    def is_changeable(self, symbol: Any) -> bool:
        """Return True for a tensor that is neither a handle nor a reference."""
        return is_plain(symbol)

    def group(self, action: Action) -> Hashable:
        """Return a key of a routine's kind; routines at a place with equal keys share a node."""
        # In a file each tool has functions of its own, so that an error names the tool.
        tool_id = id(action.tool) if self.rewriting.is_for_file else 0
        # Routines that read changing values run as Python, so they must not join a traced group.
        volatile_name = self.rewriting.volatile_name(action) if action.traceable else ""
        return action.observer, self._is_in_autodiff(action), action.traceable, volatile_name, tool_id

    def _is_in_autodiff(self, action: Action) -> bool:
        """Return True if a routine takes part in autodiff."""
        return action.differentiable or self.rewriting.state.autodiff

    def insert_all(self, actions: Sequence[Action], side: Side, facts: OpFacts) -> None:
        """Put routines at a side; report those at a backward op without gradients."""
        if side.count or facts.backward_op is None:
            super().insert_all(actions, side, facts)
        elif actions and op_side(side).op.inputs:  # a constant needs no report
            side_name, verb = ("before", "enters") if op_side(side).ahead else ("after", "leaves")
            self.rewriting.report(
                f"routines {side_name} backward ops that no gradient {verb}",
                "in a graph such routines get gradients; ops that compute shapes, among others, have none",
            )

    def replace(self, action: Action, inputs: Side, outputs: Side, facts: OpFacts) -> bool:
        """Replace an operation, or the gradients that a backward operation computes.

        Returns False, with a report, for an operation that cannot be replaced; also for a backward operation
        that computes no gradients.
        """
        output_positions = range(outputs.count)
        if facts.backward_op is not None:
            if not output_positions:
                return False
            plain_positions = outputs.positions_where(output_positions, is_plain)
            return self.insert([action], inputs, range(inputs.count), outputs, plain_positions, facts)
        op = op_side(inputs).op
        # A wrong guess would send a gradient to the wrong op without a sign of it.
        if action.reads and self.body.has_guessed_forwards:
            self.rewriting.report(
                f"the replacement of {op.name}",
                "it reads inputs of other ops, and only names tell which gradients are theirs: let the "
                "function be traced, or the graph be made, within a scope",
            )
            return False
        foreign_inputs = self.foreign_inputs(action, op_side(inputs), facts)
        if outputs.positions_where(output_positions, is_plain) != list(output_positions):
            self.rewriting.report(f"the replacement of {op.name}", f"what {op.type} gives is no value")
            return False
        input_positions = inputs.selected_positions([action.select if action.reads else None])
        foreign_values = [foreign_input.value for foreign_input in foreign_inputs]
        if not self.insert(
            [action], inputs, input_positions, outputs, output_positions, facts, foreign_values
        ):
            return False
        self.replacement_by_name[self.body.node_name(op)] = self.insertions.nodes[-1].name
        if foreign_inputs and self.rewriting.is_differentiated:
            self._add_reader_places(facts, foreign_inputs)
        return True

    @abstractmethod
    def foreign_inputs(self, action: Action, inputs: OpSide, facts: OpFacts) -> Sequence[ForeignInput]:
        """Return the inputs of other operations that a replacement reads."""

    def complete_insertion(
        self, insertion: Insertion, symbols: Sequence[Any], inputs_side: Side, outputs_side: Side
    ) -> Insertion:
        """Set the dtypes of a node with routines, its loops, and what it saves for gradients; return it.

        symbols: of the values that the node returns.
        """
        assert isinstance(insertion, RoutineNode)
        facts, action = insertion.facts, insertion.actions[0]
        insertion.loop_depth = self.rewriting.loop_depth_by_op_id.get(facts.op_id, 0)
        insertion.dtypes = [symbol.dtype.base_dtype for symbol in symbols]
        if facts.backward_op is None and not action.observer and self.rewriting.is_differentiated:
            self._save_for_gradients(insertion, op_side(inputs_side), outputs_side)
        return insertion

    def _save_for_gradients(self, routine_node: RoutineNode, side: OpSide, outputs_side: Side) -> None:
        """Make a node with routines save its values, if gradients of its op need them.

        If the routines take part in autodiff, record also a place for the pullbacks of these gradients.
        """
        facts = routine_node.facts
        is_in_autodiff = routine_node.is_replacement or self._is_in_autodiff(routine_node.actions[0])
        has_gradients_here = (
            not self.body.has_gradients_elsewhere and facts.op.name not in self.body.stacked_names
        )
        # Gradients in the same graph read the changed tensors directly.
        if has_gradients_here and not is_in_autodiff:
            return
        side_name = "instead" if routine_node.is_replacement else "before" if side.ahead else "after"
        number = self._saved_count_by_op_id[facts.op_id] = self._saved_count_by_op_id.get(facts.op_id, 0) + 1
        routine_node.saved_key = saved_key = SavedKey(facts.op_id, side_name, number)
        routine_node.is_in_autodiff = is_in_autodiff
        routine_node.readers = self.rewriting.readers_by_saved_key[saved_key]
        routine_node.readers.read_once = has_gradients_here
        if is_in_autodiff:
            node_name = f"amanda/{len(self.rewriting.table)}"  # the name that the next added node gets
            foreign_positions = [_NO_INPUT] * routine_node.extra_input_count
            autodiff_place = AutodiffPlace(
                side_name, saved_key, self.body.identity, node_name,
                [*side.flat_positions(routine_node.input_positions), *foreign_positions],
                outputs_side.flat_positions(routine_node.output_positions),
            )  # fmt: skip
            self.rewriting.autodiff_places.setdefault(facts.op_id, []).append(autodiff_place)

    def _add_reader_places(self, facts: OpFacts, foreign_inputs: Sequence[ForeignInput]) -> None:
        """Add places at the operations whose inputs a replacement reads, for gradients of these inputs."""
        replaced_place = self.rewriting.autodiff_places[facts.op_id][-1]
        # The replacement reads inputs of the replaced operation first, and then the foreign ones.
        own_input_count = len(replaced_place.input_positions) - len(foreign_inputs)
        for reader_id in dict.fromkeys(foreign_input.op_id for foreign_input in foreign_inputs):
            reader_positions = [
                foreign_input.position if foreign_input.op_id == reader_id else _NO_INPUT
                for foreign_input in foreign_inputs
            ]
            reader_place = replace(
                replaced_place, side="reader",
                input_positions=[_NO_INPUT] * own_input_count + reader_positions,
                replacement_id=facts.op_id,
            )  # fmt: skip
            self.rewriting.autodiff_places.setdefault(reader_id, []).append(reader_place)

    def reason_not_to_trace(self, insertion: Insertion) -> str | None:
        """Return why routines are not traced; None if they are, "" for a reason that needs no report.

        Traceable routines that take `run` are reported here.
        """
        assert isinstance(insertion, RoutineNode)
        facts, is_for_file = insertion.facts, self.rewriting.is_for_file
        if insertion.is_replacement:
            op_type = getattr(facts.backward_op or facts.op, "type", "")
            return None if is_for_file else f"it replaces {op_type}, and files alone inline replacements"
        if insertion.saved_key is not None:
            return "it takes part in autodiff" if insertion.is_in_autodiff else _SAVED_FOR_GRADIENTS
        if not insertion.dtypes:
            return "it is given nothing that it can change" if is_for_file else ""
        if not insertion.actions[0].traceable:
            return ""
        for action in insertion.actions:
            if action.takes_run:
                self._report_untraced(action, "it takes `run`, which belongs to one execution")
        return "" if insertion.takes_run else None

    def report_python_call(self, insertion: Insertion, why: str) -> None:
        """Report traceable routines that run as Python, except differentiable ones with saved values."""
        assert isinstance(insertion, RoutineNode)
        for action in insertion.actions:
            if insertion.is_replacement or insertion.saved_key is None or not action.differentiable:
                self._report_untraced(action, why)

    def _report_untraced(self, action: Action, why: str) -> None:
        """Report that a routine runs as Python, if it is marked as traceable."""
        if action.traceable:
            self.rewriting.report(f"traceable {action}", f"{why}, so it runs as Python")

    def inline(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Trace routines into a function; return results of a node that calls it.  Raises NotTraceable."""
        assert isinstance(insertion, RoutineNode)
        try:
            routine = TracedRoutine(insertion, [value.symbol for value in inputs], self.rewriting)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise NotTraceable(f"it cannot be traced: {reason}") from error
        self.rewriting.traced_actions += [(action, routine.constants) for action in insertion.actions]
        op, refs = op_side(side).op, [value.ref for value in inputs]
        result_types = list(map(dtype_enum, outputs))
        control_inputs = self._control_inputs(op) if insertion.is_replacement else ()
        ahead = op_side(side).ahead and not insertion.is_replacement
        name = self.insertions.add_traced_call(op, routine, refs, result_types, ahead, control_inputs)
        return self._register_values(insertion, name, inputs, outputs, side)

    def write_call(
        self, insertion: Insertion, inputs: Sequence[Value], outputs: Sequence[Any], side: Side
    ) -> list[Value]:
        """Add a node that calls routines in Python; return its results.

        Observers, which have none, share nodes with those of other operations.
        """
        assert isinstance(insertion, RoutineNode)
        op, refs = op_side(side).op, [value.ref for value in inputs]
        input_symbols = [value.symbol for value in inputs]
        # A replaced operation does not run, so it does not wait.
        ahead, is_unawaited = op_side(side).ahead, insertion.is_replacement
        if insertion.actions[0].observer:
            self.insertions.observe(op, insertion, refs, input_symbols, ahead)
            return []
        if insertion.facts.backward_op is not None and insertion.is_replacement:
            ahead, is_unawaited = False, False  # the backward operation itself still runs
        result_types, types = list(map(dtype_enum, outputs)), list(map(dtype_enum, input_symbols))
        control_inputs = self._control_inputs(op) if insertion.extra_input_count else None
        name = self.insertions.add_slot_call(
            op, insertion, refs, types, result_types, ahead, is_unawaited, control_inputs
        )
        return self._register_values(insertion, name, inputs, outputs, side)

    def _register_values(
        self, routine_node: RoutineNode, name: str, inputs: Sequence[Value], output_symbols: Sequence[Any],
        side: Side,
    ) -> list[Value]:  # fmt: skip
        """Return the results of the node `name`; record these and its inputs in `saved_tensor_by_ref`.

        Ahead of an operation that may end a loop, all results but the first are those of added identities.
        """
        insertions, saved_key = self.insertions, routine_node.saved_key
        refs = [insertions.output_of(name, i) for i in range(len(output_symbols))]
        if not routine_node.is_replacement:
            for i, value in enumerate(inputs):
                # An input that is the result of an earlier node is recorded as that.
                saved_input = SavedTensor(saved_key, is_output=False, position=i)
                insertions.saved_tensor_by_ref.setdefault(value.ref, saved_input)
            # See `may_end_loop`: the condition may read the first output of a node only.
            if op_side(side).ahead and may_end_loop(op_side(side).op):
                for i in range(1, len(output_symbols)):
                    refs[i] = insertions.pass_through(name, i, dtype_enum(output_symbols[i]))
        for i, ref in enumerate(refs):
            insertions.saved_tensor_by_ref[ref] = SavedTensor(saved_key, is_output=True, position=i)
        return list(map(Value, refs, output_symbols))

    def _control_inputs(self, op: tf.Operation) -> list[str]:
        """Return the control inputs of an operation, which a node that replaces it takes over."""
        node = self.body.nodes[self.body.node_name(op)]
        return [text for text in node.input if text.startswith("^")]


_SAVED_FOR_GRADIENTS = "what it gives is kept for a backward function in another graph"


_TENSORS = GraphTensorOps()


class TracedRoutine:
    """The routines of a node as a function of the runtime, traced on placeholders.

    definitions: FunctionDefs of the functions that it calls, and at last its own.
    constants: eager tensors that the routines read, which are the function's last arguments.
    argument_types: dtype enums of the arguments.  is_stateful: True if an operation in it is.
    Creation calls the routines on symbols; raises NotImplementedError if they read a variable.
    """

    def __init__(
        self, routine_node: RoutineNode, tensors: Sequence[Any], rewriting: TensorFlowRewriting
    ) -> None:
        graph = func_graph.FuncGraph("amanda_routine")
        with graph.as_default():
            placeholders = [
                tf.compat.v1.placeholder(tensor.dtype.base_dtype, tensor.shape) for tensor in tensors
            ]
            graph.inputs = list(placeholders)
            graph.outputs = self._run_on_symbols(routine_node, placeholders, rewriting)
        self.constants = []
        for external, _ in graph.captures:  # the graph has appended them to its inputs
            # Captured tensors become constants of the graph, which a variable cannot be.
            if not isinstance(external, ops.EagerTensor) or external.dtype in (tf.resource, tf.variant):
                raise NotImplementedError("it reads a variable")
            self.constants.append(external)
        self.is_stateful = any(op._is_stateful for op in graph.get_operations() if op.type != "Placeholder")
        atomic = atomic_function.from_func_graph(f"__amanda_routine_{id(graph)}", graph, {})
        definition = atomic.definition
        # The name must not enter the digest of the content, which becomes the name: equal functions are
        # shared.
        definition.signature.name = ""
        content = digest(definition.SerializeToString(deterministic=True))
        definition.signature.name = f"amanda_routine_{content:016x}"
        callees = [function.definition for function in graph._functions.values()]
        self.definitions = [*callees, definition]
        self.argument_types = [dtype_enum(tensor) for tensor in graph.inputs]

    @staticmethod
    def _run_on_symbols(
        routine_node: RoutineNode, inputs: list[Any], rewriting: TensorFlowRewriting
    ) -> list[Any]:
        """Run a node's routines on symbols; return their results in the dtypes of the graph."""
        run_dict: dict[Any, Any] = {}  # traced routines do not take `run`
        if routine_node.is_replacement:
            results = routine_node.run_replacement(routine_node.actions[0], _TENSORS, inputs, run_dict)
        else:
            actions, values = routine_node.actions, routine_node.unflatten(inputs)
            results = routine_node.call_routines(actions, values, _TENSORS, rewriting.state, run_dict)
        dtypes = routine_node.dtypes
        return [tf.identity(tf.cast(result, dtype)) for result, dtype in zip(results, dtypes, strict=True)]

    def call_nodes(
        self, name: str, inputs: Sequence[str], control_inputs: Sequence[str], result_types: Sequence[int],
        output_suffix: str,
    ) -> list[Any]:  # fmt: skip
        """Return the nodes of the constants, and at last the node `name`, which calls the function.

        output_suffix: of a constant's output, as an input spells it.
        """
        nodes = [constant(f"{name}/constant{i}", value.numpy()) for i, value in enumerate(self.constants)]
        op_type = "StatefulPartitionedCall" if self.is_stateful else "PartitionedCall"
        constant_refs = (f"{node.name}{output_suffix}" for node in nodes)
        call = new_node(name, op_type, [*inputs, *constant_refs, *control_inputs])
        call.attr["f"].func.name = self.definitions[-1].signature.name
        for attribute, types in (("Tin", self.argument_types), ("Tout", result_types)):
            call.attr[attribute].list.CopyFrom(attr_value_pb2.AttrValue.ListValue(type=list(types)))
        for attribute in ("config", "config_proto", "executor_type"):
            call.attr[attribute].s = b""
        return [*nodes, call]

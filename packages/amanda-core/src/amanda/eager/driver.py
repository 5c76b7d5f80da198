"""A driver of a framework that executes ops as they are called: each call, its analysis and its routines."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.eager.call import Call, EagerOps, SavedTensors
from amanda.eager.program import cache_program
from amanda.eager.trace import Trace
from amanda.interceptor.opid import digest
from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import OpAnalysis
from amanda.plan.facts import OpFacts, user_source
from amanda.plan.lifetime import bind_to_subjects, parameter_slots
from amanda.plan.plan import Plan
from amanda.plan.routine import NOT_CALLED, run_replacement, run_routine
from amanda.plan.tensors import is_among, spread
from amanda.scope.driver import Driver
from amanda.scope.report import Report
from amanda.scope.state import State, in_force

if TYPE_CHECKING:
    from amanda.eager.views import Views
    from amanda.plan.action import Action
    from amanda.plan.tool_stack import ToolStack


class EagerDriver(EagerOps, Driver):
    """A driver of a framework that executes ops as they are called; a subclass adds primitives of tensors.

    It analyses an op at its first execution, and runs the plan of the op at every execution.
    """

    def register_framework(self) -> None:
        """Mark the framework's code; register the types of values that distinguish ops, and `slot_of`."""
        super().register_framework()
        # Parameters enter the ids of ops; other tensors come anew at each step, and would make each an op.
        for kind in self.identity_types:
            interceptor.add_identity_type(kind)
        if self.slot_of is not None:
            parameter_slots.add_finder(self.slot_of)

    def site(self, target: Any, op: Any, key: str, flags: int = 0) -> interceptor.Site:
        """Return the site of an operator, whose calls come to `handle`.

        Args:
            target: Callable that the program calls.
            op: Operator that tools see.
            key: Name of the operator, unique in the framework, which enters op ids.
            flags: Flags of `amanda.interceptor`, such as `TRANSPARENT`, in one number.
        """
        return interceptor.Site(
            target, op, key, digest(self._short_name, key), self.handle, flags, self.reader
        )

    def handle(
        self,
        state: State,
        call_cache: interceptor.CallCache | None,
        op_id: int,
        site: interceptor.Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int = 0,
        resumption: interceptor.Resumption | None = None,
    ) -> Any:
        """Run a call of an op in Python; the interceptor calls this where no native program serves the call.

        Tools see nothing of a call for which the op's only plan has no work, or that has an
        `uninstrumented_reason`, which the scopes report.

        Args:
            state: State of the thread that calls.
            call_cache: Native programs and plans of the op; None before its first execution.
            op_id: Id of the op.
            site: Site of the operator.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            key: Key of the call's form, under which a program may be stored; 0 where none may.
            resumption: Where to go on with an execution that native code has begun; None where the call
                starts.

        Returns:
            The result for the program.
        """
        stack = state.stack
        assert stack is not None
        if resumption is not None:
            return self._resume_after_native_code(self.bind(site, args, kwargs), state, op_id, resumption)
        must_follow_writes = self._must_follow_writes(stack, op_id)
        may_have_no_work = not (stack.guards or kwargs or must_follow_writes)
        if may_have_no_work and call_cache is not None and len(call_cache.plans) == 1:
            (plan,) = call_cache.plans.values()
            # The only plan has no actions: store that for native code before the arguments are bound, which
            # takes time.
            if not plan and not plan.wants_backward(self.needs_grad(args)):
                call_cache.learn(key, None)  # None: calls of this form have no work
                return self.invoke(site, args, kwargs)
        reason = self.uninstrumented_reason(site)
        if reason is not None:
            state.report(*reason)
            return self.invoke(site, args, kwargs)
        call = self.bind(site, args, kwargs)
        plan_key = stack.plan_key(self, call.inputs, op_id)
        if call_cache is None or plan_key not in call_cache.plans:
            return self._analyse_and_execute(call, state, op_id, plan_key)
        plan = call_cache.plans[plan_key]
        # The answer of a callable guard is not part of native keys, and writes that views have to follow are
        # seen in Python alone.
        if key and not stack.keyed_by_callables and not must_follow_writes:
            cache_program(self, call_cache, key, plan, call, state)
        return self._execute_plan(plan, call, state, op_id)

    def _analyse_and_execute(self, call: Call, state: State, op_id: int, plan_key: Hashable) -> Any:
        """Analyse an op and execute it; store its plan, also where native code looks for it.

        Without the cache nothing is stored.  A stored plan is dropped with the outermost module of the call,
        or with a parameter of the op.
        """
        stack = state.stack
        assert stack is not None
        subjects = interceptor.subjects()
        facts = self.describe(call, subjects)
        facts.op_id, facts.source = op_id, user_source()
        if stack.keyed_by_shapes_read:
            facts.input_shapes = self.shapes(call.inputs)
        analysis = OpAnalysis(facts, self, stack, plan_key, state.cache)
        result = self._execute_plan(analysis.plan, call, state, op_id, analysis)
        if state.cache:
            analysis.store_plans()
            if call.written_positions or call.may_write_undeclared():
                # Recorded before any view is linked: from the first link on these ops have to run in Python.
                stack.writing_ops.add(op_id)
            self._store_call_cache(stack, op_id, analysis.plan)
            # The outermost module holds the others: when it dies, the op cannot run again.
            bind_to_subjects(op_id, [*subjects[:1], *self.identity_values(call)])
        facts.drop_values()
        return result

    def _execute_plan(
        self,
        plan: Plan,
        call: Call,
        state: State,
        op_id: int,
        analysis: OpAnalysis | None = None,
        last_called: int = -1,
        last_result: Any = None,
        changed_inputs: list[Any] | None = None,
    ) -> Any:
        """Run the routines of a plan and the op between them; return the op's result for the program.

        Leaves a `Trace` for backward ops that tools want, and ties views that routines have replaced.
        analysis: the analysis to complete after the op, at its first execution; None at later ones.
        last_called, last_result: index of the routine that native code called last, and its result, which is
        not yet among the inputs; -1 where native code called none.
        changed_inputs: inputs after the earlier routines; None for the call's inputs.
        """
        # The facts of the first execution, without values: errors and notes name the same op at each
        # execution.
        facts = plan.chain[0].context._facts if analysis is None else analysis.facts
        inputs = call.inputs if changed_inputs is None else changed_inputs
        # Created before the routines run: nodes that these create must be told from the op's.
        capture = self.capture_backward_ops() if plan.has_backward_routines else None
        is_recomputation = state.recomputed_executions is not None
        actions = plan.actions(is_recomputation)
        run = plan.dict_for_python(self, state.may_recompute, actions.before[: last_called + 1])
        shapes: tuple[Any, ...] | None = None
        if _may_need_shapes(plan, call, analysis):
            shapes = (self.shapes(call.inputs),)  # those of the outputs follow once the op has run

        for i, action in enumerate(actions.before):
            if i >= last_called:
                result = last_result if i == last_called else NOT_CALLED
                inputs = run_routine(
                    self, action, inputs, facts, run, state.autodiff, call.written_positions, result,
                    shapes=shapes,
                )  # fmt: skip
        if inputs is not call.inputs:
            inputs = call.fit_to_memory(inputs)

        # Of the inputs that the op gets, which routines may have changed.
        needs_grad = self.needs_grad(inputs) if plan.has_backward_routines else None
        wants_backward = plan.wants_backward(needs_grad)
        trace = Trace(op_id, needs_grad, plan, run, not state.cache) if wants_backward else None
        # Tensors that backward ops save: copied before a routine's output is written into a target.
        saved = None
        if call.target_positions and _may_change_outputs(plan, analysis):
            saved = self.saved_tensors_recorder([inputs[i] for i in call.target_positions])
        # Without a schema that says what the op writes, versions tell: a write into a routine's value has to
        # reach the tensor that it stands for.
        versions = self.versions(inputs) if inputs is not call.inputs and call.may_write_inputs() else None
        if trace is None or capture is None:
            outputs = self._run_op_or_replacement(actions.replace, call, inputs, facts, run, saved)
        else:
            self.note_op_inputs(capture, inputs)
            with capture as nodes:
                outputs = self._run_op_or_replacement(actions.replace, call, inputs, facts, run, saved)

        values, rebuild = self.flatten_with_unreturned(call, outputs, inputs)
        if versions is not None and self.versions(inputs) != versions:
            values, inputs = self._copy_writes_to_originals(call, inputs, versions, values)
            outputs = rebuild(values)
        if shapes is not None:
            shapes = (*shapes, self.shapes(values))
        if analysis is not None:
            facts.inputs, facts.outputs = (
                list(self.unwrap_for_analysis(inputs)),
                list(self.unwrap_for_analysis(values)),
            )
            # Analyses after the op may have recorded routines, which run in this first execution already.
            plan = analysis.analyse_after_op()
            if shapes is None and plan.takes_shapes:
                shapes = (self.shapes(call.inputs), self.shapes(values))
        if trace is not None:
            trace.shapes = shapes
            # A copy: the facts of the forward contexts drop their values when the call ends.
            trace.store_facts(self, facts.for_backward_op(None, 0, True), inputs, values)
            self.attach_trace(trace, nodes, [*values, *(call.inputs[i] for i in call.written_positions)])

        written = call.target_tensors(inputs, values)
        if written and saved is None and plan.has_output_routines:
            saved = self.find_saved_tensors(written, values)
        # Asked for once more: the analyses after the op may have completed the plan.
        actions_after = plan.actions(is_recomputation).after
        final_values = self._run_routines_after_op(
            actions_after, values, written, facts, run, state, shapes, inputs, saved=saved
        )
        if self.views is not None and (self.views or inputs is not call.inputs or final_values is not values):
            final_values = self._tie_replaced_views(
                self.views, call, inputs, values, final_values, facts, _are_inputs_isolated(plan, state)
            )
        return outputs if final_values is values else rebuild(final_values)

    def _copy_writes_to_originals(
        self, call: Call, inputs: list[Any], versions: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Copy what the op wrote into routines' values to the op's original inputs.

        Return outputs and inputs with the originals in the place of the written values.  Needed for ops such
        as an autograd.Function that marks an input dirty: no schema announces the write before the op runs.
        versions: those of `inputs` before the op ran.  values: the flat outputs.
        """
        original_by_id: dict[int, Any] = {}  # by the id of the written value
        for original, replacement, version in zip(call.inputs, inputs, versions, strict=True):
            if (
                replacement is not original
                and self.is_tensor(replacement)
                and self.version(replacement) != version
            ):
                self.write(original, replacement, isolated=False)
                original_by_id[id(replacement)] = original
        return (
            [original_by_id.get(id(value), value) for value in values],
            [original_by_id.get(id(value), value) for value in inputs],
        )

    def _tie_replaced_views(
        self,
        views: Views,
        call: Call,
        inputs: list[Any],
        values: list[Any],
        final_values: list[Any],
        facts: OpFacts,
        are_inputs_isolated: bool,
    ) -> list[Any]:
        """Tie values from routines to the views that they replaced; return the outputs to use.

        Restores the outputs' roles in autodiff, and copies what the op has written to the other sides of
        ties.  Where the op returns a value that equals the input which it replaced, it becomes that input.
        values, final_values: outputs before and after the routines after the op.
        """
        are_inputs_replaced = inputs is not call.inputs
        if are_inputs_replaced:
            # Rarely needed and expensive: the op runs again at most once for all its outputs.
            @cache
            def run_on_originals() -> list[Any]:
                """Run the op once more, on its original inputs and without tools; return its flat result."""
                unobserved = interceptor.Activation(None, State.current(), False, False)
                with self.without_autodiff(), in_force(unobserved):
                    return self.flatten_with_unreturned(call, call.invoke(call.inputs), call.inputs)[0]

            if are_inputs_isolated:
                original_by_id = self._find_returned_inputs(
                    call.inputs, inputs, final_values, run_on_originals
                )
                if original_by_id:
                    values = [original_by_id.get(id(value), value) for value in values]
                    final_values = [original_by_id.get(id(value), value) for value in final_values]
        if are_inputs_replaced or final_values is not values:
            final_values = self.restore_autodiff_roles(call.inputs, inputs, values, final_values)
        if are_inputs_replaced:
            views.tie_inputs(call.inputs, inputs, values, run_on_originals, (facts.name, facts.source))
        if final_values is not values:
            final_values = views.tie_outputs(inputs, values, final_values, (facts.name, facts.source))
        # `views` is true while there are ties.
        if views and call.written_positions:
            views.copy_writes(call.written_tensors(inputs, values))
        if views and call.may_write_undeclared():
            views.copy_unseen_writes()
        return final_values

    def _find_returned_inputs(
        self,
        original_inputs: Sequence[Any],
        inputs: Sequence[Any],
        values: list[Any],
        run_on_originals: Callable[[], Sequence[Any]],
    ) -> dict[int, Any]:
        """Return original inputs by the ids of equal replacements that the op has returned as outputs.

        An op that returns its input (`x.contiguous()`) has to return the program's tensor, not a copy.  Runs
        the op again where a value is equal.
        inputs, values: inputs with which the op ran, and the outputs after the routines.
        """
        pairs = zip(spread(original_inputs), spread(inputs), strict=False)
        original_by_id = {id(new): old for old, new in pairs if new is not old and self.is_tensor(new)}
        returned_inputs = {}
        for i, value in enumerate(values):
            original = original_by_id.get(id(value))
            is_equal = original is not None and self.have_equal_bits(original, value)
            if is_equal and run_on_originals()[i] is original:  # only then, since it runs the op again
                returned_inputs[id(value)] = original
        return returned_inputs

    def _run_routines_after_op(
        self,
        actions: Sequence[Action],
        values: list[Any],
        written: Sequence[Any],
        facts: OpFacts,
        run: dict[str, Any],
        state: State,
        shapes: Hashable,
        inputs: Sequence[Any],
        result: Any = NOT_CALLED,
        saved: SavedTensors | None = None,
    ) -> list[Any]:
        """Run the routines on the outputs and return the outputs to use.

        Where the op returned an input and a routine an equal tensor, the input itself stays the output.
        written: the user's tensors among the values.  inputs: inputs of the op.
        result: that of the first routine, if native code has called it.
        """
        copy_saved = None if saved is None else saved.copy_before_write
        for action in actions:
            mutable = [i for i, value in enumerate(values) if is_among(value, written)] if written else ()
            new_values = run_routine(
                self, action, values, facts, run, state.autodiff, mutable, result, copy_saved, shapes
            )
            if new_values is not values and not (action.differentiable or state.autodiff):
                new_values = self._restore_returned_inputs(values, new_values, inputs)
            # Native code has called the first routine at most.
            values, result = new_values, NOT_CALLED
        return values

    def _restore_returned_inputs(
        self, values: list[Any], new_values: Sequence[Any], inputs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs after a routine; a tensor equal to an input that the op returned is that input.

        Returns `values`, the outputs before the routine, if no other output has changed.
        """
        outputs = list(new_values)
        for i, (old, new) in enumerate(zip(values, new_values, strict=True)):
            if new is not old and self.is_program_tensor(old, inputs) and self.have_equal_bits(old, new):
                outputs[i] = old
        return values if all(map(operator.is_, values, outputs)) else outputs

    def _resume_after_native_code(
        self, call: Call, state: State, op_id: int, resumption: interceptor.Resumption
    ) -> Any:
        """Continue an execution that native code has stopped, with the plan that native code used.

        Native code stops after a routine that returned a value which it cannot put in place.  The plan is not
        looked up again, since an in-place op may have changed the dtype or shape of an argument.
        """
        plan, step, last_result, outputs, changed_inputs = resumption
        if outputs is NotImplemented:  # the op has not run
            return self._execute_plan(plan, call, state, op_id, None, step, last_result, changed_inputs)
        facts = plan.chain[0].context._facts
        inputs = call.inputs if changed_inputs is None else changed_inputs
        if plan.replace is not None:
            outputs = call.in_form_of_result(outputs)
        values, rebuild = self.flatten_with_unreturned(call, outputs, inputs)
        actions = plan.actions(state.recomputed_executions is not None)
        # Steps count the routines before the op, then those after it: index of the latter at the stop.
        stop = step - len(actions.before)
        if stop < 0:  # native code stopped at the op's own result
            stop, last_result = 0, NOT_CALLED
        written = call.target_tensors(inputs, values)
        saved = self.find_saved_tensors(written, values) if written else None
        shapes = (self.shapes(call.inputs), self.shapes(values))
        first_uncalled = stop if last_result is NOT_CALLED else stop + 1
        run: dict[str, Any] = {}
        if any(action.takes_run for action in actions.after[first_uncalled:]):
            called = (*actions.before, *actions.after[:first_uncalled])
            run = plan.run_dicts(self, state.may_recompute).dict_for_python(
                called, plan.has_backward_routines
            )
        final_values = self._run_routines_after_op(
            actions.after[stop:], values, written, facts, run, state, shapes, inputs, last_result, saved
        )
        if self.views is not None:
            final_values = self._tie_replaced_views(
                self.views, call, inputs, values, final_values, facts, _are_inputs_isolated(plan, state)
            )
        return outputs if final_values is values else rebuild(final_values)

    def _run_op_or_replacement(
        self,
        replace: Action | None,
        call: Call,
        inputs: list[Any],
        facts: OpFacts,
        run: dict[str, Any],
        saved: SavedTensors | None,
    ) -> Any:
        """Run the replacement; without one, or after NotImplemented, the op itself, recorded by `saved`."""
        if replace is not None:
            result = run_replacement(
                self, replace, inputs, facts, run, call.target_positions, call.invoke_for_replacement
            )
            if result is not NotImplemented:
                return call.in_form_of_result(result)
        if saved is not None:
            return saved.run_op(call, inputs)
        return call.invoke(inputs)

    def identity_values(self, call: Call) -> list[Any]:
        """Return the values that distinguish the call's op; its plan is dropped when any of these dies.

        They are the slots, and those of `identity_types` among the inputs, unless a driver overrides it.
        """
        parameters = (value for value in spread(call.inputs) if isinstance(value, self.identity_types))
        return [*call.slots, *parameters]

    def _store_call_cache(self, stack: ToolStack, op_id: int, plan: Plan) -> None:
        """Put a call cache with the stack's plans of an op into the interceptor's table, or None for no work.

        Of a call cache that is there, drop the native programs, which lack the new plan.
        """
        present_cache = stack.table.get(op_id)
        if isinstance(present_cache, interceptor.CallCache):
            present_cache.forget()
        elif plan or plan.has_backward_routines or stack.guards or self._must_follow_writes(stack, op_id):
            plans, has_shape_key = stack.plans.get(op_id, {}), stack.depends_on_shapes(op_id)
            stack.table.set(op_id, interceptor.CallCache(plans, has_shape_key))
        else:
            # None in the table: native code runs the op without a look at its arguments.
            stack.table.set(op_id, None)

    def _must_follow_writes(self, stack: ToolStack, op_id: int) -> bool:
        """Return True if views have to follow the writes of an op."""
        return self.views is not None and self.views.watches_writes and op_id in stack.writing_ops

    def mark_backward_analysed(self, trace: Trace, may_run_again: bool = True) -> None:
        """Mark the backward ops of an execution as analysed, unless the analysis of some is due.

        Args:
            trace: Record of the execution.
            may_run_again: Whether another backward pass may run these ops.
        """
        if not trace.unanalysed_ids:
            trace.mark_backward_analysed(may_run_again)

    def before_detach(self, report: Report) -> None:
        """Turn values from routines back into views of the tensors that they replaced; report the others."""
        if self.views is None:
            return
        for name, source in self.views.untie_all():
            report.add(
                f"what is written after the scope into a result of {name}, or into what that was a view of",
                "a routine gave the result another value, so the two no longer share memory", source,
            )  # fmt: skip


def _are_inputs_isolated(plan: Plan, state: State) -> bool:
    """Return True if no routine before the op takes part in autodiff."""
    return not (state.autodiff or any(action.differentiable for action in plan.before))


def _may_need_shapes(plan: Plan, call: Call, analysis: OpAnalysis | None) -> bool:
    """Return True if the shapes of the inputs have to be read before the op runs."""
    if plan.has_backward_routines or plan.takes_shapes:
        return True
    # Analyses after the op may yet record a routine that takes shapes; by then the op, or a routine before
    # it, may have written into the inputs.
    return analysis is not None and (bool(plan.before) or call.may_write_inputs())


def _may_change_outputs(plan: Plan, analysis: OpAnalysis | None) -> bool:
    """Return True if a routine after the op may change outputs, or if analyses may still record one."""
    if plan.has_output_routines:
        return True
    point = InstrumentationPoint.AFTER_FORWARD_OP
    return analysis is not None and any(pending.plan.stack.routines[point] for _, pending in analysis.pending)

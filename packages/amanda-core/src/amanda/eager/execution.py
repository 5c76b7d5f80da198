"""Analysis and execution of an eager op, in terms of the primitives of a driver."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda.eager.call import Call, EagerOps, Saved
from amanda.eager.program import learn
from amanda.eager.trace import Trace
from amanda.plan.action import InstrumentationPoint
from amanda.plan.analysis import Analysis
from amanda.plan.facts import OpFacts
from amanda.plan.lifetime import bind_to_subjects
from amanda.plan.plan import Plan
from amanda.plan.routine import NOT_CALLED, run_replacement, run_routine
from amanda.plan.source import user_source
from amanda.plan.tensors import is_among, spread
from amanda.scope.state import State, in_force

if TYPE_CHECKING:
    from amanda.eager.views import Views
    from amanda.plan.action import Action
    from amanda.plan.layer import Layer


class EagerExecution(EagerOps):
    """Analyses an op the first time that it executes, and runs its plan every time."""

    def handle(
        self,
        state: State,
        memo: interceptor.Memo | None,
        op_id: int,
        site: interceptor.Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: int = 0,
        done: tuple[Any, ...] | None = None,
    ) -> Any:
        """Run an op that has, or may have, a plan with actions; the interceptor calls it."""
        layer = state.layer
        assert layer is not None
        if done is not None:
            return self._resume(self.bind(site, args, kwargs), state, op_id, *done)
        watched = self._watches(layer, op_id)
        if memo is not None and len(memo.plans) == 1 and not (layer.guards or kwargs or watched):
            (plan,) = memo.plans.values()
            if not plan and not plan.wants_backward(self.gradients(args)):
                memo.learn(key, None)
                return self.invoke(site, args, kwargs)
        obstacle = self.obstacle(site)
        if obstacle is not None:
            state.report(*obstacle)
            return self.invoke(site, args, kwargs)
        call = self.bind(site, args, kwargs)
        signature = layer.key(self, call.inputs, op_id)
        if memo is None or signature not in memo.plans:
            return self._first(call, state, op_id, signature)
        plan = memo.plans[signature]
        if key and not layer.by_callables and not watched:
            learn(self, memo, key, plan, call, state)
        return self._execute(plan, call, state, op_id)

    def _first(self, call: Call, state: State, op_id: int, key: Hashable) -> Any:
        layer = state.layer
        assert layer is not None
        subjects = interceptor.subjects()
        facts = OpFacts(
            call.op, op_id, self.namespace, call.names, self.shown(call.inputs), attributes=call.attributes(),
            scope=self.scope_name(subjects), source=user_source(), op_type=call.op_type(),
            parameters=call.parameters(), variable_of=self.variable_of, path_of=self.path_of(subjects),
            part_of=self.part_of, device_of=self.device_of,
            compute=call.computation(), aliases=self.scope_aliases(subjects),
            input_shapes=self.shapes(call.inputs) if layer.by_reads else (),
        )  # fmt: skip
        analysis = Analysis(facts, self, layer, key, state.cache)
        result = self._execute(analysis.plan, call, state, op_id, analysis)
        if state.cache:
            analysis.keep()
            if call.mutable or call.may_write_unseen():
                layer.writers.add(op_id)
            self._keep(layer, op_id, analysis.plan)
            bind_to_subjects(op_id, [*subjects[:1], *self.identities(call)])
        facts.drop_values()
        return result

    def _execute(
        self,
        plan: Plan,
        call: Call,
        state: State,
        op_id: int,
        analysis: Analysis | None = None,
        called: tuple[int, Any] = (-1, None),
        changed_inputs: list[Any] | None = None,
    ) -> Any:
        told = plan.chain[0].context._facts if analysis is None else analysis.facts
        inputs = call.inputs if changed_inputs is None else changed_inputs
        tracing = self.tracing() if plan.watches else None
        step, returned = called
        actions = plan.actions(state.recall is not None)
        run = plan.runs(self, state.is_recorded).resumed(actions.before[: step + 1])
        shapes: tuple[Any, ...] | None = None
        if plan.watches or plan.takes_shapes or (analysis is not None and (plan.before or call.may_write())):
            shapes = (self.shapes(call.inputs),)
        for i, action in enumerate(actions.before):
            if i >= step:
                result = returned if i == step else NOT_CALLED
                inputs = run_routine(
                    self, action, inputs, told, run, state.autodiff, call.mutable, result, shapes=shapes
                )
        if inputs is not call.inputs:
            inputs = call.fitted(inputs)
        gradients = self.gradients(inputs) if plan.watches else None
        traced = plan.wants_backward(gradients)
        trace = Trace(op_id, gradients, plan, run, not state.cache) if traced else None
        saved = None
        if call.targets and _acts_later(plan, analysis):
            saved = self.written_later([inputs[i] for i in call.targets])
        versions = self.versions(inputs) if inputs is not call.inputs and call.may_write() else None
        if trace is None or tracing is None:
            outputs = self._compute(actions.replace, call, inputs, told, run, saved)
        else:
            self.begin(tracing, inputs)
            with tracing as made:
                outputs = self._compute(actions.replace, call, inputs, told, run, saved)
        values, rebuild = self.results(call, outputs, inputs)
        if versions is not None and self.versions(inputs) != versions:
            values, inputs = self._written_back(call, inputs, versions, values)
            outputs = rebuild(values)
        if shapes is not None:
            shapes = (*shapes, self.shapes(values))
        if analysis is not None:
            told.inputs, told.outputs = list(self.shown(inputs)), list(self.shown(values))
            plan = analysis.after()
            if shapes is None and plan.takes_shapes:
                shapes = (self.shapes(call.inputs), self.shapes(values))
        if trace is not None:
            trace.shapes = shapes
            trace.keep(self, told, inputs, values)
            self.attach_trace(trace, made, [*values, *(call.inputs[i] for i in call.mutable)])
        written = call.written(inputs, values)
        if written and saved is None and plan.gives_outputs:
            saved = self.saved_of(written, values)
        after = plan.actions(state.recall is not None).after
        changed = self._run_after(after, values, written, told, run, state, shapes, inputs, saved=saved)
        if self.views is not None:
            changed = self._tied(self.views, call, inputs, values, changed, told, _is_isolated(plan, state))
        return outputs if changed is values else rebuild(changed)

    def _written_back(
        self, call: Call, inputs: list[Any], versions: list[Any], values: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Copy what the op wrote into routines' values to its own inputs; use these from then on.

        So does an autograd.Function that marks an input dirty, which no schema tells before it runs.
        """
        own: dict[int, Any] = {}
        for original, given, version in zip(call.inputs, inputs, versions, strict=True):
            if given is not original and self.is_tensor(given) and self.version(given) != version:
                self.write(original, given, isolated=False)
                own[id(given)] = original
        return [own.get(id(one), one) for one in values], [own.get(id(one), one) for one in inputs]

    def _tied(
        self,
        views: Views,
        call: Call,
        inputs: list[Any],
        values: list[Any],
        changed: list[Any],
        told: OpFacts,
        isolated: bool,
    ) -> list[Any]:
        """Tie the values that routines gave to the views whose place they took; return the outputs to use.

        isolated: whether the routines before the op took no part in autodiff.
        """
        if inputs is not call.inputs:

            @cache
            def again() -> list[Any]:
                unseen = interceptor.Activation(None, State.current(), False, False)
                with self.isolated(), in_force(unseen):
                    return self.results(call, call.invoke(call.inputs), call.inputs)[0]

            if isolated:
                handed = self._handed_back(call.inputs, inputs, changed, again)
                if handed:
                    values = [handed.get(id(one), one) for one in values]
                    changed = [handed.get(id(one), one) for one in changed]
        if inputs is not call.inputs or changed is not values:
            changed = self.known_to_autodiff(call.inputs, inputs, values, changed)
        if inputs is not call.inputs:
            views.given_before(call.inputs, inputs, values, again, (told.name, told.source))
        if changed is not values:
            changed = views.given_after(inputs, values, changed, (told.name, told.source))
        if views and call.mutable:
            views.wrote(call.writes(inputs, values))
        if views and call.may_write_unseen():
            views.settle()
        return changed

    def _handed_back(
        self,
        own: Sequence[Any],
        inputs: Sequence[Any],
        values: list[Any],
        again: Callable[[], Sequence[Any]],
    ) -> dict[int, Any]:
        """Return the op's own inputs for equal ones that routines gave and the op handed back, by their ids.

        own: the op's inputs.  inputs: those that it ran with.  again: runs it on its own inputs.
        """
        pairs = zip(spread(own), spread(inputs), strict=False)
        stands_for = {id(new): old for old, new in pairs if new is not old and self.is_tensor(new)}
        return {
            id(value): original
            for i, value in enumerate(values)
            if (original := stands_for.get(id(value))) is not None
            and self.same(original, value)
            and again()[i] is original
        }

    def _run_after(
        self,
        actions: Sequence[Action],
        values: list[Any],
        written: Sequence[Any],
        told: OpFacts,
        run: dict[str, Any],
        state: State,
        shapes: Hashable,
        inputs: Sequence[Any],
        returned: Any = NOT_CALLED,
        saved: Saved | None = None,
    ) -> list[Any]:
        """Run the routines on the outputs; an equal value for an input that the op handed back is that input.

        written: the user's tensors among the values.  inputs: those of the op.
        returned: what the first routine did, if called.
        """
        keep = None if saved is None else saved.keep
        for action in actions:
            mutable = [i for i, one in enumerate(values) if is_among(one, written)]
            changed = run_routine(
                self, action, values, told, run, state.autodiff, mutable, returned, keep, shapes
            )
            if changed is not values and not (action.differentiable or state.autodiff):
                changed = [
                    old
                    if new is not old and self.is_handed_back(old, inputs) and self.same(old, new)
                    else new
                    for old, new in zip(values, changed, strict=True)
                ]
                if all(map(operator.is_, values, changed)):
                    changed = values
            values, returned = changed, NOT_CALLED
        return values

    def _resume(
        self,
        call: Call,
        state: State,
        op_id: int,
        plan: Plan,
        step: int,
        returned: Any,
        outputs: Any,
        changed_inputs: list[Any] | None,
    ) -> Any:
        """Go on where native code stopped: after a routine that returned a value, or at what it cannot do.

        By the plan that it had: the op may have changed what the call looks like.
        changed_inputs: the inputs, where routines gave some.
        """
        if outputs is NotImplemented:
            called = step, returned
            return self._execute(plan, call, state, op_id, called=called, changed_inputs=changed_inputs)
        told = plan.chain[0].context._facts
        inputs = call.inputs if changed_inputs is None else changed_inputs
        if plan.replace is not None:
            outputs = call.formed(outputs)
        values, rebuild = self.results(call, outputs, inputs)
        actions = plan.actions(state.recall is not None)
        first = step - len(actions.before)
        if first < 0:
            first, returned = 0, NOT_CALLED
        written = call.written(inputs, values)
        saved = self.saved_of(written, values) if written else None
        rest, shapes = actions.after[first:], (self.shapes(call.inputs), self.shapes(values))
        next_step = first + (returned is not NOT_CALLED)
        run: dict[str, Any] = {}
        if any(action.takes_run for action in actions.after[next_step:]):
            before = (*actions.before, *actions.after[:next_step])
            run = plan.runs(self, state.is_recorded).resumed(before, plan.watches)
        changed = self._run_after(rest, values, written, told, run, state, shapes, inputs, returned, saved)
        if self.views is not None:
            changed = self._tied(self.views, call, inputs, values, changed, told, _is_isolated(plan, state))
        return outputs if changed is values else rebuild(changed)

    def _compute(
        self,
        replace: Action | None,
        call: Call,
        inputs: list[Any],
        told: OpFacts,
        run: dict[str, Any],
        saved: Saved | None,
    ) -> Any:
        if replace is not None:
            result = run_replacement(self, replace, inputs, told, run, call.targets, call.compute)
            if result is not NotImplemented:
                return call.formed(result)
        if saved is not None:
            return saved.seeing(call, inputs)
        return call.invoke(inputs)

    def identities(self, call: Call) -> list[Any]:
        """Return the values that tell the call's op apart; its plan dies with any of them."""
        return [value for value in spread(call.inputs) if isinstance(value, self.identity_types)]

    def _keep(self, layer: Layer, op_id: int, plan: Plan) -> None:
        """Put the plans that the layer has of an op into the interceptor's table."""
        known = layer.table.get(op_id)
        if isinstance(known, interceptor.Memo):
            known.forget()
        elif plan or plan.watches or layer.guards or self._watches(layer, op_id):
            layer.table.set(op_id, interceptor.Memo(layer.plans.get(op_id, {}), layer.is_sized(op_id)))
        else:
            layer.table.set(op_id, None)

    def _watches(self, layer: Layer, op_id: int) -> bool:
        """Return whether the writes of an op have to be seen."""
        return self.views is not None and self.views.watching and op_id in layer.writers

    def finish(self, trace: Trace, again: bool = True) -> None:
        """Mark the backward ops of an execution as analysed.

        again: whether the framework lets another pass come through them.
        """
        trace.finish(again)


def _is_isolated(plan: Plan, state: State) -> bool:
    """Return True if no routine before the op takes part in autodiff."""
    return not (state.autodiff or any(action.differentiable for action in plan.before))


def _acts_later(plan: Plan, analysis: Analysis | None) -> bool:
    """Return True if routines after the op are given values, or analyses may bring such routines."""
    if plan.gives_outputs:
        return True
    point = InstrumentationPoint.AFTER_FORWARD_OP
    return analysis is not None and any(draft.plan.layer.routines[point] for _, draft in analysis.fresh)

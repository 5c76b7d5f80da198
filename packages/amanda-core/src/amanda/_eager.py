"""How an eager op is analysed and executed, in terms of the primitives of a driver."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda._analysis import Analysis
from amanda._calls import Call, EagerOps
from amanda._facts import OpFacts
from amanda._mortality import bind_to_subjects
from amanda._plan import Combined
from amanda._program import learn
from amanda._routine import NOT_CALLED, run_replacement, run_routine
from amanda._source import user_source
from amanda._tensors import Saved, spread
from amanda._trace import Trace
from amanda.action import InstrumentationPoint

if TYPE_CHECKING:
    from amanda._layer import Layer
    from amanda._state import State
    from amanda._views import Views
    from amanda.action import Action


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
        done: tuple[Combined, int, Any, Any] | None = None,
    ) -> Any:
        """What the interceptor calls for an op that has, or may have, a plan with actions."""
        layer = state.layer
        assert layer is not None
        if done is not None:
            return self._resume(self.bind(site, args, kwargs), state, op_id, *done)
        watched = self._watches(layer, op_id)
        if memo is not None and len(memo.plans) == 1 and not (layer.guards or kwargs or watched):
            (combined,) = memo.plans.values()
            if not combined.forward and not combined.traced(self.gradients(args)):
                memo.learn(key, None)
                return site.invoke(args, kwargs)
        obstacle = self.obstacle(site)
        if obstacle is not None:
            state.report(*obstacle)
            return site.invoke(args, kwargs)
        call = self.bind(site, args, kwargs)
        signature = layer.key(self, call.inputs)
        if memo is None or signature not in memo.plans:
            return self._first(call, state, op_id, signature)
        combined = memo.plans[signature]
        if key and not layer.by_callables and not watched:
            learn(self, memo, key, combined, call)
        return self._execute(combined, call, state, op_id)

    def _first(self, call: Call, state: State, op_id: int, key: Hashable) -> Any:
        layer = state.layer
        assert layer is not None
        subjects = interceptor.subjects()
        facts = OpFacts(
            call.op, op_id, self.namespace, call.names, call.inputs, attributes=call.attributes(),
            scope=self.scope_name(subjects), source=user_source(), op_type=call.op_type(),
            parameters=call.parameters(), variable_of=self.variable_of, path_of=self.path_of(subjects),
            part_of=self.part_of,
            compute=call.computation(), aliases=self.scope_aliases(subjects),
        )  # fmt: skip
        analysis = Analysis(facts, self, layer, key, state.cache)
        result = self._execute(Combined(analysis.pairs), call, state, op_id, analysis)
        if state.cache:
            analysis.keep()
            if call.mutable:
                layer.writers.add(op_id)
            self._keep(layer, op_id, key, Combined(analysis.pairs))
            bind_to_subjects(op_id, [*subjects[:1], *self.identities(call)])
        facts.drop_values()
        return result

    def _execute(
        self,
        combined: Combined,
        call: Call,
        state: State,
        op_id: int,
        analysis: Analysis | None = None,
        called: tuple[int, Any] = (-1, None),
    ) -> Any:
        run: dict[str, Any] = {}
        told = combined.plans[0][1].context._facts if analysis is None else analysis.facts
        inputs = call.inputs
        tracing = self.tracing() if combined.watching else None
        step, returned = called
        for i, action in enumerate(combined.before):
            if i >= step:
                result = returned if i == step else NOT_CALLED
                inputs = run_routine(self, action, inputs, told, run, state, call.mutable, result)
        if inputs is not call.inputs:
            inputs = call.fitted(inputs)
        gradients = self.gradients(inputs) if combined.watching else None
        traced = combined.traced(gradients)
        trace = Trace(op_id, gradients, combined, run, not state.cache) if traced else None
        saved = None
        if call.targets and _acts_later(combined, analysis):
            saved = self.written_later([inputs[i] for i in call.targets])
        versions = self.versions(inputs) if inputs is not call.inputs and call.may_write() else None
        if trace is None or tracing is None:
            outputs = self._compute(combined, call, inputs, told, run, saved)
        else:
            self.begin(tracing, inputs)
            with tracing as made:
                outputs = self._compute(combined, call, inputs, told, run, saved)
        values, rebuild = self.results(call, outputs)
        if versions is not None and self.versions(inputs) != versions:
            values, inputs = self._written_back(call, inputs, versions, values)
            outputs = rebuild(values)
        if analysis is not None:
            told.inputs, told.outputs = list(inputs), list(values)
            combined = analysis.after()
        if trace is not None:
            trace.keep(self, told, inputs, values)
            self.attach_trace(trace, made, [*values, *(call.inputs[i] for i in call.mutable)])
        written = call.written(inputs, values)
        if written and saved is None and combined.gives_outputs:
            saved = self.saved_of(written)
        changed = self._run_after(combined.after, values, written, told, run, state, saved=saved)
        if self.views is not None:
            changed = self._tied(self.views, call, inputs, values, changed, told)
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
    ) -> list[Any]:
        """Tie the values that routines gave to the views whose place they took; return the outputs to use."""
        if inputs is not call.inputs or changed is not values:
            changed = self.known_to_autodiff(call.inputs, inputs, values, changed)
        if inputs is not call.inputs:

            def again() -> list[Any]:
                with self.isolated():
                    return self.results(call, call.invoke(call.inputs))[0]

            views.given_before(call.inputs, inputs, values, again, (told.name, told.source))
        if changed is not values:
            changed = views.given_after(inputs, values, changed, (told.name, told.source))
        if views and call.mutable:
            views.wrote(call.writes(inputs, values))
        return changed

    def _run_after(
        self,
        actions: Sequence[Action],
        values: list[Any],
        written: Sequence[Any],
        told: OpFacts,
        run: dict[str, Any],
        state: State,
        returned: Any = NOT_CALLED,
        saved: Saved | None = None,
    ) -> list[Any]:
        """written: the user's tensors among the values.  returned: what the first routine did, if called."""
        for action in actions:
            mutable = [i for i, one in enumerate(values) if any(one is own for own in written)]
            values = run_routine(self, action, values, told, run, state, mutable, returned, saved)
            returned = NOT_CALLED
        return values

    def _resume(
        self, call: Call, state: State, op_id: int, combined: Combined, step: int, returned: Any, outputs: Any
    ) -> Any:
        """Go on where native code stopped: after a routine that returned a value, or at what it cannot do.

        By the plan that it had: the op may have changed what the call looks like.
        """
        if outputs is NotImplemented:
            return self._execute(combined, call, state, op_id, called=(step, returned))
        told = combined.plans[0][1].context._facts
        values, rebuild = self.flatten(outputs)
        first = step - len(combined.before)
        if first < 0:
            first, returned = 0, NOT_CALLED
        written = call.written(call.inputs, values)
        saved = self.saved_of(written) if written else None
        changed = self._run_after(combined.after[first:], values, written, told, {}, state, returned, saved)
        if self.views is not None:
            changed = self._tied(self.views, call, call.inputs, values, changed, told)
        return outputs if changed is values else rebuild(changed)

    def _compute(
        self,
        combined: Combined,
        call: Call,
        inputs: list[Any],
        told: OpFacts,
        run: dict[str, Any],
        saved: Saved | None,
    ) -> Any:
        if combined.replace is not None:
            result = run_replacement(self, combined.replace, inputs, told, run, call.targets, call.compute)
            if result is not NotImplemented:
                return call.formed(result)
        if saved is not None:
            return saved.seeing(call, inputs)
        return call.invoke(inputs)

    def identities(self, call: Call) -> list[Any]:
        """What the call was given that tells ops apart; its plan dies with any of them."""
        return [value for value in spread(call.inputs) if isinstance(value, self.identity_types)]

    def _keep(self, layer: Layer, op_id: int, key: Hashable, combined: Combined) -> None:
        known = layer.table.get(op_id)
        if isinstance(known, interceptor.Memo):
            known.plans[key] = combined
            known.forget()
        elif combined.forward or combined.watching or layer.guards or self._watches(layer, op_id):
            layer.table.set(op_id, interceptor.Memo({key: combined}, layer.by_extents))
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


def _acts_later(combined: Combined, analysis: Analysis | None) -> bool:
    """Whether routines after the op are given values, or analyses may bring such routines."""
    if combined.gives_outputs:
        return True
    point = InstrumentationPoint.AFTER_FORWARD_OP
    return analysis is not None and any(layer.routines[point] for layer, _, _ in analysis.fresh)

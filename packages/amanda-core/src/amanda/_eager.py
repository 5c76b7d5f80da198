"""How an eager op is analysed and executed, in terms of the tensor primitives of a driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import TYPE_CHECKING, Any

from amanda import interceptor
from amanda._plan import Combined, Plan, bind_to_subjects
from amanda._program import program_of
from amanda._routine import NOT_CALLED, Saved, TensorOps, run_replacement, run_routine, spread
from amanda._source import user_source
from amanda.action import InstrumentationPoint
from amanda.context import OpContext, OpFacts

if TYPE_CHECKING:
    from amanda._plan import Layer
    from amanda._state import State
    from amanda.action import Action


class Call(ABC):
    """One call of an op: its inputs in schema order, and how to make the call with others.

    mutable: positions of the inputs that the op writes into.
    targets: positions of those that it returns: `self` of an in-place op, `out=`.
    """

    __slots__ = ("inputs", "mutable", "names", "op", "targets")

    op: Any
    inputs: list[Any]
    names: Sequence[str]
    mutable: Sequence[int]
    targets: Sequence[int]

    @abstractmethod
    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op itself on these inputs."""

    def computation(self) -> Callable[[Sequence[Any]], Any] | None:
        """Runs the op itself on inputs like this call's, none of which it holds; None where nothing can."""
        return None

    def compute(self, inputs: Sequence[Any]) -> Any:
        """Run it for a replacement, which is given a single output as itself."""
        return self.invoke(list(inputs))

    def written(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Those of the user's tensors that the op has written and gives back."""
        return spread(inputs[i] for i in self.targets)

    def formed(self, result: Any) -> Any:
        """A replacement's result in the form that the op's own has."""
        return result

    def sources(self) -> tuple[int | tuple[int, int], ...] | None:
        """Which argument each input is, positional ones and then those by keyword; -1: a default.

        A pair for the one input that is the tuple of the arguments from its first to before its second.
        None where that cannot be said.
        """
        return None

    def attributes(self) -> dict[str, Any]:
        """The non-tensor arguments by name."""
        return {}

    def parameters(self) -> Sequence[int]:
        """Positions of the inputs that were read of a variable, where the input itself does not tell."""
        return ()

    def op_type(self) -> str:
        """The framework's own name for what the op computes, one for all its spellings."""
        return str(getattr(self.op, "__name__", self.op))


class Trace:
    """What an execution leaves for its backward ops; it lives as long as their graph.

    gradients: which inputs needed a gradient.
    layer: the tools of the scope that it was made in.
    """

    __slots__ = (
        "__weakref__", "combined", "facts", "gradients", "layer", "op_id", "pending", "plans", "run"
    )  # fmt: skip

    def __init__(self, op_id: int, gradients: Hashable, combined: Combined, run: dict[str, Any]) -> None:
        self.op_id = op_id
        self.gradients = gradients
        self.combined = combined
        self.plans = combined.plans
        self.layer = combined.plans[-1][0]
        self.run = run
        self.facts: OpFacts | None = None
        self.pending: set[int] = set()

    def again(self) -> Trace:
        """A trace for the backward ops of this execution's backward ops."""
        trace = copy(self)
        trace.pending = set()
        return trace


class EagerExecution(TensorOps):
    """Analyses an op the first time that it executes, and runs its plan every time."""

    identity_types: tuple[type, ...] = ()
    reader: interceptor.Reader | None = None

    @property
    @abstractmethod
    def namespace(self) -> Any:
        """Tags of the ops."""

    @abstractmethod
    def bind(self, site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call as the tools see it."""

    @abstractmethod
    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """An op's result as a list of outputs, and how to put such a list back into its form."""

    def results(self, call: Call, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """The same for the result of this call, where its form is not all that counts."""
        return self.flatten(outputs)

    @abstractmethod
    def gradients(self, inputs: Sequence[Any]) -> Hashable:
        """Which of the inputs need a gradient; None where autodiff records nothing."""

    def variable_of(self, value: Any) -> Any:
        """What holds an input's value from one execution to the next; None where nothing does."""
        return None

    def scope_name(self, subjects: Sequence[Any]) -> str:
        """Path of the innermost enclosing call's object within the outermost's."""
        return ""

    def obstacle(self, site: interceptor.Site) -> tuple[str, str] | None:
        """What keeps a call from being instrumented at this moment, and why; None if nothing does."""
        return None

    @abstractmethod
    def tracing(self) -> AbstractContextManager[Any]:
        """Context around the op that finds the backward ops which it makes; made before its routines run."""

    def begin(self, made: Any, inputs: Sequence[Any]) -> None:
        """Hear what the op, or what replaces it, is given in the context `made` that is entered next.

        What routines returned is among it: backward ops that these values come from are not of the op.
        """

    @abstractmethod
    def attach_trace(self, trace: Trace, made: Any, values: list[Any]) -> None:
        """Leave the trace with the backward ops that the context `made` has found.

        values: the op's outputs, and those of its inputs that it wrote.
        """

    def made_between(self, begin: int, start: int, end: int) -> Any:
        """What `tracing` would have found, by the readings of the clock that the driver's `reader` has."""
        raise NotImplementedError

    def leaving(self, trace: Trace, writes: bool) -> Any:
        """What makes a `Program` leave this trace with the backward ops of each execution.

        writes: whether the op writes into a tensor that it is given.
        """
        raise NotImplementedError

    # ---- execution ----

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
        if memo is not None and len(memo.plans) == 1 and not (layer.guards or kwargs):
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
        if key and not layer.by_callables:
            self._learn(memo, key, combined, call)
        return self._execute(combined, call, state, op_id)

    def _learn(self, memo: interceptor.Memo, key: int, combined: Combined, call: Call) -> None:
        """Let native code do what calls like this one come to, if it can."""
        gradients = self.gradients(call.inputs)
        traced = bool(combined.watching) and combined.traced(gradients)
        if not (combined.forward or traced):
            memo.learn(key, None)
        else:
            facts = combined.plans[0][1].context._facts
            trace = self._tracer(memo, combined, call, gradients, facts) if traced else None
            if traced and trace is None:
                return
            refuse = None
            if call.targets and gradients is not None and _given_to_routines(combined.after):
                if call.targets != (0,) or not self.is_tensor(call.inputs[0]):
                    return
                refuse = self.saves_out_of_reach
            program = program_of(combined, call, facts, trace, refuse)
            if program is not None:
                memo.learn(key, program)

    def _tracer(
        self, memo: interceptor.Memo, combined: Combined, call: Call, gradients: Hashable, facts: OpFacts
    ) -> Callable[[int, int, int, Any, list[Any]], None] | None:
        """Leaves the traces of executions; None where it takes more."""
        written = call.targets and (call.targets != (0,) or isinstance(call.inputs[0], (list, tuple)))
        if written or any(action.differentiable for action in combined.actions):
            return None
        if combined.is_settled(gradients) and not combined.takes_run:
            trace = Trace(facts.op_id, gradients, combined, {})
            trace.facts = facts.at_backward(None, 0, True)
            trace.facts.drop_values()
            leaving: Callable[..., None] = self.leaving(trace, bool(call.targets))
            return leaving

        mutable = tuple(call.mutable)

        def leave_trace(begin: int, start: int, end: int, outputs: Any, inputs: list[Any]) -> None:
            trace = Trace(facts.op_id, gradients, combined, {})
            values = self.flatten(outputs)[0]
            trace.facts = self._kept_facts(facts, inputs, values, trace)
            if combined.is_settled(gradients):
                memo.forget()  # less is left to do
            made = self.made_between(begin, start, end)
            self.attach_trace(trace, made, [*values, *(inputs[i] for i in mutable)])

        return leave_trace

    def _first(self, call: Call, state: State, op_id: int, key: Hashable) -> Any:
        layer = state.layer
        assert layer is not None
        subjects = interceptor.subjects()
        facts = OpFacts(
            call.op, op_id, self.namespace, call.names, call.inputs, attributes=call.attributes(),
            scope=self.scope_name(subjects), source=user_source(), op_type=call.op_type(),
            parameters=call.parameters(), variable_of=self.variable_of, compute=call.computation(),
        )  # fmt: skip
        fresh: list[tuple[Layer, Hashable, Plan]] = []
        pairs: list[tuple[Layer, Plan]] = []
        inherited: OpContext | None = None
        for one in layer.chain:
            own = key if one is layer else one.key(self, call.inputs)
            plan = one.plans.get(op_id, {}).get(own) if state.cache else None
            if plan is None:
                context = OpContext(facts, one.analyse, inherited)
                plan = Plan(context)
                plan.add(context.trigger_callback(InstrumentationPoint.BEFORE_FORWARD_OP))
                fresh.append((one, own, plan))
            inherited = plan.context
            pairs.append((one, plan))
        result = self._execute(Combined(pairs), call, state, op_id, facts, [plan for *_, plan in fresh])
        if state.cache:
            for one, own, plan in fresh:
                one.plans.setdefault(op_id, {})[own] = plan
            self._keep(layer, op_id, key, Combined(pairs))
            bind_to_subjects(op_id, [*subjects[:1], *self.identities(call)])
        facts.drop_values()
        return result

    def _execute(
        self,
        combined: Combined,
        call: Call,
        state: State,
        op_id: int,
        facts: OpFacts | None = None,
        fresh: Sequence[Plan] = (),
        called: tuple[int, Any] = (-1, None),
    ) -> Any:
        run: dict[str, Any] = {}
        told = facts or combined.plans[0][1].context._facts
        inputs = call.inputs
        tracing = self.tracing() if combined.watching else None
        step, returned = called
        for i, action in enumerate(combined.before):
            if i >= step:
                result = returned if i == step else NOT_CALLED
                inputs = run_routine(self, action, inputs, told, run, state, call.mutable, result)
        gradients = self.gradients(inputs) if combined.watching else None
        trace = Trace(op_id, gradients, combined, run) if combined.traced(gradients) else None
        saved = None
        if call.targets and self._acts_later(combined, state, fresh):
            saved = self.written_later([inputs[i] for i in call.targets])
        if trace is None or tracing is None:
            outputs = self._compute(combined, call, inputs, told, run, saved)
        else:
            self.begin(tracing, inputs)
            with tracing as made:
                outputs = self._compute(combined, call, inputs, told, run, saved)
        values, rebuild = self.results(call, outputs)
        if facts is not None:
            facts.inputs, facts.outputs = list(inputs), list(values)
            for plan in fresh:
                plan.add(plan.context.trigger_callback(InstrumentationPoint.AFTER_FORWARD_OP))
            combined = Combined(combined.plans)
        if trace is not None:
            trace.facts = self._kept_facts(told, inputs, values, trace)
            self.attach_trace(trace, made, [*values, *(call.inputs[i] for i in call.mutable)])
        written = call.written(inputs, values)
        if written and saved is None and _given_to_routines(combined.after):
            saved = self.saved_of(written)
        changed = self._run_after(combined.after, values, written, told, run, state, saved=saved)
        return outputs if changed is values else rebuild(changed)

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
            return saved.seeing(call.invoke, inputs)
        return call.invoke(inputs)

    @staticmethod
    def _acts_later(combined: Combined, state: State, fresh: Sequence[Plan]) -> bool:
        """Whether routines after the op are given values, or analyses may bring such routines."""
        point = InstrumentationPoint.AFTER_FORWARD_OP
        chain = state.layer.chain if fresh and state.layer else ()
        return _given_to_routines(combined.after) or any(layer.routines[point] for layer in chain)

    def _kept_facts(self, told: OpFacts, inputs: list[Any], outputs: list[Any], trace: Trace) -> OpFacts:
        facts = told.at_backward(None, 0, True)
        if trace.combined.is_settled(trace.gradients):
            facts.drop_values()
        else:
            facts.inputs = [self.kept(value) for value in inputs]
            facts.outputs = [self.kept(value) for value in outputs]
            facts.dropped = False
        return facts

    def identities(self, call: Call) -> list[Any]:
        """What the call was given that tells ops apart; its plan dies with any of them."""
        return [value for value in spread(call.inputs) if isinstance(value, self.identity_types)]

    def _keep(self, layer: Layer, op_id: int, key: Hashable, combined: Combined) -> None:
        known = layer.table.get(op_id)
        if isinstance(known, interceptor.Memo):
            known.plans[key] = combined
            known.forget()
        elif combined.forward or combined.watching or layer.guards:
            layer.table.set(op_id, interceptor.Memo({key: combined}, layer.by_extents))
        else:
            layer.table.set(op_id, None)

    # ---- backward ----

    def finish(self, trace: Trace) -> None:
        """Hear that every backward op of an execution has been analysed."""
        if not trace.combined.is_settled(trace.gradients):
            for _, plan in trace.plans:
                plan.settled.add(trace.gradients)
        if trace.facts is not None:
            trace.facts.drop_values()


def _given_to_routines(after: Sequence[Action]) -> bool:
    """Whether routines after an op get values of it, which they may change."""
    return any(action.select != () for action in after)

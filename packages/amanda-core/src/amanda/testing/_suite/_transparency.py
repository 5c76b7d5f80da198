"""Meanings 11 and 12: a scope leaves no trace and no memory; a tool's mistake reaches the user as itself."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import sys
import types
import weakref
from typing import Any

import pytest

import amanda
from amanda import interceptor
from amanda.context import OpContext
from amanda.errors import AmandaError
from amanda.plugins.self_test import self_test
from amanda.scope.attachment import attachment
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._suite._samples import BATCH
from amanda.testing._tools import (
    POINTS,
    Referent,
    add_routine,
    free_garbage,
    inserter,
    no_op_tool,
    notes,
    op_name,
    tool,
    trained_bits,
)


class FailureTests(
    Rung, title="failure", implement=("uninstrumented_reason", "detach", "describe", "OpFacts.scope")
):
    """Exceptions reach the user as themselves, and reports name what is not seen."""

    def test_an_exception_of_the_op_itself_passes_as_it_is(self, sample: Sample) -> None:
        bad = sample.tensor([[1.0, 2.0, 3.0, 4.0]]), sample.parameter([[1.0]])
        with pytest.raises(Exception) as plain:  # noqa: PT011
            sample.bits(sample.linear(*bad))
        with amanda.apply(no_op_tool()), pytest.raises(type(plain.value)) as instrumented:
            sample.bits(sample.linear(*bad))
        assert str(instrumented.value) == str(plain.value)
        assert notes(instrumented.value) == notes(plain.value)

    def test_an_exception_of_an_analysis_reaches_the_user_as_itself(self, sample: Sample, point: int) -> None:
        is_backward = "backward" in POINTS[point]
        ids: list[int] = []

        def analysis(context: Any) -> None:
            ids.append(context.get_backward_op_id() if is_backward else context.get_op_id())
            _raise_mistake()

        op = sample.relu_backward if is_backward else sample.op_name("relu")
        failing = add_routine(Faulty(), analysis, op, **POINTS[point])
        position = "after" if "require_outputs" in POINTS[point] else "before"
        point_name = f"{position}_{'backward' if is_backward else 'forward'}_op"
        self._check_error(sample, failing, op, point_name, ids)

    def test_an_exception_of_a_routine_reaches_the_user_as_itself(
        self, sample: Sample, insertion: str
    ) -> None:
        is_backward = "backward" in insertion
        ids: list[int] = []

        def analysis(context: Any) -> None:
            ids.append(context.get_backward_op_id() if is_backward else context.get_op_id())
            getattr(context, insertion)(_raise_mistake)

        op = sample.relu_backward if is_backward else sample.op_name("relu")
        failing = add_routine(Faulty(), analysis, op, backward=is_backward)
        self._check_error(sample, failing, op, insertion, ids)

    @staticmethod
    def _check_error(sample: Sample, failing: amanda.Tool, op: str, point: str, ids: list[int]) -> None:
        """Check that a tool's error at relu, in module "part" of a model, reaches the user as itself.

        Its one note names tool, point, op, op id, module and line.  ids: those of the analysed ops.
        """
        inner = sample.module(lambda x: sample.relu(x))
        outer = sample.module(lambda x: inner(x))
        outer.part = inner
        x = sample.tensor([1.0], requires_grad=True)
        with amanda.apply(failing), pytest.raises(Mistake) as caught:
            sample.backward(outer(x))
        assert caught.value.code == 7
        assert str(caught.value) == "not enough bits"
        # One note, though the error passed two modules and a backward pass.
        (note,) = notes(caught.value)
        assert "Faulty" in note
        assert point in note
        assert op in note
        assert f"{ids[0]:#018x}" in note
        assert "module part" in note
        assert re.search(rf"{re.escape(__file__)}:\d+", note)

    def test_a_scope_goes_on_after_an_exception_was_caught_in_it(self, sample: Sample) -> None:
        fails = [True, False]
        recorded: list[Any] = []

        def routine(value: Any) -> None:
            recorded.append(value)
            if fails.pop(0):
                raise ZeroDivisionError

        x = sample.tensor([1.0])
        with amanda.apply(inserter("insert_before_op", sample.op_name("relu"), routine)):
            with pytest.raises(ZeroDivisionError):
                sample.relu(x)
            sample.relu(x)
        assert len(recorded) == 2

    def test_an_exception_in_an_analysis_leaves_the_framework_as_it_was(
        self, sample: Sample, point: int
    ) -> None:
        plain = trained_bits(sample)
        before = _framework_attributes(sample)
        with pytest.raises(ZeroDivisionError), amanda.apply(tool(_divide_by_zero, **POINTS[point])):
            trained_bits(sample)
        assert _changed_attributes(sample, before) == []
        assert trained_bits(sample) == plain
        with amanda.apply(no_op_tool()):
            assert trained_bits(sample) == plain

    def test_an_exception_in_a_routine_leaves_the_framework_as_it_was(
        self, sample: Sample, insertion: Any
    ) -> None:
        plain = trained_bits(sample)
        name = sample.relu_backward if "backward" in insertion else sample.op_name("relu")
        before = _framework_attributes(sample)
        failing = inserter(insertion, name, _divide_by_zero)
        with pytest.raises(ZeroDivisionError), amanda.apply(failing):
            trained_bits(sample)
        assert _changed_attributes(sample, before) == []
        assert interceptor.active() is None
        assert trained_bits(sample) == plain
        with amanda.apply(no_op_tool()):
            assert trained_bits(sample) == plain

    def test_what_cannot_be_instrumented_is_reported_and_logged_once(
        self, sample: Sample, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "amanda"), amanda.apply(tool(op_name)) as scope:
            for _ in range(3):
                sample.run_uninstrumentable_op()
        assert len(scope.report) == 1
        assert scope.report[0].reason
        assert scope.report[0].what in str(scope.report)
        assert [record.name for record in caplog.records] == ["amanda"]
        assert scope.report[0].reason in caplog.text

    def test_the_report_is_empty_where_everything_was_instrumented(self, sample: Sample) -> None:
        with amanda.apply(tool(op_name)) as scope:
            sample.backward(sample.model()(sample.input()))
        assert scope.report == []
        assert str(scope.report) == "everything that ran was instrumented"


class TransparencyTests(
    Rung, title="transparency", implement=("attach", "detach", "self_test_program", "have_equal_bits")
):
    """A scope changes no bit and leaves nothing behind."""

    def test_a_tool_that_only_looks_leaves_every_bit(self, sample: Sample) -> None:
        plain = trained_bits(sample)
        looking = amanda.Tool()
        for point in POINTS:
            looking.add_inst_for_op(lambda context: None, **point)
        with amanda.apply(looking):
            assert trained_bits(sample) == plain

    @pytest.mark.parametrize("cached", [True, False])
    def test_a_tool_that_changes_nothing_leaves_every_bit(self, sample: Sample, cached: bool) -> None:
        plain = trained_bits(sample)
        with amanda.apply(no_op_tool()):
            if cached:
                assert trained_bits(sample) == plain
            else:
                with amanda.cache_disabled():
                    assert trained_bits(sample) == plain
        assert trained_bits(sample) == plain

    def test_every_op_gives_what_it_gave(self, sample: Sample) -> None:
        def results() -> list[bytes]:
            """Return the bits of the outputs of each kind of op that the sample has."""
            x, y = sample.tensor([[1.0, -2.0], [3.0, 4.0]]), sample.tensor([[0.5, 2.0], [1.0, -1.0]])
            results = [sample.add(x, y), sample.cat([x, y]), *sample.pair(x), sample.many(x, y)]
            if "out" not in self.lacks:
                results.append(sample.add(x, y, out=sample.tensor([[0.0, 0.0], [0.0, 0.0]])))
            if "in_place" not in self.lacks:
                results.append(sample.add_(y, x))
            return [sample.bits(value) for value in results]

        plain = results()
        with amanda.apply(no_op_tool()):
            assert results() == plain

    @needs("auxiliary_state")
    def test_state_that_an_op_updates_is_updated_as_without_tools(self, sample: Sample) -> None:
        def normalized() -> list[bytes]:
            """Return the bits of two normalized batches, of the running statistics, and of a gradient."""
            x, statistics = sample.tensor(BATCH, requires_grad=True), sample.running_statistics()
            results = [sample.batch_norm(x, *statistics) for _ in range(2)]
            sample.backward(results[1])
            tensors = [*results, *statistics]
            if "backward" not in self.lacks:
                tensors.append(sample.gradient(x))
            return [sample.bits(tensor) for tensor in tensors]

        statistics_type = type(sample.running_statistics()[0])

        def copy_statistics(*values: Any) -> list[Any]:
            """Return equal new tensors for the statistics, and the other values as they are."""
            return [value * 1.0 if type(value) is statistics_type else value for value in values]

        plain_bits, op = normalized(), sample.op_name("batch_norm")
        for changing_nothing in (no_op_tool(), inserter("insert_before_op", op, copy_statistics)):
            with amanda.apply(changing_nothing):
                assert normalized() == plain_bits, (
                    "results, statistics and gradient differ: `Call.written_positions` has the positions of "
                    "the inputs that an op updates"
                )

    def test_nothing_is_left_on_tensors_and_modules(self, sample: Sample) -> None:
        model, x = sample.model(), sample.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
        sample.backward(model(x))
        objects = [model, model.first, model.first.weight, x]
        plain = [_visible_parts(value) for value in [*objects, model(x)]]
        with amanda.apply(no_op_tool()):
            result = model(x)
            sample.backward(result)
            assert [_visible_parts(value) for value in [*objects, result]] == plain
        assert [_visible_parts(value) for value in [*objects, result]] == plain

    @needs("pickles")
    def test_models_are_copied_and_pickled_in_a_scope(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        with amanda.apply(no_op_tool()):
            plain = sample.bits(model(x))
            # Models hold functions of the framework, which a scope has replaced by stand-ins.
            for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert sample.bits(twin(x)) == plain

    def test_a_scope_leaves_the_framework_as_it_was(self, sample: Sample) -> None:
        trained_bits(sample)
        with amanda.apply(no_op_tool()):
            trained_bits(sample)
        before = _framework_attributes(sample)
        with amanda.apply(no_op_tool()):
            trained_bits(sample)
        assert _changed_attributes(sample, before) == []

    def test_the_self_test_of_the_driver_passes(self, sample: Sample) -> None:
        with amanda.apply(amanda.Tool()):
            (driver,) = (driver for driver in attachment.attached if type(driver) is sample.driver)
            verdict = self_test(driver)
        assert verdict.failure == "", "Driver.self_test_program does not do what it says, or ops are not seen"


class MemoryTests(Rung, title="memory", implement=("detach_value", "describe", "attach_trace")):
    """Plans, contexts and values live no longer than they are needed."""

    @needs("backward", "weak_references")
    def test_forward_values_are_dropped_after_the_first_execution(self, sample: Sample) -> None:
        contexts: list[OpContext] = []
        x = sample.tensor([-1.0, 2.0], requires_grad=True)
        both = add_routine(tool(contexts.append, sample.op_name("relu")), contexts.append, backward=True)
        with amanda.apply(both):
            result = sample.relu(x)
            sample.backward(result)
            dead = weakref.ref(x), weakref.ref(result)
            del x, result
            free_garbage(sample)
            assert [reference() for reference in dead] == [None, None]
        assert len(contexts) > 1
        with pytest.raises(AmandaError, match="keep what you need of them in the context"):
            contexts[0].get_inputs()

    @needs("backward")
    def test_run_is_freed_with_the_graph_of_its_execution(self, sample: Sample) -> None:
        values: list[weakref.ref[Referent]] = []

        def forward(_: Any, run: dict[str, Any]) -> None:
            run["value"] = value = Referent()
            values.append(weakref.ref(value))

        recorder = tool(lambda context: context.insert_before_op(forward, [0]), sample.op_name("relu"))
        add_routine(
            recorder, lambda context: context.insert_before_backward_op(lambda *_: None), backward=True
        )
        with amanda.apply(recorder):
            for _ in range(2):
                result = sample.relu(sample.tensor([1.0], requires_grad=True))
                assert values[-1]() is not None
                sample.backward(result)
                del result
                free_garbage(sample)
        assert [reference() for reference in values] == [None, None]

    def test_a_plan_dies_with_its_tool(self, sample: Sample) -> None:
        references: list[weakref.ref[Referent]] = []
        model, x = sample.model(), sample.input()
        recorder = tool(lambda context: _store_referent(context, references), sample.op_name("linear"))
        with amanda.apply(recorder):
            model(x)
        del recorder
        free_garbage(sample)
        assert [reference() for reference in references] == [None, None]

    def test_a_plan_dies_with_its_model(self, sample: Sample) -> None:
        references: list[weakref.ref[Referent]] = []
        model, x = sample.model(), sample.input()
        recorder = tool(lambda context: _store_referent(context, references))
        add_routine(
            recorder, lambda context: context.insert_before_backward_op(lambda *_: None), backward=True
        )
        with amanda.apply(recorder):
            sample.backward(model(x))
            model_references = references[:3]  # two layers and a relu; then come the ops of `backward`
            del model
            free_garbage(sample)
            assert [reference() for reference in model_references] == [None, None, None]

    def test_a_plan_dies_with_its_parameter(self, sample: Sample) -> None:
        references: list[weakref.ref[Referent]] = []
        weight, x = sample.parameter([[1.0]]), sample.tensor([[2.0]])
        with amanda.apply(
            tool(lambda context: _store_referent(context, references), sample.op_name("linear"))
        ):
            sample.linear(x, weight)
            del weight
            free_garbage(sample)
            assert [reference() for reference in references] == [None]

    def test_memory_does_not_grow_over_iterations(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()

        def objects() -> int:
            free_garbage(sample)
            return len(gc.get_objects())

        with amanda.apply(no_op_tool()):
            # The first passes analyse, cache programs and warm up the framework.
            for _ in range(5):
                sample.backward(model(x))
            before = objects()
            for _ in range(50):
                sample.backward(model(x))
            # Fifty passes that kept an object each would be twice over this.
            assert objects() - before < 25


# A driver must raise the very object: a new one of this class cannot be made from its text.
class Mistake(Exception):
    """The error of the suite's faulty tools; it cannot be made again from its message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Faulty(amanda.Tool):
    """Fails where it is told to."""


def _raise_mistake(*_: Any, **__: Any) -> Any:
    raise Mistake(7, reason="not enough bits")


def _divide_by_zero(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a tool's own mistake")


def _store_referent(context: OpContext, references: list[weakref.ref[Referent]]) -> None:
    """Store an object in the context, which lives as long as the plan; add a weak reference to the list."""
    value = context["kept"] = Referent()
    references.append(weakref.ref(value))
    context.insert_before_op(lambda *_: None)


def _visible_parts(value: Any) -> Any:
    """Return what Python shows of an object: type, names of attributes, lengths of dicts, as of hooks."""
    attributes = getattr(value, "__dict__", {})
    lengths = {name: len(content) for name, content in attributes.items() if isinstance(content, dict)}
    return type(value), sorted(attributes), sorted(dir(value)), lengths


def _framework_attributes(sample: Sample) -> dict[Any, dict[str, Any]]:
    """Return the attributes of a framework's modules, by their names, and of its classes, by themselves."""
    root = sample.driver.framework
    attributes: dict[Any, dict[str, Any]] = {}
    for module_name, module in list(sys.modules.items()):
        is_inside = module_name == root or module_name.startswith(f"{root}.")
        if is_inside and isinstance(module, types.ModuleType):
            attributes[module_name] = dict(vars(module))
            for value in list(vars(module).values()):
                # By `type`, since `isinstance` would ask the value, and a lazy one would load something.
                if issubclass(type(value), type) and _module_name(value).startswith(root):
                    attributes[value] = dict(vars(value))
    return attributes


def _module_name(kind: type) -> str:
    """Return the name of the module that a class is of; "" for those of native code that have none."""
    return str(getattr(kind, "__module__", ""))


def _changed_attributes(sample: Sample, before: dict[Any, dict[str, Any]]) -> list[tuple[Any, str]]:
    """Return holder and name of each attribute that is absent or another object than before.

    Counters and caches of the framework, which change while it runs, and `lasting_patches` are left out.
    """
    after = _framework_attributes(sample)
    counters_and_caches = (int, float, bool, str, tuple, type(None), dict, list)
    changed = []
    for holder, attributes in before.items():
        for name, value in attributes.items():
            is_present = holder in after and name in after[holder]
            is_same = is_present and (after[holder][name] is value or isinstance(value, counters_and_caches))
            if not is_same and name not in sample.lasting_patches:
                changed.append((holder, name))
    return changed

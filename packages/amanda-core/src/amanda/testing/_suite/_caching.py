"""Meaning 4: an op is analysed once for a set of tools, and again when what was decided by changes."""

from __future__ import annotations

from typing import Any

import amanda
from amanda.context import OpContext
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import add_routine, inserter, op_name, tool


class CachingTests(
    Rung, title="caching", implement=("signature", "shapes", "needs_grad", "mark_backward_analysed")
):
    """Ops are analysed once for a set of tools, and again when what was decided by changes."""

    @needs("backward")
    def test_an_op_is_analysed_once_for_a_set_of_tools(self, sample: Sample) -> None:
        forward: list[str] = []
        backward: list[str] = []
        recorder = tool(lambda context: forward.append(op_name(context)))
        add_routine(recorder, lambda context: backward.append(op_name(context)), backward=True)
        model, x = sample.model(), sample.input()
        with amanda.apply(recorder):
            sample.backward(model(x))
            first, first_backward = len(forward), len(backward)
            for _ in range(3):
                sample.backward(model(x))
        with amanda.apply(recorder):
            sample.backward(model(x))
        count, backward_count, declared = len(forward), len(backward), sample.model_backward_ops
        assert count >= 3, f"{count} ops were analysed; two layers and a relu are three"
        assert backward_count >= declared, (
            f"{backward_count} backward ops were analysed; "
            f"Sample.model_backward_ops declares at least {declared}"
        )
        # `Sample.backward` may sum the result: an op, with two backward ops, of another place in each scope.
        assert count <= first + 1, f"{count} analyses of ops in five steps, {first} in the first"
        assert backward_count <= first_backward + 2, (
            f"{backward_count} analyses of backward ops in five steps, {first_backward} in the first: "
            "`finish` of a trace records that its backward ops are analysed, and each has the same place in "
            "every step"
        )

    def test_routines_run_at_every_execution(self, sample: Sample) -> None:
        runs = []
        model, x = sample.model(), sample.input()
        with amanda.apply(inserter("insert_before_op", sample.op_name("linear"), lambda *_: runs.append(1))):
            for _ in range(3):
                model(x)
        # Two linear layers in three passes.
        assert len(runs) == 6

    def test_another_set_of_tools_has_plans_of_its_own(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        analysed: list[str] = []
        first = tool(lambda _: analysed.append("one"), sample.op_name("relu"))
        second = tool(lambda _: analysed.append("two"), sample.op_name("relu"))
        with amanda.apply(first):
            model(x)
        with amanda.apply(first, second):
            model(x)
        with amanda.apply(first):
            model(x)
        assert analysed == ["one", "one", "two"]

    def test_an_analysis_that_is_added_later_is_heard(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        analysed: list[str] = []
        recorder = tool(lambda _: analysed.append("one"), sample.op_name("relu"))
        with amanda.apply(recorder):
            model(x)
        # Another routine makes another set of analyses, so the first is asked again, too.
        add_routine(recorder, lambda _: analysed.append("two"), sample.op_name("relu"))
        with amanda.apply(recorder):
            model(x)
        assert analysed == ["one", "one", "two"]

    def test_a_routine_added_in_an_open_scope_takes_effect(self, sample: Sample) -> None:
        runs: list[str] = []
        model, x = sample.model(), sample.input()
        recorder = tool(
            lambda context: context.insert_before_op(lambda *_: runs.append("one")), sample.op_name("relu")
        )
        with amanda.apply(recorder) as scope:
            model(x)
            add_routine(
                recorder,
                lambda context: context.insert_before_op(lambda *_: runs.append("two")),
                sample.op_name("relu"),
            )
            model(x)
            # No op is admitted any more, so the third pass runs no routine.
            recorder.restrict(lambda _: False)
            model(x)
        assert runs == ["one", "one", "two"]
        assert not scope.report

    def test_a_tool_has_ops_analysed_again(self, sample: Sample) -> None:
        analysed: list[int] = []
        runs: list[int] = []

        def analysis(context: OpContext) -> None:
            analysed.append(context.get_op_id())
            if len(analysed) > 1:
                context.insert_before_op(lambda *_: runs.append(1))

        recorder = tool(analysis, sample.op_name("relu"))
        model, x = sample.model(), sample.input()
        with amanda.apply(recorder):
            for _ in range(2):
                model(x)
            recorder.analyse_again(analysed)
            for _ in range(2):
                model(x)
        assert len(analysed) == 2
        assert analysed[0] == analysed[1]
        assert len(runs) == 2

    def test_a_plan_with_actions_is_guarded_by_dtype_and_rank(self, sample: Sample) -> None:
        wide, narrow, *_ = sample.dtypes
        analysed: list[Any] = []

        def analysis(context: OpContext) -> None:
            analysed.append(sample.dtype(context.get_inputs()[0]))
            context.insert_before_op(lambda *_: None)

        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(tool(analysis, sample.op_name("relu"))):
            for _ in range(2):
                module(sample.tensor([1.0], wide))
                module(sample.tensor([1.0], narrow))
                module(sample.tensor([[1.0]], wide))
                module(sample.tensor([1.0, 2.0], wide))
        # Another dtype or rank is another plan; another size of the same rank is not.
        assert analysed == [wide, narrow, wide]

    def test_a_tool_that_decides_by_shape_is_asked_for_each(self, sample: Sample) -> None:
        shapes: list[Any] = []
        see = tool(
            lambda context: shapes.append(sample.shape(context.get_inputs()[0])),
            sample.op_name("relu"),
            guard="shape",
        )
        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(see):
            for _ in range(2):
                module(sample.tensor([1.0]))
                module(sample.tensor([1.0, 2.0]))
        assert shapes == [(1,), (2,)]

    @needs("values")
    def test_a_tool_that_decides_by_a_callable_is_asked_for_each_answer(self, sample: Sample) -> None:
        analysed: list[Any] = []

        def is_empty(inputs: Any) -> bool:
            return bool(sample.numbers(inputs[0])[0] == 0)

        see = tool(
            lambda context: analysed.append(is_empty(context.get_inputs())),
            sample.op_name("relu"),
            guard=lambda inputs: is_empty(inputs),
        )
        module = sample.module(lambda x: sample.relu(x))
        # Two answers of the guard for four values: one analysis for each answer.
        tensors = [sample.tensor([number]) for number in (0.0, 1.0, 2.0, 0.0)]
        with amanda.apply(see):
            for x in tensors:
                module(x)
        assert analysed == [True, False]

    @needs("backward")
    def test_with_the_cache_off_analysis_runs_at_every_execution(self, sample: Sample) -> None:
        analysed: list[str] = []
        recorder = tool(lambda _: analysed.append("forward"), sample.op_name("relu"))
        add_routine(recorder, lambda _: analysed.append("backward"), sample.relu_backward, backward=True)
        model, x = sample.model(), sample.input()
        with amanda.apply(recorder), amanda.cache_disabled():
            assert not amanda.is_cache_enabled()
            for _ in range(3):
                sample.backward(model(x))
        assert analysed == ["forward", "backward"] * 3

    def test_with_the_cache_off_plans_kept_before_are_not_used(self, sample: Sample) -> None:
        analysed: list[str] = []
        module, x = sample.module(lambda x: sample.relu(x)), sample.tensor([1.0])
        with amanda.apply(tool(lambda _: analysed.append("one"), sample.op_name("relu"))):
            module(x)
            with amanda.cache_disabled():
                module(x)
                module(x)
            module(x)
        assert len(analysed) == 3

    def test_the_cache_comes_back_on(self, sample: Sample) -> None:
        analysed: list[str] = []
        model, x = sample.model(), sample.input()
        with (
            amanda.apply(tool(lambda _: analysed.append("one"), sample.op_name("relu"))),
            amanda.cache_disabled(),
            amanda.cache_enabled(),
        ):
            for _ in range(3):
                model(x)
        assert analysed == ["one"]

    @needs("backward")
    def test_a_backward_op_first_seen_later_is_analysed_then(self, sample: Sample) -> None:
        analysed: list[str] = []
        recorder = tool(lambda _: analysed.append("backward"), sample.relu_backward, backward=True)
        module = sample.module(lambda x: sample.relu(x))
        with amanda.apply(recorder):
            module(sample.tensor([1.0]))
            module(sample.tensor([1.0], requires_grad=True))
            sample.backward(module(sample.tensor([1.0], requires_grad=True)))
        assert analysed == ["backward"]

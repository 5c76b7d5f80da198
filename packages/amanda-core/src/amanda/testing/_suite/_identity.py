"""Meaning 3: an op is a place in the program, and its id is the same wherever the place is."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import amanda
from amanda.interceptor import OCCURRENCE_CAP
from amanda.testing._ladder import Rung, needs
from amanda.testing._sample import Sample
from amanda.testing._tools import Executed, Seen, add_routine, inserter, tool

# Run with other hash seeds: an id that came from `hash` or an address would differ.
PROGRAM = """
import importlib.util, sys
import amanda
from amanda.testing import attached
from amanda.testing._tools import Seen
spec = importlib.util.spec_from_file_location("sample_of_a_driver", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
sample = getattr(module, sys.argv[2])()
seen = Seen()
with attached(sample.driver), sample.recording_autodiff(), amanda.apply(seen):
    model = sample.model()
    x = sample.input()
    for _ in range(2):
        sample.backward(model(x))
    sample.add(x, sample.relu(x))
print(seen.ops)
"""


class IdentityTests(
    Rung,
    title="identity",
    implement=(
        "identity_types", "identity_values", "register_framework", "skip_code", "slot_of", "recomputable",
    ),
):  # fmt: skip
    """Ops have ids, which stay the same."""

    def test_an_op_has_the_same_id_in_the_next_iteration(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        linear = Executed(sample.op_name("linear"))
        with amanda.apply(linear):
            for _ in range(3):
                sample.backward(model(x))
        assert linear.ids[:2] == linear.ids[2:4] == linear.ids[4:]
        # The two layers call one operator at one line of the framework: they differ in the module's path.
        assert linear.ids[0] != linear.ids[1]

    def test_an_op_has_the_same_id_in_the_next_scope(self, sample: Sample) -> None:
        model, x = sample.model(), sample.input()
        linear = Executed(sample.op_name("linear"))
        for _ in range(2):
            with amanda.apply(linear):
                model(x)
        assert linear.ids[:2] == linear.ids[2:]

    @needs("call_sites")
    def test_an_op_has_the_same_id_outside_modules_in_the_next_iteration(self, sample: Sample) -> None:
        recorder = Executed(sample.op_name("relu"))
        with amanda.apply(recorder):
            for _ in range(3):
                x = sample.tensor([1.0], requires_grad=True)
                sample.backward(sample.relu(sample.relu(x)))
        assert recorder.ids[:2] == recorder.ids[2:4] == recorder.ids[4:]
        assert recorder.ids[0] != recorder.ids[1]

    @needs("call_sites")
    def test_an_op_keeps_its_id_when_a_neighbour_is_skipped(self, sample: Sample) -> None:
        # By a mere count of calls the second relu, where it runs alone, would have the id of the first.
        skip = False

        def forward(x: Any) -> Any:
            if not skip:
                x = sample.relu(x)
            return sample.relu(x)

        recorder = Executed(sample.op_name("relu"))
        module, x = sample.module(forward), sample.input()
        with amanda.apply(recorder):
            module(x)
            skip = True
            module(x)
        first, second, alone = recorder.ids
        assert first != second
        assert alone == second

    @needs("call_sites")
    def test_two_calls_on_one_line_are_two_ops(self, sample: Sample) -> None:
        recorder = Seen()
        x = sample.input()
        with amanda.apply(recorder):
            # Lines are not enough: the instruction in the code tells the two calls apart.
            sample.add(sample.relu(x), sample.relu(x))
        assert len(set(recorder.ids(sample.op_name("relu")))) == 2

    def test_two_models_of_one_class_have_ops_of_their_own(self, sample: Sample) -> None:
        recorder = Seen()
        model_a, model_b, x = sample.model(), sample.model(), sample.input()
        with amanda.apply(recorder):
            # In turns, so that an id by the order of calls would be another one in the second round.
            for model in (model_a, model_b, model_a, model_b):
                model(x)
        assert len(set(recorder.ids(sample.op_name("linear")))) == 4
        assert len(recorder.ids(sample.op_name("linear"))) == 4
        assert len(set(recorder.ids(sample.op_name("relu")))) == 2

    def test_one_call_site_over_several_weights_is_several_ops(self, sample: Sample) -> None:
        weights = [sample.parameter([[float(i)]]) for i in range(1, 4)]
        x = sample.tensor([[1.0]])
        recorder = Executed(sample.op_name("linear"))

        def forward(x: Any, order: Any) -> None:
            for weight in order:
                sample.linear(x, weight)

        module = sample.module(forward)
        with amanda.apply(recorder):
            module(x, weights)
            # In reverse order, so that a count of calls alone would give each weight another op.
            module(x, weights[::-1])
        assert len(set(recorder.ids)) == 3
        assert recorder.ids[:3] == recorder.ids[3:][::-1]

    @needs("call_sites")
    def test_repeats_of_a_place_are_told_apart_up_to_a_cap(self, sample: Sample) -> None:
        def forward(x: Any) -> Any:
            # Beyond the cap: a loop of any length has a bounded number of ops.
            for _ in range(OCCURRENCE_CAP + 20):
                x = sample.relu(x)
            return x

        recorder = Executed(sample.op_name("relu"))
        module, x = sample.module(forward), sample.input()
        with amanda.apply(recorder):
            module(x)
            module(x)
        half = len(recorder.ids) // 2
        assert recorder.ids[:half] == recorder.ids[half:]
        assert len(set(recorder.ids)) == OCCURRENCE_CAP
        assert len(set(recorder.ids[:OCCURRENCE_CAP])) == OCCURRENCE_CAP
        assert len(set(recorder.ids[OCCURRENCE_CAP - 1 : half])) == 1

    @needs("call_sites")
    def test_a_line_in_a_loop_outside_modules_is_one_op(self, sample: Sample) -> None:
        recorder = Executed(sample.op_name("relu"))
        x = sample.input()
        with amanda.apply(recorder):
            for _ in range(3):
                x = sample.relu(x)
        assert len(recorder.ids) == 3
        assert len(set(recorder.ids)) == 1

    @needs("call_sites")
    def test_a_function_outside_modules_has_ops_for_each_line_that_calls_it(self, sample: Sample) -> None:
        def activated(x: Any) -> Any:
            return sample.relu(x)

        recorder = Executed(sample.op_name("relu"))
        x = sample.input()
        with amanda.apply(recorder):
            for _ in range(3):
                x = activated(x)
                # Two calls of the function in one line are two ways to its op.
                x = sample.add(activated(x), activated(x))
        assert len(set(recorder.ids[:3])) == 3
        assert recorder.ids[:3] == recorder.ids[3:6] == recorder.ids[6:]

    @needs("call_sites")
    def test_a_recursion_outside_modules_is_bounded(self, sample: Sample) -> None:
        def deep(x: Any, depth: int) -> Any:
            return deep(sample.relu(x), depth - 1) if depth else x

        recorder = Seen()
        with amanda.apply(recorder):
            # Each depth is another way to the line, so that without a bound each would be an op.
            deep(sample.input(), 2 * OCCURRENCE_CAP)
        assert 1 < len(recorder.ids(sample.op_name("relu"))) <= OCCURRENCE_CAP

    def test_two_paths_to_one_line_are_two_ops(self, sample: Sample) -> None:
        def shared(x: Any) -> Any:
            return sample.relu(x)

        def forward(x: Any) -> Any:
            x = shared(x)
            return shared(x)

        recorder = Executed(sample.op_name("relu"))
        module, x = sample.module(forward), sample.input()
        with amanda.apply(recorder):
            module(x)
            module(x)
        assert recorder.ids[0] != recorder.ids[1]
        assert recorder.ids[:2] == recorder.ids[2:]

    def test_a_module_called_twice_has_ops_for_each_call(self, sample: Sample) -> None:
        model = sample.model()
        twice = sample.module(lambda x: model.first(model.first(x)))
        recorder = Executed(sample.op_name("linear"))
        x = sample.input()
        with amanda.apply(recorder):
            twice(x)
            twice(x)
        assert recorder.ids[0] != recorder.ids[1]
        assert recorder.ids[:2] == recorder.ids[2:]

    @needs("checkpoints")
    def test_ops_computed_again_by_a_checkpoint_have_the_ids_of_the_first_run(self, sample: Sample) -> None:
        model = sample.model()

        def forward(x: Any) -> Any:
            # The second run happens in the backward pass, outside of the module's call.
            return sample.checkpoint(lambda value: model.second(sample.relu(model.first(value))), x)

        module = sample.module(forward)
        linear, relu = Executed(sample.op_name("linear")), Executed(sample.op_name("relu"))
        with amanda.apply(linear, relu):
            for _ in range(2):
                sample.backward(module(sample.tensor([[1.0, 2.0, 3.0]], requires_grad=True)))
        assert len(linear.ids) == 8  # two layers, each twice in each of two passes
        assert linear.ids[:2] == linear.ids[2:4] == linear.ids[4:6] == linear.ids[6:]
        assert len(relu.ids) == 4
        assert len(set(relu.ids)) == 1

    @needs("call_sites", "checkpoints")
    def test_a_checkpoint_outside_modules_computes_the_same_ops_again(self, sample: Sample) -> None:
        relu = Executed(sample.op_name("relu"))
        with amanda.apply(relu):
            x = sample.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
            sample.backward(sample.checkpoint(lambda value: sample.relu(sample.relu(value)), x))
        assert len(relu.ids) == 4
        assert relu.ids[:2] == relu.ids[2:]
        assert relu.ids[0] != relu.ids[1]

    @needs("call_sites", "checkpoints")
    def test_checkpoints_in_a_loop_outside_modules_compute_the_same_ops_again(self, sample: Sample) -> None:
        def activated(value: Any) -> Any:
            return sample.relu(value)

        relu = Executed(sample.op_name("relu"))
        with amanda.apply(relu):
            x = activated(sample.tensor([[1.0, 2.0, 3.0]], requires_grad=True))
            for _ in range(2):
                x = sample.checkpoint(lambda value: activated(activated(value)), x)
            sample.backward(x)
        # One op before the checkpoints, and two in each of them, which are one place in the program.
        before, first, second = relu.ids[:3]
        assert len({before, first, second}) == 3
        # The second checkpoint, and both again in the backward pass, unless the framework keeps their values.
        assert relu.ids[3:] in ([first, second], [first, second] * 3)

    @needs("backward", "checkpoints")
    def test_a_checkpoint_computes_the_same_executions_again(self, sample: Sample) -> None:
        calls: list[tuple[int, bool]] = []
        observed: list[bool] = []

        def scale(value: Any, run: dict[str, Any], recomputed: bool) -> Any:
            """Multiply by the execution's number, from 1; record its index, and True in a recomputation."""
            # The dict of the first run comes back, so the number is that of the first run, too.
            number = run.setdefault("number", sum(not is_again for _, is_again in calls))
            calls.append((number, recomputed))
            return value * (number + 1)

        relu = inserter("insert_before_op", sample.op_name("relu"), scale, [0])
        add_routine(
            relu,
            lambda context: context.insert_before_op(amanda.observer(lambda: observed.append(True)), []),
            sample.op_name("relu"),
        )
        module = sample.module(lambda x: sample.checkpoint(sample.relu, x))
        with amanda.apply(relu):
            results = [module(sample.tensor([2.0], requires_grad=True)) for _ in range(3)]
            for result in results:
                sample.backward(result)
        assert sorted(calls) == [(number, is_again) for number in range(3) for is_again in (False, True)]
        assert len(observed) == 3  # an observer is not called again

    @needs("backward")
    def test_backward_ops_have_ids_that_stay(self, sample: Sample) -> None:
        ids: list[int | None] = []
        model, x = sample.model(), sample.input()
        recorder = tool(lambda context: ids.append(context.get_backward_op_id()), backward=True)
        with amanda.apply(recorder), amanda.cache_disabled():
            for _ in range(2):
                sample.backward(model(x))
        count, declared = len(ids) // 2, sample.model_backward_ops  # of one pass
        assert count >= declared, (
            f"{count} backward ops; Sample.model_backward_ops declares at least {declared}"
        )
        assert sorted(map(str, ids[:count])) == sorted(map(str, ids[count:]))
        assert len(set(ids)) == count

    def test_ids_are_64_bits_and_not_zero(self, sample: Sample) -> None:
        recorder = Seen()
        backward_ids: list[int] = []
        add_routine(
            recorder, lambda context: backward_ids.append(context.get_backward_op_id() or 0), backward=True
        )
        with amanda.apply(recorder):
            sample.backward(sample.model()(sample.input()))
        ids = [op_id for _, op_id in recorder.ops] + backward_ids
        assert all(0 < op_id < 1 << 64 for op_id in ids)
        # Spread over all 64 bits, so that two places hardly ever have one id.
        assert max(ids) > 1 << 48

    def test_ids_are_the_same_in_another_process(self, sample: Sample) -> None:
        outputs = set()
        for seed in ("1", "2"):
            program = [sys.executable, "-c", PROGRAM, inspect.getfile(type(sample)), type(sample).__name__]
            path = os.pathsep.join(filter(None, sys.path))  # with what pytest has put on it
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
            done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            outputs.add(done.stdout)
        assert len(outputs) == 1
        assert sample.op_name("linear") in outputs.pop()

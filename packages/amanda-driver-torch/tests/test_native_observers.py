"""Observers that native code serves see what they would see by calls of Python."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amanda
from amanda import interceptor
from amanda.action import FiniteObserver, GatedObserver, MomentsObserver, StorageObserver
from amanda.tools.nan import NanTool
from amanda.tools.nan import _tool as nan_tool
from amanda.tools.profile import ProfileTool
from amanda.tools.profile import _tool as profile_tool
from amanda.tools.stats import StatsTool
from amanda.tools.steps import Steps

native_alone = pytest.mark.skipif(not interceptor.NATIVE, reason="native code observes")
NAN = float("nan")


class CalledObserver:
    """`FiniteObserver` that Python calls at each execution."""

    __amanda_marks__ = frozenset({"observer", "all_samples"})
    copy = None

    def __init__(self, routine: Callable[..., None], before: Any = None, tally: Any = None) -> None:
        self.routine, self.before = routine, before
        self.skips = self.copies = False

    def __call__(self, *values: Any, batches: Sequence[int] = ()) -> None:
        self.routine(self, values, batches)


def training(poison: Callable[[int, torch.nn.Module], None] = lambda step, model: None) -> Callable[[], None]:
    """Return a program that trains a model with AdamW for some steps, after `poison(step, model)`."""

    def program() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(5):
            poison(step, model)
            model(torch.randn(4 + step % 2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return program


def poison_weight(step: int, model: Any) -> None:
    if step == 3:
        with torch.no_grad():
            model[3].weight[0, 0] = NAN


def poison_gradient(step: int, model: Any) -> None:
    if step == 2:
        model[0].weight.register_hook(lambda gradient: gradient * NAN)


def in_place() -> None:
    x = torch.ones(4)
    for step in range(5):
        y = x.clone()
        y.mul_(2)
        if step == 3:
            y[1] = -1
        y.sqrt_()  # NaN in the fourth round
        y.nan_to_num_(0)
        y.add_(NAN if step == 4 else 1)


def views() -> None:
    torch.manual_seed(0)
    base = torch.full((4, 6), NAN)
    for step in range(4):
        base[:, ::2] = 1
        base[:, ::2].log()  # what lies between the elements is NaN
        base.t()[0].sub(2).sqrt() if step == 2 else base.t()[0].sqrt()
        torch.ones(2, 3).expand(4, 2, 3).mul(3)
        torch.randn(3, 4, 5).sin().permute(1, 2, 0).exp()  # in one piece of memory, in another order


def types() -> None:
    for step in range(4):
        for dtype in (
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.int64,
        ):
            x = torch.arange(1, 5).to(dtype)
            y = x + x
            if dtype.is_floating_point:
                (y - 100).log() if step == 2 else y.log()
                torch.full((3,), float("inf")).to(dtype) - (float("inf") if step == 3 else 1)


def large() -> None:
    x = torch.ones(1200, 1200)  # more than native code reads
    for step in range(3):
        y = x * 2
        y[7, 7] = -1 if step == 2 else 1
        y.log_()


class Subtract(torch.nn.Module):
    """A module, so that its op is the same wherever it is called."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sub_(y)


def raises_on_a_thread() -> None:
    subtract = Subtract()

    def fail() -> None:
        with contextlib.suppress(RuntimeError):
            subtract(torch.full((3,), NAN), torch.ones(2))

    for step in range(8):
        if step == 3:
            thread = threading.Thread(target=contextvars.copy_context().run, args=(fail,))
            thread.start()
            thread.join()
        infinite = torch.full((3,), float("inf")) if step > 3 else torch.ones(3)
        subtract(infinite, infinite.clone())


class WritesGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sqrt_()


def raises_before_a_mode() -> None:
    subtract = Subtract()
    for step in range(6):
        if step == 4:
            with contextlib.suppress(RuntimeError):
                subtract(torch.ones(3), torch.ones(2))
        with FlopCounterMode(display=False) if step == 4 else contextlib.nullcontext():
            subtract(torch.full((3,), NAN if step == 4 else 1.0), torch.ones(3))


def writes_a_gradient() -> None:
    for step in range(5):
        x = torch.ones(3, requires_grad=True)
        y: Any = WritesGradient.apply(x)
        y.backward(torch.full((3,), -1.0 if step == 4 else 4.0))


def many_values() -> None:
    x = torch.ones(40, 2)
    for step in range(4):
        if step == 3:
            x[5] = NAN
        x.unbind(0)
        x.split(1)
        leaves = [torch.ones(2, requires_grad=True) for _ in range(40)]
        torch.stack(leaves).backward(torch.full((40, 2), NAN if step == 3 else 1.0))
        rows = torch.ones(40, 2, requires_grad=True)
        torch.autograd.backward(
            rows.unbind(0), [torch.full((2,), NAN if i == 39 and step == 3 else 1.0) for i in range(40)]
        )


class PassingMode(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


def under_a_mode() -> None:
    for step in range(4):
        x = torch.ones(3, requires_grad=True)
        y = x.exp().sin().mul(2)
        with FlopCounterMode(display=False) if step == 3 else contextlib.nullcontext():
            y.backward(torch.full((3,), NAN if step == 3 else 1.0))


def in_a_mode_from_a_hook_on() -> None:
    for step in range(4):
        y = torch.ones(3, requires_grad=True).exp().sin().mul(2)
        if step == 3:  # the engine leaves the mode at the end of the pass
            y.register_hook(lambda _: PassingMode().__enter__() and None)  # type: ignore[no-untyped-call]
        y.backward(torch.full((3,), NAN if step == 3 else 1.0))


def two_passes_through_one_graph() -> None:
    for step in range(4):
        y = torch.ones(3, requires_grad=True).exp().sin()
        y.backward(torch.ones(3), retain_graph=True)
        y.backward(torch.full((3,), NAN if step == 3 else 1.0))


def aliases() -> None:
    for step in range(5):
        x = torch.zeros(3) if step == 4 else torch.ones(3)
        x.div_(x if step == 4 else torch.ones(3))


def shrunk() -> None:
    for capacity in (256, 256, 256, 16, 255, 0, 256):
        x = torch.ones(64)
        x.untyped_storage().resize_(capacity)
        x.view(8, 8)  # torch would read beyond the memory in an op that computes
        x.view(64)


PROGRAMS: dict[str, Callable[[], None]] = {
    "raises on a thread": raises_on_a_thread, "raises before a mode": raises_before_a_mode,
    "writes a gradient": writes_a_gradient, "many values": many_values, "under a mode": under_a_mode,
    "in a mode from a hook on": in_a_mode_from_a_hook_on, "two passes": two_passes_through_one_graph,
    "aliases": aliases, "training": training(), "weight": training(poison_weight),
    "gradient": training(poison_gradient), "in place": in_place, "views": views, "types": types,
    "large": large, "shrunk": shrunk,
}  # fmt: skip


@pytest.mark.parametrize("inf", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nan_finds_what_it_finds_when_python_looks(
    name: str, inf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for observer in (FiniteObserver, CalledObserver):
        monkeypatch.setattr(nan_tool, "FiniteObserver", observer)
        tool = NanTool(inf=inf)
        with amanda.apply(tool):
            PROGRAMS[name]()
        texts.append(tool.result.to_dict())
    assert texts[0] == texts[1]


class Changing(amanda.Tool):
    """Gives other values: of views before, of lists after, of gradients after."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(self.change)
        self.add_inst_for_op(
            lambda context: context.insert_after_backward_op(
                lambda *gs: [g if g is None else g * 2 for g in gs]
            ),
            backward=True,
        )

    def change(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "view":
            context.insert_before_op(lambda x: x * 1, inputs=[0])
        if context.get_op_type() in ("max", "chunk"):
            context.insert_after_op(lambda x: x * 1, outputs=[0])


@pytest.mark.parametrize("order", [1, -1])
def test_nan_finds_the_same_beside_tools_that_change_values(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for observer in (FiniteObserver, CalledObserver):
        monkeypatch.setattr(nan_tool, "FiniteObserver", observer)
        tool, other = NanTool(), NanTool(inf=True)
        with amanda.apply(*[tool, Changing(), other][::order]):
            for step in range(4):
                x = torch.full((2, 3), NAN if step == 3 else 1.0, requires_grad=True)
                y = x.view(6).exp()
                y.view(2, 3).max(1).values.sum().backward()
                y.detach().chunk(2)
                y.detach().add_(1)
        results.append([nan.result.to_dict() for nan in (tool, other)])
    assert results[0] == results[1]


@native_alone
def test_native_code_calls_nan_only_where_an_output_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    call = FiniteObserver.__call__

    def record(self: FiniteObserver, *values: Any, **options: Any) -> None:
        calls.append((self.before is None, self.copy))
        call(self, *values, **options)

    monkeypatch.setattr(FiniteObserver, "__call__", record)
    x = torch.tensor([1.0, 4.0])
    tool = NanTool()
    with amanda.apply(tool):
        for value in (9.0, 16.0, -4.0):
            calls.clear()
            x[0] = value
            x.sqrt_()
    assert tool.result.findings[0].inputs[0].least == -4.0
    # After the op: the observer before it, with the memory from then, and the one after it.
    assert [is_before for is_before, _ in calls] == [True, False]
    assert torch.frombuffer(calls[0][1], dtype=torch.float32).tolist() == [-4.0, pytest.approx(4**0.25)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_each_element_is_looked_at(dtype: torch.dtype) -> None:
    with amanda.apply(tool := NanTool()):
        for count, place in [(n, i) for n in (1, 2, 3, 31, 63, 130) for i in range(n)]:
            for number in (1.0, -1.0):
                torch.where(torch.arange(count) == place, number, 1.0).to(dtype).sqrt()
    assert [finding.times for finding in tool.result.findings] == [1 + 2 + 3 + 31 + 63 + 130]


@native_alone
def test_a_write_on_another_thread_has_its_own_inputs() -> None:
    tool = NanTool()
    barrier = threading.Barrier(2)

    def work(value: float) -> None:
        barrier.wait()
        for step in range(200):
            x = torch.full((64,), value if step == 150 else 4.0)
            x.sqrt_()

    with amanda.apply(tool):
        threads = [threading.Thread(target=work, args=(value,)) for value in (-1.0, 4.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (finding,) = tool.result.findings
    assert finding.type == "sqrt"
    assert finding.times == 1


@pytest.mark.parametrize("name", ["training", "views", "types", "in place", "shrunk"])
def test_statistics_are_those_that_python_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for is_native in (interceptor.NATIVE, False):
        with monkeypatch.context() as patch:
            patch.setattr(interceptor, "NATIVE", is_native)
            tool = StatsTool()
        with amanda.apply(tool):
            PROGRAMS[name]()
        results.append(tool.result)
    native, called = results
    assert native.notes() == called.notes()
    for ours, expected in zip(native.measured, called.measured, strict=True):
        assert (ours.type, ours.tensor, ours.executions) == (
            expected.type,
            expected.tensor,
            expected.executions,
        )
        numbers, expected_numbers = vars(ours.statistics), vars(expected.statistics)
        assert repr(numbers) == repr(expected_numbers)  # each bit, also of NaN
        assert ours.quantile(0.5) == pytest.approx(expected.quantile(0.5), nan_ok=True)


def test_statistics_begin_again_after_clear() -> None:
    tool = StatsTool()
    x = torch.arange(4.0)
    with amanda.apply(tool):
        for step in range(4):
            if step == 2:
                tool.clear()
            x.mul(step)
    (entry,) = [entry for entry in tool.result.measured if entry.type == "mul"]
    assert entry.executions == 2
    assert entry.statistics.most == 9


def test_a_closed_gate_keeps_native_code_from_calling() -> None:
    seen: list[Any] = []
    gate = interceptor.Gate()
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(GatedObserver(gate, seen.append)))
    x = torch.ones(2)
    with amanda.apply(tool):
        for is_open in (True, True, False, False, True):
            gate.open = is_open
            x.neg()
    assert len(seen) == (3 if interceptor.NATIVE else 5)


def test_steps_count_as_before_once_a_module_leads() -> None:
    steps, model = Steps(), torch.nn.Linear(2, 2)
    numbers = []
    with amanda.apply(steps):
        for epoch in range(2):
            for _ in range(3):
                (model(torch.ones(1, 2)) * 2).sum().mul(3)
                numbers.append(steps.number)
            if epoch == 0:
                steps.clear()
                torch.ones(2).neg()
    assert numbers == [0, 1, 2, 0, 1, 2]


@native_alone
def test_memory_of_tensors_is_read_as_it_lies() -> None:
    from amanda.drivers.torch._reader import make_reader

    reader, missing = make_reader(lambda original, value: value)
    assert reader is not None
    assert not missing
    x = torch.zeros(3, 4)
    negated = torch.zeros(3, dtype=torch.complex64).conj().imag
    for tensor, bytes_and_density in (
        (x, (48, True)), (x.t(), (48, True)), (x[:, 1:3], (40, False)), (x[1:1], (0, True)),
        (torch.zeros(2).expand(3, 2), (8, False)), (x[0, 0], (4, True)), (negated, (20, False)),
        (torch.zeros(2, 2, 2, 2).to(memory_format=torch.channels_last), (64, True)),
        (torch.zeros(9).as_strided((3, 3), (2, 2)), (36, False)),
    ):  # fmt: skip
        memory = reader.host_memory(tensor)
        assert memory is not None
        assert memory[1:] == bytes_and_density
        assert memory[0] == (tensor.data_ptr() if tensor.numel() else 0) or tensor is negated
    for other in (
        3,
        None,
        [x],
        x.to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64),
    ):
        assert reader.host_memory(other) is None
    for tensor in (x, x[1], x.t(), x[1:, 1:3], x.expand(2, 3, 4), torch.nn.Parameter(torch.zeros(3))):
        storage, memory = tensor.untyped_storage(), reader.host_memory(tensor)
        assert memory is not None
        end = memory[0] - storage.data_ptr() + memory[1]  # of the tensor, which may end before its storage
        for size, is_read in ((end, True), (end - 1, False), (4, False), (0, False), (96, True)):
            storage.resize_(size)
            assert (reader.host_memory(tensor) is not None) is is_read


class CalledStorageObserver:
    """`StorageObserver` that Python calls at each execution."""

    __amanda_marks__ = frozenset({"observer"})

    def __init__(
        self, routine: Callable[..., None], find_recomputed: Callable[[], Any], *tracker_and_number: Any
    ) -> None:
        self.routine, self.find_recomputed = routine, find_recomputed

    def __call__(self, *values: Any, recomputed: bool = False) -> None:
        (self.find_recomputed() if recomputed else self).routine(*values)

    def take_number(self) -> int:
        return -1


def resized() -> None:
    x = torch.ones(1000)
    for _ in range(3):
        x.untyped_storage().resize_(8000)
        x.add_(1)
        y = x.view(10, 100).relu_()
        x.untyped_storage().resize_(4000)
        z = torch.cat([y, y.clone().requires_grad_()])
        torch.nn.functional.dropout(z, 0.5).sum().backward()


def emptied_and_refilled() -> None:
    storage = torch.ones(8000).untyped_storage()
    x = torch.empty(0).set_(storage, 0, (8000,))  # type: ignore[call-overload]
    for size in (0, 32000, 0, 64000, 64000):
        storage.resize_(size)
        x.view(4, 2000)  # torch would read beyond the memory in an op that computes
        torch.zeros(2).add(1)


def on_meta() -> None:
    x = torch.empty(4, device="meta")
    for size in (10, 100_000, 10):
        x.resize_(size)
        x.add_(1)


def checkpointed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Tanh())
    for _ in range(3):
        x = torch.ones(4, 8, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def saved() -> None:
    functional, lstm = torch.nn.functional, torch.nn.LSTM(4, 6, num_layers=2)
    weight = torch.ones(4, 4, requires_grad=True)
    for _ in range(4):
        x = torch.randn(5, 3, 4).float() @ weight
        y = functional.dropout(functional.layer_norm(x, (4,)).softmax(-1), 0.5)
        a, _ = functional.max_pool1d(functional.gelu(y), 2, return_indices=True)
        # Ops whose last node saves nothing, and leads on to one that does.
        b = functional.linear(a.transpose(0, 1), weight[:, :2])
        a = functional.linear(b.transpose(0, 1), weight[1:3])
        parts = torch.split(lstm(y)[0], [2, 4], dim=2)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda packed: packed):
            z = parts[0].exp().sum() + functional.cross_entropy(x[0], torch.tensor([0, 1, 2]))
            z = z + functional.linear(a, weight[:, 1:3]).sum()
        doubled = Doubled.apply(x)  # type: ignore[no-untyped-call]
        total = z + parts[1].std() + a.sum() + (x.var(0) * doubled.sum().to(torch.float64)).sum()
        total.backward()
        del total, z, parts, doubled, a, b


@pytest.mark.parametrize(
    "program", [training(), in_place, resized, emptied_and_refilled, shrunk, on_meta, checkpointed, saved]
)
def test_profile_tells_the_memory_that_it_tells_when_python_looks(
    program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for observer in (StorageObserver, CalledStorageObserver):
        monkeypatch.setattr(profile_tool, "StorageObserver", observer)
        tool = ProfileTool()
        with amanda.apply(tool):
            program()
        result = tool.result
        rows = [(op.phase, op.type, op.module, op.calls, op.allocated, op.at_peak) for op in result.ops]
        results.append((rows, [str(peak) for peak in result.peaks]))
    assert results[0] == results[1]


def calls_of(monkeypatch: pytest.MonkeyPatch, *observers: type) -> list[str]:
    """Return a list to which each call of an observer by Python adds the observer's class."""
    calls: list[str] = []
    for observer in observers:

        def record(self: Any, *values: Any, call: Any = observer.__call__, **options: Any) -> None:
            calls.append(type(self).__name__)
            call(self, *values, **options)

        monkeypatch.setattr(observer, "__call__", record)
    return calls


@native_alone
def test_native_code_follows_the_memory_of_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch, StorageObserver)
    x = torch.ones(4, 4, requires_grad=True)
    with amanda.apply(ProfileTool()):
        for _ in range(4):
            calls.clear()
            (x[:, 1:3].exp() * x[1:, 0].sum()).sum().backward()
    assert calls == []


@native_alone
@pytest.mark.parametrize("make", [NanTool, StatsTool, ProfileTool])
def test_native_code_serves_the_steps_of_an_optimizer(
    make: Callable[[], amanda.Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(monkeypatch, FiniteObserver, StorageObserver, MomentsObserver)
    x, momentum = torch.ones(8), torch.zeros(8)
    with amanda.apply(make()):
        for _ in range(4):
            calls.clear()
            momentum.mul_(0.9).add_(x)
            x.sub_(momentum)
    assert calls == []


@native_alone
def test_subnormal_numbers_have_bins_of_their_own_where_the_processor_flushes_them() -> None:
    smallest = torch.tensor([0, 1, -(2**31) + 1], dtype=torch.int32).view(torch.float32)
    numbers = smallest.repeat_interleave(torch.tensor([20, 50, 30])).numpy()
    expected, moments = interceptor.Moments(5), interceptor.Moments(5)
    expected.add(numbers)
    torch.set_flush_denormal(True)
    try:
        moments.add(numbers)
    finally:
        torch.set_flush_denormal(False)
    assert moments.counts == expected.counts

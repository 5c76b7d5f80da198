"""The tool: measures the time of ops and the memory of their outputs; and the profile of a function."""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import amanda
from amanda import interceptor
from amanda.action import StorageObserver
from amanda.errors import OptionError
from amanda.options import NonNegativeInt, PositiveInt, checked
from amanda.tools.kit import RequiredNames, leaves, tensors_of, torch_tensors
from amanda.tools.mapping import CALLING_OPS, MappingTool, StandardMapping, itemsize
from amanda.tools.profile._recorder import DeviceClock, KernelProfiler, Probe, Recorder, Schedule
from amanda.tools.profile._records import OpProfile, name_of
from amanda.tools.profile._result import ProfileResult
from amanda.tools.results import count_of
from amanda.tools.select import SelectOptions, select
from amanda.tools.steps import Steps

if TYPE_CHECKING:
    from typing_extensions import Unpack

_REQUIRED = RequiredNames(
    "amanda.tools.profile", "torch", "torch:UntypedStorage._cdata", "torch:_C.DisableTorchFunction",
    "torch:_C._autograd._top_saved_tensors_default_hooks", "torch:_C._functions.AccumulateGrad._sequence_nr",
    "torch:autograd._get_sequence_nr", "torch:autograd._profiler_enabled",
    "torch:ops.profiler._record_function_enter_new",
    "torch:ops.profiler._record_function_exit._RecordFunction",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuringFacts:
    """Facts about an op that measuring needs; a rule writes them to `context["profile"]`.

    is_unmeasured: the op only passes values on.  runs_in_parallel: it runs beside other ops.
    runs_others: it runs ops that are measured too.  has_kernel_ranges: torch.profiler sees the op's kernels.
    gpu: the device of the op.  record_event: records an event in the queue of the device.
    storages_of: returns the memory of values.  storages_saved_since: returns the memory that a forward op
    saves for its backward pass, from the outputs and the result of `next_sequence_number` before the op.
    saved_reader: with which native code does the same.
    output_bytes: returns the bytes of outputs; where the end of tensors cannot be observed.
    untimed_reason: why an op that is not measured has no time; "" for an op that moves values.
    """

    is_unmeasured: bool = False
    runs_in_parallel: bool = False
    runs_others: bool = False
    has_kernel_ranges: bool = False
    gpu: str | None = None
    record_event: Callable[[Any], Any] | None = None
    storages_of: Callable[[Iterable[Any]], list[Any]] | None = None
    storages_saved_since: Callable[[Iterable[Any], int], list[Any]] | None = None
    next_sequence_number: Callable[[], int] | None = None
    saved_reader: interceptor.SavedTensorReader | None = None
    output_bytes: Callable[[Iterable[Any]], int] | None = None
    untimed_reason: str = ""


def _pytorch_facts(context: amanda.OpContext) -> None:
    """Write the facts of an op of PyTorch; a backward op inherits those of its forward op."""
    if context.is_backward():
        return
    _REQUIRED.check()
    context["profile"] = MeasuringFacts(
        has_kernel_ranges=True, gpu=_gpu_of(context.get_inputs()), record_event=_record_event,
        storages_of=_storages_of, storages_saved_since=_storages_saved_since,
        next_sequence_number=_next_sequence_number, saved_reader=_saved_tensor_reader(),
    )  # fmt: skip


def _gpu_of(inputs: Iterable[Any]) -> str | None:
    """Return the GPU of an op's tensors; None for other devices."""
    import torch

    # Ops without inputs, such as `randn`, name their device by a generator or a device.
    classes_with_device = (torch.Tensor, torch.Generator)  # storages warn that they are deprecated
    for value in leaves(inputs):
        device = value.device if isinstance(value, classes_with_device) else value
        if isinstance(device, torch.device) and device.type == "cuda":
            return name_of(device)
    return None


def _record_event(event: Any) -> Any:
    """Record an event, a new one for None, in the current stream; return None while a graph is captured."""
    from torch import cuda

    # An event recorded into a graph would be recorded at every replay.
    if cuda.is_current_stream_capturing():
        return None
    event = event or cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _batch_sizes(context: amanda.OpContext) -> tuple[int, ...]:
    """Return the sizes of the vmaps that an op runs under, by its most deeply batched tensor; () without."""
    values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or ()
    dtype_of = context["dtype"]  # None of what is no tensor; a nested tensor would refuse to tell its shape
    samples = [tensors_of(value).samples(value) for value in leaves(values) if dtype_of(value)]
    return max((sample.sizes for sample in samples if sample is not None), key=len, default=())


def _storages_of(values: Iterable[Any]) -> list[Any]:
    """Return the storages of the tensors in values, also in lists."""
    import torch

    storages: list[Any] = []
    with torch._C.DisableTorchFunction():
        for tensor in torch_tensors(values):
            try:
                storage = tensor.untyped_storage()
                storage.nbytes()
            except (NotImplementedError, RuntimeError):
                # Sparse, or a wrapper without memory of its own: that of a transform wraps a plain tensor.
                samples = tensors_of(tensor).samples(tensor)
                if samples is None or samples.data.layout is not torch.strided:
                    continue
                storage = samples.data.untyped_storage()
            storages.append(storage)
    return storages


def _next_sequence_number() -> int:
    """Return the sequence number of the next autograd node on this thread."""
    import torch

    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _storages_saved_since(outputs: Iterable[Any], since: int) -> list[Any]:
    """Return the storages that the nodes of an op, from a sequence number on, saved for the backward pass.

    Nodes of Python functions, and saved tensors that hooks pack, are skipped:
    reading these would run code of the program.
    """
    import torch

    with torch._C.DisableTorchFunction():
        reader = _saved_tensor_reader()
        return _storages_of(reader.between(torch_tensors(outputs), since, _next_sequence_number()))


@cache
def _saved_attributes(kind: Any) -> list[str]:
    # PyTorch's generated nodes have saved values under "_saved_", and those of tensors packed as well.
    return [name for name in vars(kind) if name.startswith("_saved_") and f"_raw{name}" in vars(kind)]


@cache
def _saved_tensor_reader() -> interceptor.SavedTensorReader:
    import torch

    # The hooks that pack what nodes save now, or None: asked for at each op, so without a call of Python.
    packing_hooks = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
    names = "grad_fn", "next_functions", "_sequence_nr"
    return interceptor.SavedTensorReader(*names, _saved_attributes, packing_hooks)


_TYPES_WITHOUT_MEMORY = frozenset(
    {"ExpandDims", "Identity", "IdentityN", "Placeholder", "PlaceholderWithDefault", "PreventGradient",
     "ReadVariableOp", "Reshape", "Snapshot", "Squeeze", "StopGradient"}
)  # fmt: skip
"""Types of TensorFlow's operations whose outputs share the memory of their inputs."""

_FLOW_TYPES = frozenset(
    {"ControlTrigger", "Enter", "Exit", "LoopCond", "Merge", "NextIteration", "RefEnter", "RefExit",
     "RefMerge", "RefNextIteration", "RefSwitch", "Switch", "_SwitchN"}
)  # fmt: skip
"""Types of version 1's control flow, which pass values on."""


def _tensorflow_facts(context: amanda.OpContext) -> None:
    """Write the facts of an op of TensorFlow."""
    kind = context.get_op_type() if context.is_forward() else str(context.get_backward_op().__name__)
    shape, dtype = context["shape"], context["dtype"]

    def output_bytes(outputs: Iterable[Any]) -> int:
        """Return the bytes of outputs; 0 for an op whose outputs share the memory of inputs."""
        if kind in _TYPES_WITHOUT_MEMORY:
            return 0
        return sum(prod(shape(tensor) or ()) * (itemsize(dtype(tensor)) or 0) for tensor in leaves(outputs))

    context["profile"] = MeasuringFacts(
        is_unmeasured=kind in _FLOW_TYPES, runs_others=kind in CALLING_OPS, output_bytes=output_bytes,
        # Operations of a graph run beside each other on a pool of threads.
        runs_in_parallel=not context.is_eager(),
    )  # fmt: skip


_TRACED_REASON = (
    "XLA compiled and fused them; jax.profiler.trace measures the program, "
    "and outside of jit each op is measured"
)


def _jax_facts(context: amanda.OpContext) -> None:
    """Write the facts of an op of JAX: one that is traced under jit has no time of its own."""
    import jax

    values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or ()
    # Under jit an op runs once, as it is traced, and then never by itself.
    is_traced = any(isinstance(value, jax.core.Tracer) for value in leaves(values))
    untimed_reason = _TRACED_REASON if is_traced else ""
    context["profile"] = MeasuringFacts(is_unmeasured=is_traced, untimed_reason=untimed_reason)


class ProfileTool(amanda.Tool):
    """Measure the time and memory of each op.

    Args:
        wait: Steps at the beginning of each cycle that are not recorded.  Steps are counted as
            `amanda.tools.steps.Steps` counts them, or begin at calls of `step()`.
        warmup: Steps after those that are not recorded either.
        active: Steps after those that are recorded; 0 for all further steps.
        repeat: Number of cycles; 0 for no end.
        backward: Measure backward ops too.
        memory: Record the memory of tensors.
        kernels: In PyTorch, run torch.profiler in the recorded steps to find the kernels of each op.
        limit: Number of executions in the timeline; the table counts all executions.
        **selection: Options of `select`, such as module="encoder".

    Raises:
        OptionError: For numbers below 0, and for `repeat` without `active`.
    """

    purpose = "look"
    is_copied_when_used = False

    @checked
    def __init__(
        self, wait: NonNegativeInt = 0, warmup: NonNegativeInt = 0, active: NonNegativeInt = 0,
        repeat: NonNegativeInt = 0, backward: bool = True, memory: bool = True, kernels: bool = False,
        limit: NonNegativeInt = 100_000, **selection: Unpack[SelectOptions],
    ) -> None:  # fmt: skip
        super().__init__()
        if repeat and not active:
            raise OptionError(f"repeat={repeat} needs active, the number of steps to record in each cycle")
        self._records_memory, self._records_kernels = memory, kernels
        # It starts with the first op of a recorded step, on the thread of that op.
        self._kernel_profiler = KernelProfiler()
        self._recorder = Recorder(Schedule(wait, warmup, active, repeat), limit, self._read_kernels)
        # Of autograd's next node, before the op under way.
        self._sequence_number_by_thread: dict[int, int] = {}
        # Ops by their ids, forward and backward.
        self._untimed_ops_by_reason: dict[str, set[tuple[int, int | None]]] = {}
        self._ops_by_batch_sizes: dict[tuple[int, ...], set[tuple[int, int | None]]] = {}
        self._steps = Steps()
        self._steps.on_step(self._recorder.on_step)
        rules = [["pytorch", _pytorch_facts], ["tensorflow", _tensorflow_facts], ["jax", _jax_facts]]
        self.depends_on(self._steps, StandardMapping(), MappingTool(rules))
        self.add_inst_for_op(self._instrument)
        if backward:
            self.add_inst_for_op(self._instrument, backward=True)
        select(self, **selection)

    def step(self) -> None:
        """Begin a step; from then on only calls of this method begin steps."""
        self._steps.step()

    @property
    def result(self) -> ProfileResult:
        """Return the profile so far."""
        for clock in self._recorder.clocks.values():
            clock.wait()
        self._read_kernels()
        result = ProfileResult.of(self._recorder, self._kernel_profiler.obstacle)
        reasons = self._untimed_ops_by_reason.items()
        result.remarks = [f"No time for {count_of(len(ops), 'op')}: {why}." for why, ops in reasons]
        result.remarks += [
            f"{count_of(len(ops), 'op')} ran under vmap at first: a call computed all samples, "
            f"{'x'.join(map(str, sizes))}."
            for sizes, ops in self._ops_by_batch_sizes.items()
        ]
        return result._of_tool(self)

    def clear(self) -> None:
        """Forget the records, and count the present step as step 0; analysed ops stay analysed."""
        self._read_kernels()
        self._recorder.clear()

    def _read_kernels(self) -> None:
        """Stop torch.profiler, and add the kernels to their ops."""
        self._kernel_profiler.stop(list(self._recorder.profiles.values()))

    def _instrument(self, context: amanda.OpContext) -> None:
        """Insert the routines that measure the time and memory of an op, or note why it has no time."""
        facts: MeasuringFacts = context.get("profile") or MeasuringFacts()
        op_ids = context.get_op_id(), context.get_backward_op_id()
        if facts.untimed_reason:
            self._untimed_ops_by_reason.setdefault(facts.untimed_reason, set()).add(op_ids)
        if context.is_eager() and (sizes := _batch_sizes(context)):
            self._ops_by_batch_sizes.setdefault(sizes, set()).add(op_ids)
        if facts.is_unmeasured:
            return
        insert_before: Callable[..., None] = context.insert_before_op
        insert_after: Callable[..., None] = context.insert_after_op
        if context.is_backward():
            insert_before, insert_after = context.insert_before_backward_op, context.insert_after_backward_op
        op_profile = self._profile_of(context, facts)
        if self._records_memory and facts.storages_of is not None:
            before, after = self._storage_observers(op_profile, facts, context.is_forward())
            insert_before(before)
            insert_after(after)
        elif self._records_memory and facts.output_bytes is not None:
            insert_after(self._add_output_bytes, op_profile=op_profile, bytes_of=facts.output_bytes)
        if facts.runs_in_parallel:
            has_tensor_input = _has_tensor_input(context)
            begin, end = self._recorder.parallel_routines(op_profile, has_tensor_input)
            if has_tensor_input:
                insert_before(begin)
        else:
            begin, end = self._recorder.nested_routines(op_profile, self._probes(facts))
            insert_before(begin, [])
        insert_after(end, [])

    def _probes(self, facts: MeasuringFacts) -> list[Probe]:
        """Return the probes of an op besides the program's clock: torch.profiler, and the clock of a GPU."""
        has_kernels = self._records_kernels and facts.has_kernel_ranges
        probes: list[Probe] = [self._kernel_profiler] if has_kernels else []
        if facts.gpu is not None and facts.record_event is not None:
            probes.append(self._recorder.clocks.setdefault(facts.gpu, DeviceClock(facts.record_event)))
        return probes

    def _profile_of(self, context: amanda.OpContext, facts: MeasuringFacts) -> OpProfile:
        """Return the profile of a context's op, a new one at the first analysis."""
        op_id, backward_op_id = context.get_op_id(), context.get_backward_op_id()
        profiles = self._recorder.profiles
        if (op_id, backward_op_id) not in profiles:
            phase, kind, name = context["phase"], context["type"], context.get_forward_op_type()
            if context.is_backward():
                phase, kind = "backward", context["backward_type"]
                name = str(context.get_backward_op().__name__)
            profiles[op_id, backward_op_id] = OpProfile(
                phase, type=kind, module=context.get_scope(), source=context.get_source(), name=name,
                id=backward_op_id or op_id, op_id=op_id, runs_others=facts.runs_others, index=len(profiles),
            )  # fmt: skip
        return profiles[op_id, backward_op_id]

    def _storage_observers(
        self, op_profile: OpProfile, facts: MeasuringFacts, is_forward: bool
    ) -> tuple[StorageObserver, StorageObserver]:
        """Return the observers before and after an op that follow the storages of its values.

        Native code calls them where it cannot; the one after a forward op also follows what the op saved for
        its backward pass.
        """
        recorder, storages_of = self._recorder, facts.storages_of
        assert storages_of is not None

        def follow_inputs(*inputs: Any) -> None:
            before.take_number()
            if is_forward and facts.next_sequence_number is not None:
                # By thread: autograd numbers the nodes of each thread apart.
                self._sequence_number_by_thread[get_ident()] = facts.next_sequence_number()
            recorder.follow(storages_of(inputs), None)

        before = StorageObserver(follow_inputs, lambda: before, recorder.storages, op_profile.index)
        before.notes_number = is_forward  # only what forward ops save is followed

        def observer_after(profile: OpProfile) -> StorageObserver:
            def follow_outputs(*outputs: Any) -> None:
                recorder.follow(storages_of(outputs), profile)
                if is_forward and facts.storages_saved_since is not None:
                    number = before.take_number()
                    if number < 0:  # Python has followed the inputs
                        number = self._sequence_number_by_thread.get(get_ident(), sys.maxsize)
                    recorder.follow(facts.storages_saved_since(outputs, number), profile)

            def find_recomputed() -> StorageObserver:
                return observer_after(recorder.recomputation(profile))

            links = [before, facts.saved_reader] if is_forward and facts.saved_reader else [before]
            return StorageObserver(follow_outputs, find_recomputed, recorder.storages, profile.index, *links)

        return before, observer_after(op_profile)

    @amanda.observer
    def _add_output_bytes(
        self, *outputs: Any, op_profile: OpProfile, bytes_of: Any, recomputed: bool
    ) -> None:
        """Add the bytes of outputs, while recording, to what an op or its recomputation has allocated."""
        if recomputed:
            op_profile = self._recorder.recomputation(op_profile)
        if self._recorder.recording:
            op_profile.allocated = (op_profile.allocated or 0) + bytes_of(outputs)


def _has_tensor_input(context: amanda.OpContext) -> bool:
    """Return True if the op reads a tensor or a list, or a gradient: at its arrival the op begins."""
    if context.is_backward():
        return bool(context.get_grad_outputs())
    dtype_of = context["dtype"]  # None of what is no tensor; a tensor of unknown rank has no shape either
    return any(isinstance(value, (list, tuple)) or dtype_of(value) for value in context.get_inputs())


@checked
def profile(
    function: Callable[..., Any], /, *inputs: Any, warmup: NonNegativeInt = 1, calls: PositiveInt = 1,
    **keywords: Any,
) -> ProfileResult:  # fmt: skip
    """Return the time and memory of each op in calls of a function.

    Args:
        function: Model, or a function that runs it.
        *inputs: Positional arguments of each call.
        warmup: Calls before, which are not in the result: the first ones also load kernels and fill caches.
        calls: Calls that are measured.
        **keywords: Arguments by name.

    print(profile(lambda: model(x).sum().backward()))
    """
    tool = ProfileTool()
    with amanda.apply(tool):
        for _ in range(warmup):
            function(*inputs, **keywords)
        tool.clear()
        for _ in range(calls):
            function(*inputs, **keywords)
    return tool.result

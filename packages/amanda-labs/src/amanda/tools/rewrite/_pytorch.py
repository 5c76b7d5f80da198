"""Delayed ops in PyTorch: a stand-in is the output of an op of a match, and is computed if it is read."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import amanda
from amanda.tools.kit import RequiredNames, torch_tensors
from amanda.tools.libraries import tree_map
from amanda.tools.rewrite._program import OpExecution, OpExecutions, ProgramNode

if TYPE_CHECKING:
    import torch

_REQUIRED = RequiredNames(
    "amanda.tools.rewrite",
    "torch",
    "torch:UntypedStorage._cdata",
    "torch:Tensor._backward_hooks",
    "torch:Tensor._make_wrapper_subclass",
    "torch:Tensor._version",
    "torch:_C._ForceDispatchKeyGuard",
    "torch:_C._disabled_torch_function_impl",
    "torch:_C._dispatch_tls_local_exclude_set",
    "torch:_C._dispatch_tls_local_include_set",
)

HOOKS = ("register_hook", "retain_grad")
"""Methods that ask for a gradient, which arrives only if the match is not replaced."""

_READING_METHODS = (
    "numpy", "tolist", "data_ptr", "storage", "untyped_storage", "share_memory_", "__array__", "__dlpack__",
    "__deepcopy__", "__reduce_ex__", "__repr__",
)  # fmt: skip
"""Methods that read a tensor without a kernel."""

_MAX_FORMS = 4096


class OutputForm(NamedTuple):
    """Facts of an op's output besides its elements.  owns_memory: False if an input shares its memory."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    owns_memory: bool


class TorchOpExecutions(OpExecutions):
    """Executions in PyTorch, which delays ops once the form of their outputs is known; the first compute."""

    def __init__(self, on_read: Callable[[OpExecution], None]) -> None:
        super().__init__(on_read)
        # None for an output that cannot be delayed: such ops run at once without another look.
        self._forms: dict[Hashable, OutputForm | None] = {}
        # Weakly: an output that nobody refers to any more is never computed.
        self.delayed: weakref.WeakSet[DelayedExecution] = weakref.WeakSet()

    def run_or_delay(self, node: ProgramNode, inputs: Sequence[Any], compute: Callable[..., Any]) -> Any:
        """Return a stand-in for the output; compute the output if its form is not known yet.

        Also computes outputs that cannot be delayed, such as views of tensors of the program.
        """
        delay = DelayedExecution(node, inputs, compute, self.producers(inputs), on_read=self._on_read)
        # The form of an output depends on these alone; autocast changes its element type.
        key = (node.op, _input_signature(inputs), delay.modes)
        is_known = key in self._forms
        form = self._forms.get(key)  # None also for an output that is known as one that cannot be delayed
        # A view of a tensor of the program is computed at once, since writes to it must reach the tensor.
        if form is not None and (form.owns_memory or any(delay_of(value) for value in inputs)):
            self.delayed.add(delay)
            return delay.stand_in(form)
        value = delay.value()
        if not is_known:
            # Numbers among the inputs may differ at each call.
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = _form_of(value, inputs)
        for tensor in torch_tensors([value]):
            # The first execution is computed, and still found as a producer.
            self._by_output[tensor] = delay
        return value

    def execution_of(self, value: Any) -> OpExecution | None:
        """Return the execution that a value stands for, or the execution that made the value."""
        return delay_of(value) or super().execution_of(value)

    def compute_delayed(self, written: Sequence[Any] = ()) -> None:
        """Compute each delayed op that reads a tensor of `written`; without tensors, each delayed op.

        Those that read one count as not intact.
        """
        for delay in list(self.delayed) if self.delayed else ():
            if not written:
                delay.value()
            # An op that has not run must read what was there when it was called.
            elif _storage_ids(written) & _storage_ids(delay.inputs):
                delay.value()
                delay.is_written = True


@dataclass(eq=False, kw_only=True)
class DelayedExecution(OpExecution):
    """An execution of an op that is computed once its output is read, or never: then the match was replaced.

    on_read: called before the first read outside of the match.
    modes: of autograd and autocast at the time of the call; the dispatch keys are restored too, for a reader
    below autograd.  is_written: True if the inputs were written later; versions miss a write through `.data`.
    has_stand_in: True if the program has a stand-in with an autograd node of its own, so that the delayed
    computation must be cut off from the inputs' graph.
    """

    on_read: Callable[[OpExecution], None]
    is_written: bool = False
    has_stand_in: bool = False

    def __post_init__(self) -> None:
        """Record the modes, dispatch keys and versions of inputs at the time of the call."""
        import torch

        # Autocast is a setting of each device.
        devices = sorted({tensor.device.type for tensor in torch_tensors(self.inputs)})
        self.modes: tuple[Any, ...] = (
            torch.is_grad_enabled(),
            *((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
              for device in devices if torch.amp.is_autocast_available(device)),
        )  # fmt: skip
        dispatch_sets = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
        self._dispatch_keys = tuple(dispatch_set() for dispatch_set in dispatch_sets)
        self._versions = _tensor_versions(self.inputs)
        # The inputs that the op read, the states of generators before, and its output, once it is computed.
        self._arguments: Sequence[Any] = ()
        self._random_states: Any = None
        self._value: Any = None
        # Autograd's threads may read a stand-in while the program does; computing one may read others.
        self._lock = threading.RLock()

    @property
    def is_intact(self) -> bool:
        """True if no input was written since the op was called."""
        return not self.is_written and _tensor_versions(self.inputs) == self._versions

    def is_read(self) -> bool:
        """Return True if the output was read, or was computed and has hooks, which become its reader."""
        if any(tensor._backward_hooks or tensor.retains_grad for tensor in torch_tensors([self._value])):
            self.reader = self.reader or HOOKS[0]
        return super().is_read()

    def stand_in(self, form: OutputForm) -> Any:
        """Return a tensor that stands for the output, with an autograd node for its gradient."""
        if not form.requires_grad:
            return _make_stand_in(self, form)
        self.has_stand_in = True
        stand_in = _torch_classes().delayed_function.apply(self, form, *torch_tensors(self.inputs))
        # `apply` returns another Python object than `forward` made.
        stand_in._amanda_delay = self
        return stand_in

    def value(self) -> Any:
        """Return the output, computed at most once."""
        value, _ = self.value_and_arguments()
        return value

    def value_and_arguments(self) -> tuple[Any, Sequence[Any]]:
        """Return the output, computed at most once, and the aliases of inputs to which its gradients go."""
        import torch
        from torch.utils.checkpoint import get_device_states

        with self._lock:
            if self._value is None:
                # Saved before the op draws: a second computation has to give the same numbers.
                self._random_states = torch.get_rng_state(), get_device_states(*torch_tensors(self.inputs))
                self._value, self._arguments = self._compute_output()
            return self._value, self._arguments

    def compute_again(self) -> tuple[Any, Sequence[Any]]:
        """Return the output and arguments of a new computation with the same random numbers."""
        import torch
        from torch.utils.checkpoint import set_device_states

        self.value()  # sets the random states, if the op has not run
        host_state, (devices, device_states) = self._random_states
        with torch.random.fork_rng(devices):
            torch.set_rng_state(host_state)
            set_device_states(devices, device_states)
            return self._compute_output()

    def _compute_output(self) -> tuple[Any, Sequence[Any]]:
        """Compute the op in the modes of its call; return the output and the inputs that it read.

        Delayed inputs are computed too; no tool sees the ops.
        """
        import torch

        has_grad, *autocast_modes = self.modes
        with ExitStack() as stack:
            stack.enter_context(amanda.disabled())
            stack.enter_context(torch._C._ForceDispatchKeyGuard(*self._dispatch_keys))
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for device, enabled, dtype in autocast_modes:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            # Aliases: gradients by them are those of this op, and do not run on into the program's graph.
            arguments = tree_map(_differentiable_alias if self.has_stand_in else _computed_value, self.inputs)
            return self.compute(*arguments), arguments

    def read(self, reader: str) -> Any:
        """Return the output to a reader outside of the match; the first read is reported to `on_read`."""
        if not self.reader:
            self.reader = reader
            self.on_read(self)
        return self.value()


def delay_of(value: Any) -> DelayedExecution | None:
    """Return the delay behind a stand-in; None for any other value."""
    delay: DelayedExecution | None = getattr(value, "_amanda_delay", None)
    return delay


def _computed_value(value: Any) -> Any:
    """Return the output that a stand-in stands for, or the value itself; not a read outside of the match."""
    delay = delay_of(value)
    return value if delay is None else delay.value()


def _differentiable_alias(value: Any) -> Any:
    """Return an alias of a value, or of the output of a stand-in, to which a gradient can be taken."""
    import torch

    if not (isinstance(value, torch.Tensor) and value.requires_grad):
        return _computed_value(value)
    if delay_of(value) is None:
        # A view has the memory of the input and a node of its own.
        return value.view_as(value)
    return _torch_classes().computed_function.apply(value, _computed_value(value).detach())


def _storage_ids(values: Sequence[Any]) -> set[int]:
    """Return the addresses of the storages of tensors; stand-ins have none."""
    return {tensor.untyped_storage()._cdata for tensor in torch_tensors(values) if delay_of(tensor) is None}


def _tensor_versions(values: Sequence[Any]) -> list[int | None]:
    """Return how often each tensor was written; None for tensors of inference mode, which do not count."""
    return [None if tensor.is_inference() else tensor._version for tensor in torch_tensors(values)]


def _input_signature(value: Any) -> Hashable:
    """Return the facts of an input, or of a list of inputs, on which the form of an output depends."""
    from torch import Tensor

    if isinstance(value, Tensor):
        # Views of a stand-in are delayed, views of the program's tensors are not.
        is_delayed = delay_of(value) is not None
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad, is_delayed
    if isinstance(value, (list, tuple)):
        return tuple([_input_signature(item) for item in value])
    return type(value), repr(value)


def _form_of(value: Any, inputs: Sequence[Any] = ()) -> OutputForm | None:
    """Return the form of an op's output; None for several tensors, and for subclasses and sparse tensors.

    Computes delayed inputs, unless the value is a stand-in itself.
    """
    import torch

    # A parameter or another subclass has behaviour that a stand-in would lack.
    if type(value) not in (torch.Tensor, _torch_classes().stand_in) or value.layout is not torch.strided:
        return None
    owns_memory = delay_of(value) is not None or not _storage_ids([value]) & _storage_ids(
        tree_map(_computed_value, inputs)
    )
    return OutputForm(
        value.shape, value.stride(), value.dtype, value.device, value.requires_grad, owns_memory
    )


def _make_stand_in(delay: DelayedExecution, form: OutputForm | None) -> torch.Tensor:
    """Return a tensor without memory that stands for the output of a delayed execution."""
    import torch

    assert form is not None
    stand_in: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _torch_classes().stand_in, form.shape, strides=form.strides, dtype=form.dtype, device=form.device
    )
    stand_in._amanda_delay = delay  # type: ignore[attr-defined]
    return stand_in


class _TorchClasses(NamedTuple):
    """The tensor class of stand-ins, and the autograd functions to a stand-in and to its output."""

    stand_in: Any
    delayed_function: Any
    computed_function: Any


def _input_gradients(delay: DelayedExecution, gradients: Sequence[torch.Tensor]) -> list[Any]:
    """Return the gradients of a delayed op's inputs, by its own backward pass; None for untrained ones.

    Autograd comes here only if the match was not replaced: the replacement has no such node.
    """
    import torch

    inputs, create_graph = torch_tensors(delay.inputs), torch.is_grad_enabled()
    # With create_graph the caller's graph holds, and frees, the one of the value, so each call needs a value
    # with a graph of its own.
    value, arguments = delay.compute_again() if create_graph else delay.value_and_arguments()
    trained_arguments = [
        argument
        for tensor, argument in zip(inputs, torch_tensors(arguments), strict=True)
        if tensor.requires_grad
    ]
    trained_gradients = iter(torch.autograd.grad(
        value, trained_arguments, gradients,
        retain_graph=True,  # the program may go backward twice
        create_graph=create_graph, allow_unused=True,
    ))  # fmt: skip
    return [next(trained_gradients) if tensor.requires_grad else None for tensor in inputs]


@cache
def _torch_classes() -> _TorchClasses:
    """Return the classes, which are created when torch is there."""
    import torch

    _REQUIRED.check()

    class StandInTensor(torch.Tensor):
        """Tensor without memory that stands for the output of a delayed op; a read computes the output."""

        # torch's functions treat a stand-in as a plain tensor, so that the ops within them are the same
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Read the output of each stand-in among the arguments, and call the function on the outputs."""
            # Autograd detaches as it saves a tensor: that reads no element.
            if func is torch.ops.aten.detach.default:
                (stand_in,) = args
                return _make_stand_in(stand_in._amanda_delay, _form_of(stand_in))

            def read(value: Any) -> Any:
                delay = delay_of(value)
                reader = func.overloadpacket.__name__
                return value if delay is None else delay.read(reader).detach()

            return func(*tree_map(read, args), **tree_map(read, kwargs or {}))

    class DelayedFunction(torch.autograd.Function):
        """Delayed op from the tensors of its inputs to a stand-in; backward computes the op."""

        @staticmethod
        def forward(
            ctx: Any, delay: DelayedExecution, form: OutputForm, *inputs: torch.Tensor
        ) -> torch.Tensor:
            """Return a stand-in; the inputs are there for autograd, and are not read."""
            ctx.delay = delay
            return _make_stand_in(delay, form)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            """Return the gradients of the delayed op's inputs; None for untrained ones, delay and form."""
            return None, None, *_input_gradients(ctx.delay, gradients)

    class ComputedFunction(torch.autograd.Function):
        """Identity from a stand-in to its computed output."""

        @staticmethod
        def forward(ctx: Any, stand_in: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return value.detach()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return *gradients, None  # to the node of the stand-in

    for name in (*_READING_METHODS, *HOOKS):
        setattr(StandInTensor, name, _reader_method(name, getattr(torch.Tensor, name)))
    return _TorchClasses(StandInTensor, DelayedFunction, ComputedFunction)


def _reader_method(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for a method of tensors: records the read, and calls the output's method.

    A hook is registered on the stand-in itself, which has the autograd node.
    """

    @wraps(method)
    def read_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the output as read by this method, and call its method; a hook's on the stand-in."""
        # The read is recorded first, also for a hook: it tells that the match must not be replaced.
        value = self._amanda_delay.read(name)
        if name in HOOKS:
            return method(self, *args, **kwargs)
        return getattr(value if self.requires_grad else value.detach(), name)(*args, **kwargs)

    return read_and_call

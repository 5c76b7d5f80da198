"""Protected ops of PyTorch: parameters that moved to another process, and executions that cross to it."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from threading import Lock
from typing import Any

import amanda
from amanda.tools.kit import RequiredNames, leaves
from amanda.tools.partition._enclave import (
    OpTraffic,
    ProcessLink,
    ProtectError,
    RawBytes,
    TensorHeader,
    pack_tensor,
    unpack_tensor,
)
from amanda.tools.partition._pytorch_stand_ins import PLAIN_TYPES, ParameterStandIns, ProtectedOptimizers

_REQUIRED = RequiredNames(
    "amanda.tools.partition",
    "torch",
    "torch:Tensor._version",
    "torch:_C._current_graph_task_id",
    "torch:autograd.Variable._execution_engine.queue_callback",
)

logger = logging.getLogger("amanda")


class Protection:
    """The parameters that were moved, and the process that holds them.

    A Protection that is dropped without `finalize` ends the process, and the parameters are lost.
    dropped_executions: numbers of executions whose autograd nodes are gone: they have no backward pass.
    """

    def __init__(self) -> None:
        _REQUIRED.check()
        self.traffic: dict[tuple[str, int], OpTraffic] = {}  # by phase, and by op, parameter or optimizer
        self.dropped_executions: list[int] = []
        self.stand_ins, self.passes = ParameterStandIns(), BackwardPasses()
        self._optimizers = ProtectedOptimizers(self.stand_ins)
        self._numbers = itertools.count()  # of executions
        self._finalizer: weakref.finalize[Any, Any] | None = None  # ends the process; None before it starts

    @cached_property
    def link(self) -> ProcessLink:
        """Return the link to the process; the first use starts it, and hooks the steps of optimizers."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # The hook is global, so it must not keep this object alive, whose end closes the process.
        link, weak_self = ProcessLink({"threads": torch.get_num_threads()}), weakref.ref(self)

        def before_step(optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            protection = weak_self()
            if protection is not None:
                protection._before_step(optimizer, args, kwargs)

        hook = register_optimizer_step_pre_hook(before_step)
        self._finalizer = weakref.finalize(self, _close_lost_link, link, hook)
        self._finalizer.atexit = False  # the process ends when the program hangs up
        return link

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None as long as none was started."""
        return self.link.pid if self._finalizer is not None else None

    def traffic_record(self, phase: str, key: int, kind: str, module: str, source: str) -> OpTraffic:
        """Return the record of the tensors that cross at an op; create it if there is none."""
        return self.traffic.setdefault((phase, key), OpTraffic(phase, kind, module, source))

    def adopt(self, context: amanda.OpContext) -> None:
        """Move the parameters and buffers that a selected op reads to the process.

        Raises ProtectError where one cannot be moved, or is read by an op that is not selected.
        """
        self.stand_ins.adopt(context, self._send_parameter)

    def _send_parameter(self, path: str, value: Any, tensor_header: TensorHeader, content: RawBytes) -> None:
        """Send a parameter to the process, which holds it from now on, and record what crossed."""
        module = path.rpartition(".")[0]
        record = self.traffic_record("hold", id(value), "parameter", module, source="")
        message = {"kind": "hold", "path": path, "trained": value.requires_grad}
        _, _, size = self.link.call(message, [(tensor_header, content)])
        record.add(sent=[tensor_header], received=[], size=size)

    def run_in_process(
        self, *inputs: Any, key: int, record: OpTraffic, op: str, in_place: bool, random: bool, target: Any
    ) -> Any:
        """Run an op in the process, and return its outputs, which autograd connects with the inputs.

        target: the stand-in that an op in place writes, and the result; None where it writes none.
        key: of the op in `traffic`.  op: path of the callable in torch.
        """
        import torch

        if target is not None:  # the stand-in itself, whatever this routine was given for it
            inputs = (target, *inputs[1:])
        message = MessageInputs(inputs, self.stand_ins, f"{record.type} at {record.source}")
        # Only for a backward pass does the process keep the execution.
        has_backward = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (*message.tensors, *message.parameters)
        )
        backward_record = self.traffic_record("backward", key, record.type, record.module, record.source)
        execution = ProtectedExecution(self, record, backward_record, random)
        header = {
            "kind": "forward", "op": op, "inputs": message.encoded, "in_place": in_place, "random": random,
            "trained": [tensor.requires_grad for tensor in message.tensors], "has_backward": has_backward,
        }  # fmt: skip
        # Stand-ins are arguments too, though they are not sent: autograd records the op if only they need a
        # gradient.
        outputs = _autograd_function().apply(
            execution, header, len(message.tensors), *message.tensors, *message.parameters
        )
        if execution.returns_parameter:  # an op in place on a stand-in, whose values stay in the process
            return inputs[0]
        return outputs if execution.is_sequence else outputs[0]

    def next_number(self) -> int:
        """Return a number for one more execution."""
        return next(self._numbers)

    def pop_ended_executions(self) -> Mapping[str, Sequence[int]]:
        """Return the executions and passes that the process can forget, and empty the lists of them."""
        # The list is swapped, not emptied: `__del__` may append to it at any time.
        dropped_executions, self.dropped_executions = self.dropped_executions, []
        failed_passes, self.passes.failed = self.passes.failed, []
        return {"dropped_executions": dropped_executions, "failed_passes": failed_passes}

    def _before_step(self, optimizer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Step the optimizer's protected parameters in the process, and record it; no effect without any."""
        header = self._optimizers.step_message(optimizer, args, kwargs)
        if header is not None:
            _, _, size = self.link.call(header)
            number, name = header["optimizer"], header["name"]
            record = self.traffic_record("optimizer", number, name, module="", source="")
            record.add(sent=[], received=[], size=size)

    def is_of(self, model: Any) -> bool:
        """Return True if a module, or a list of parameters, has one that was moved, or if none was moved."""
        is_module = hasattr(model, "named_modules")
        tensors = [*model.parameters(), *model.buffers()] if is_module else leaves([model])
        model_ids = {id(tensor) for tensor in tensors}
        stand_ins = list(self.stand_ins)
        return not stand_ins or any(id(stand_in.tensor) in model_ids for stand_in in stand_ins)

    def release(self) -> None:
        """Bring the values back without their gradients, end the process, and forget the stand-ins.

        Raises ProtectError if the process has died.
        """
        import torch

        try:
            with amanda.disabled(), torch.no_grad():
                for stand_in in self.stand_ins:
                    _, tensors, _ = self.link.call({"kind": "read", "path": stand_in.path})
                    stand_in.tensor.detach().copy_(unpack_tensor(*tensors[0]))
                    # Its NaN stood for a gradient that goes with the process.
                    stand_in.tensor.grad = None
        finally:
            # Also if the process has died: the tool can be used again.
            self.stand_ins.clear()
            if self._finalizer is not None and (detached := self._finalizer.detach()) is not None:
                _, _, (link, hook), _ = detached  # the arguments of `_close_lost_link`
                _close_link(link, hook)


def _close_lost_link(link: ProcessLink, hook: Any) -> None:
    """Warn of lost parameters, and end the process that nobody can reach any more."""
    logger.warning(
        "protect: the tool was dropped without finalize(model); the parameters in process %s are lost",
        link.pid,
    )
    _close_link(link, hook)


def _close_link(link: ProcessLink, hook: Any) -> None:
    """Remove the hook of optimizers, and end the process."""
    hook.remove()
    link.close()


def provide_protection(context: amanda.OpContext) -> None:
    """Put a function that makes a Protection into a context."""
    context["protection"] = Protection


class MessageInputs:
    """The inputs of an op, encoded for a message.

    tensors: those that are sent.  parameters: stand-ins, whose values the process has.
    encoded: all inputs, with references to these.  Raises ProtectError for an input that cannot be sent.
    """

    def __init__(self, values: Sequence[Any], stand_ins: ParameterStandIns, op_text: str) -> None:
        self._stand_ins, self._op_text = stand_ins, op_text
        self.tensors: list[Any] = []
        self.parameters: list[Any] = []
        self.encoded = [self._encode(value) for value in values]

    def _encode(self, value: Any) -> Any:
        """Return a value for JSON, and collect its tensors; `Enclave._decode_input` is the inverse.

        Raises ProtectError for a value that cannot be sent, and as `ParameterStandIn.check` does.
        """
        import torch

        if isinstance(value, torch.Tensor):
            stand_in = self._stand_ins.find(value)
            if stand_in is not None:
                stand_in.check(value, self._op_text)
                self.parameters.append(value)
                return {"parameter": stand_in.path}
            self.tensors.append(value)
            return {"tensor": len(self.tensors) - 1}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop, value.step]}
        if isinstance(value, tuple):
            return {"tuple": [self._encode(item) for item in value]}
        if isinstance(value, list):
            return [self._encode(item) for item in value]
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, PLAIN_TYPES):
            return value
        raise ProtectError(
            f"{self._op_text} was given a {type(value).__name__}, which is not sent to the protected "
            "process: tensors, numbers, texts, types and lists of these are"
        )


@dataclass(eq=False)
class ProtectedExecution:
    """One execution of a protected op.

    record, backward_record: of its traffic.  random: the op may draw from the default generator.
    is_sequence: the op returned several outputs.  returns_parameter: the op returned a stand-in.
    trained: for each output, True if it needs a gradient.
    """

    protection: Protection
    record: OpTraffic
    backward_record: OpTraffic
    random: bool
    number: int = -1
    is_sequence: bool = False
    returns_parameter: bool = False
    trained: Sequence[bool] = ()

    def forward(self, header: dict[str, Any], arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Run the op in the process, return its outputs, and set the facts of the outputs from the answer.

        header: of the message.  Records the traffic, and advances the program's generator for a random op.
        Raises ProtectError for an op that returns other things than tensors.
        """
        import torch

        protection = self.protection
        self.number = protection.next_number()
        tensors = [pack_tensor(argument) for argument in arguments]
        if self.random:  # the process draws from the program's generator, whose state comes back
            tensors.append(pack_tensor(torch.get_rng_state()))
        message = {**header, "execution": self.number, **protection.pop_ended_executions()}
        answer, packed_outputs, size = protection.link.call(message, tensors)
        self.record.add([header for header, _ in tensors], [header for header, _ in packed_outputs], size)
        if "non_tensor" in answer:
            raise ProtectError(
                f"{self.record.type} at {self.record.source} in module {self.record.module!r} gives a "
                f"{answer['non_tensor']}, and tensors alone leave the protected process: read numbers "
                "outside of the protected modules, or protect by type="
            )
        outputs = [unpack_tensor(*output) for output in packed_outputs]
        if self.random:
            torch.set_rng_state(outputs.pop())
        self.is_sequence, self.returns_parameter = answer["is_sequence"], answer["returns_parameter"]
        self.trained = answer["trained"]
        return tuple(outputs)

    def compute_gradients(self, output_gradients: Sequence[Any]) -> Iterator[Any]:
        """Let the process compute and yield the gradients of the sent tensors that need one, in their order.

        None for a tensor that the outputs do not depend on.  output_gradients: None where there is none.
        Records the traffic, and the parameters that have gradients in this backward pass.
        """
        import torch

        protection = self.protection
        output_indices = [i for i, gradient in enumerate(output_gradients) if gradient is not None]
        tensors = [pack_tensor(output_gradients[i]) for i in output_indices]
        # One number for all nodes of a pass, on whichever thread they run.
        backward_pass = torch._C._current_graph_task_id()
        protection.passes.add(backward_pass, protection)
        message = {
            "kind": "backward", "execution": self.number, "outputs": output_indices,
            "backward_pass": backward_pass,
        }  # fmt: skip
        answer, packed_gradients, size = protection.link.call(message, tensors)
        self.backward_record.add(
            [header for header, _ in tensors], [header for header, _ in packed_gradients], size
        )
        protection.passes.set_parameters(backward_pass, answer["parameters"])
        # Only gradients that exist were sent.
        unread_gradients = iter(packed_gradients)
        for has_gradient in answer["has_gradient"]:
            yield unpack_tensor(*next(unread_gradients)) if has_gradient else None

    def __del__(self) -> None:
        # Autograd has dropped the node.  No message is sent here: this may run on any thread, at any time.
        if self.number >= 0:  # the process may know of this execution
            self.protection.dropped_executions.append(self.number)


@cache
def _autograd_function() -> Any:
    """Return the autograd function of protected ops; cached, since torch is imported when it is needed."""
    import torch

    class Protected(torch.autograd.Function):
        """An op in the process, as autograd has it: the gradients of its arguments are computed there too."""

        @staticmethod
        def forward(
            ctx: Any, execution: ProtectedExecution, header: dict[str, Any], sent_count: int, *tensors: Any
        ) -> Any:
            """Run the op in the process on the first tensors, its arguments; stand-ins follow them."""
            ctx.execution, ctx.needs_gradient = execution, header["trained"]
            outputs = execution.forward(header, tensors[:sent_count])
            # There are no outputs for an op that gives back a parameter.
            outputs_and_trained = zip(outputs, execution.trained, strict=False)
            ctx.mark_non_differentiable(
                *(output for output, is_trained in outputs_and_trained if not is_trained)
            )
            # None stays None: zeros would be sent to the process.
            ctx.set_materialize_grads(False)
            return outputs

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *gradients: Any) -> Any:
            """Return the gradients of arguments, which the process computes; None for all other inputs."""
            with amanda.disabled():
                trained_gradients = iter(list(ctx.execution.compute_gradients(gradients)))
            argument_gradients = [
                next(trained_gradients) if needs_gradient else None for needs_gradient in ctx.needs_gradient
            ]
            # None for execution, header and sent_count, which are no tensors.
            leading_gradients = (None, None, None)
            # Stand-ins follow the arguments: their gradients stay in the process.
            stand_in_count = len(ctx.needs_input_grad) - len(leading_gradients) - len(argument_gradients)
            return *leading_gradients, *argument_gradients, *[None] * stand_in_count

    return Protected


class BackwardPasses:
    """The backward passes that are under way, by the numbers of autograd's graph tasks.

    paths: of the parameters that have gradients in each pass.
    failed: passes that ended with an error, whose gradients the process has not forgotten yet.
    """

    def __init__(self) -> None:
        self.failed: list[int] = []
        self.paths: dict[int, Sequence[str]] = {}
        self.accumulation_lock = Lock()

    def add(self, number: int, protection: Protection) -> None:
        """Record the pass that runs on this thread, and let autograd call back at its end.

        No effect after the first protected op that the pass reaches.
        """
        import torch

        if number not in self.paths:
            engine: Any = torch.autograd.Variable._execution_engine
            pass_end = _PassEnd(number, protection)
            self.paths[number] = ()
            # Called after the last node of the pass, and dropped without a call if a node raises.
            engine.queue_callback(pass_end.end)

    def set_parameters(self, number: int, paths: Sequence[str]) -> None:
        """Record the parameters that have gradients in a pass so far."""
        self.paths[number] = paths


class _PassEnd:
    """One backward pass.  Autograd calls `end` if it succeeds, and drops this object in any case."""

    def __init__(self, number: int, protection: Protection) -> None:
        self._number, self._protection = number, protection

    def end(self) -> None:
        """Let the process add the pass's gradients to the parameters', and fill stand-ins' with NaN."""
        passes, protection = self._protection.passes, self._protection
        stand_ins = {stand_in.path: stand_in for stand_in in protection.stand_ins}
        with passes.accumulation_lock:  # passes of several threads may end at once
            paths = passes.paths.pop(self._number)
            replaces_gradient = {path: stand_ins[path].is_gradient_replaced for path in paths}
            protection.link.call(
                {"kind": "accumulate", "backward_pass": self._number, "replaces": replaces_gradient}
            )
            for path in paths:
                # NaN: the program must not read the gradient, but sees that there is one.
                stand_ins[path].fill_gradient()

    def __del__(self) -> None:
        if "_protection" not in vars(self):  # a signal's handler has raised in __init__
            return
        # After `end` the pass is not there any more; if autograd did not call it, the pass has failed.
        passes = self._protection.passes
        if passes.paths.pop(self._number, None) is not None:
            passes.failed.append(self._number)

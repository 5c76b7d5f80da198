"""The protected process, and the messages to it: plain values and raw bytes, nothing pickled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from operator import attrgetter
from pathlib import Path
from threading import RLock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from amanda.errors import AmandaError
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RawBytes: TypeAlias = "NDArray[np.uint8]"

_MIN_MESSAGE_BYTES = 16_385
"""Bytes of a message that `multiprocessing.connection` writes without a copy that nobody could wipe."""
_START_TIMEOUT = 120.0
_CHILD_CODE = (
    "import json, sys; settings = json.loads(sys.stdin.readline()); sys.path[:] = settings['path']; "
    "from amanda.tools.partition._enclave import serve; serve(settings)"
)


class ProtectError(AmandaError, RuntimeError, module="amanda.tools.partition"):
    """An op cannot run in the protected process, or the program accessed a tensor that lives in it."""


class TensorHeader(NamedTuple):
    """Declaration of a tensor in a message.  order: its axes in memory, the slowest first.  size: bytes."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


PackedTensors = Sequence[tuple[TensorHeader, RawBytes]]


def send(connection: Connection[Any, Any], header: Mapping[str, Any], tensors: PackedTensors) -> int:
    """Send a message, wipe the memory that it was put together in, and return the number of its bytes.

    A message is the length of its header in four bytes, the header as JSON, and the bytes of the tensors.
    """
    # Not pickled: to unpickle a message would let either side run code in the other.
    header_bytes = json.dumps({**header, "tensors": [tensor_header for tensor_header, _ in tensors]}).encode()
    header_end = 4 + len(header_bytes)
    size = header_end + sum(tensor_header.size for tensor_header, _ in tensors)
    # One buffer for all, so that there is one place to wipe: a copy could stay readable in freed memory.
    message = bytearray(max(size, _MIN_MESSAGE_BYTES))
    message[:4], message[4:header_end] = len(header_bytes).to_bytes(4, "little"), header_bytes
    view, begin = np.frombuffer(message, np.uint8), header_end
    for tensor_header, content in tensors:
        view[begin : begin + tensor_header.size] = content
        begin += tensor_header.size
    try:
        connection.send_bytes(message)
    finally:
        # Also after an error.
        view[:] = 0
    return size


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], PackedTensors]:
    """Wait for a message of `send`, and return it; raise ProtectError if it has not the declared length.

    Raises EOFError once the other side has hung up.
    """
    message = connection.recv_bytes()
    header_end = 4 + int.from_bytes(message[:4], "little")
    header = json.loads(message[4:header_end])
    tensor_headers = [
        TensorHeader(fields[0], tuple(fields[1]), tuple(fields[2]), fields[3])
        for fields in header.pop("tensors")
    ]
    declared_size = header_end + sum(tensor_header.size for tensor_header in tensor_headers)
    # Short messages are padded.
    if max(declared_size, _MIN_MESSAGE_BYTES) != len(message):
        raise ProtectError(f"a message declares {declared_size:,} bytes and has {len(message):,}")
    tensors, begin = [], header_end
    content = np.frombuffer(message, np.uint8)
    for tensor_header in tensor_headers:
        end = begin + tensor_header.size
        tensors.append((tensor_header, content[begin:end]))
        begin = end
    return header, tensors


class ProcessLink:
    """The protected process, and the authenticated connection to it; one call at a time.

    The constructor starts the process, and raises ProtectError if it does not start.
    settings: sent to the process as it starts.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        folder = tempfile.TemporaryDirectory(prefix="amanda-")
        self._lock = RLock()
        # The key goes through standard input: arguments and environment are open to other programs.
        address, key = str(Path(folder.name) / "socket"), os.urandom(32)
        # Isolated: environment variables and the working folder must not choose what the process imports.
        command = [sys.executable, "-I", "-c", _CHILD_CODE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        process_settings = {**settings, "path": sys.path, "address": address, "key": key.hex()}
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(process_settings) + "\n")
        try:
            # The folder of the socket is needed for the connection alone.
            self._connection = self._connect(address, key)
        except BaseException:
            self._wait_or_kill(0.0)
            raise
        finally:
            folder.cleanup()

    def _connect(self, address: str, key: bytes) -> Connection[Any, Any]:
        """Return a connection once the process listens; raise ProtectError if it ends or takes too long."""
        deadline = monotonic() + _START_TIMEOUT
        while self._process.poll() is None and monotonic() < deadline:
            try:
                return Client(address, "AF_UNIX", key)
            except (FileNotFoundError, ConnectionRefusedError):
                sleep(0.02)
        raise ProtectError(
            f"the protected process did not start (exit status {self._process.poll()}); what it wrote to "
            "standard error says why"
        )

    @property
    def pid(self) -> int:
        """Return the id of the protected process."""
        return self._process.pid

    def call(
        self, header: Mapping[str, Any], tensors: PackedTensors = ()
    ) -> tuple[dict[str, Any], PackedTensors, int]:
        """Send a message; return header and tensors of the answer, and the number of bytes that crossed.

        Raises ProtectError with the error of the process, or if the process has died.
        """
        # Autograd's threads call too, and an answer belongs to the message before it.
        with self._lock:
            try:
                sent_bytes = send(self._connection, header, tensors)
                answer, results = receive(self._connection)
            except (EOFError, OSError) as error:
                raise ProtectError(
                    f"the protected process is gone (exit status {self._process.poll()}), and the parameters "
                    "that it held with it"
                ) from error
        # The process lives on: only this op has failed.
        if "error" in answer:
            raise ProtectError(answer["error"])
        return answer, results, sent_bytes + sum(tensor_header.size for tensor_header, _ in results)

    def close(self) -> None:
        """Hang up, by which the process ends; kill it if it has not ended after 10 seconds."""
        self._connection.close()
        self._wait_or_kill(10.0)

    def _wait_or_kill(self, timeout: float) -> None:
        """Wait for the end of the process, and kill it if it has not ended after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(eq=False)
class OpTraffic:
    """Tensors that cross at an op, or for an optimizer, in both directions together.

    headers: of the tensors of each call, as texts without repetitions.
    """

    phase: str
    type: str
    module: str
    source: str
    calls: int = 0
    bytes: int = 0
    headers: dict[str, None] = field(default_factory=dict)

    def add(self, sent: Sequence[TensorHeader], received: Sequence[TensorHeader], size: int) -> None:
        """Count a call and its bytes, and record the headers of its tensors."""
        self.calls += 1
        self.bytes += size
        self.headers[f"{' '.join(map(str, sent)) or '-'} > {' '.join(map(str, received)) or '-'}"] = None


def pack_tensor(tensor: Any) -> tuple[TensorHeader, RawBytes]:
    """Return the header of a tensor of PyTorch, and its bytes in memory order; a dense one is not copied."""
    import torch

    tensor = tensor.detach()
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis)))
    # In memory order a dense tensor is contiguous, also with channels last, and comes back with its strides.
    flat_bytes = tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorHeader(dtype, tuple(tensor.shape), order, flat_bytes.numel()), flat_bytes.numpy()


def unpack_tensor(header: TensorHeader, content: RawBytes) -> Any:
    """Return a new tensor of the element type, shape and order of dimensions in memory of a header."""
    import torch

    tensor = torch.empty_permuted(header.shape, header.order, dtype=getattr(torch, header.dtype))
    # A copy: the buffer of the message goes away.
    tensor.permute(header.order).view(-1).view(torch.uint8).copy_(torch.from_numpy(content.copy()))
    return tensor


def serve(settings: Mapping[str, Any]) -> None:
    """Answer the messages of the one program that knows the key, until it hangs up; ignore Ctrl-C.

    settings: threads of torch, address to listen at, and the key, as ProcessLink writes them.
    """
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program, which hangs up when it ends
    torch.set_num_threads(settings["threads"])  # as many threads as the program, for the same bits
    listener = Listener(settings["address"], "AF_UNIX", authkey=bytes.fromhex(settings["key"]))
    try:
        # One connection alone: nobody else gets in once the program has.
        connection: Any = listener.accept()
    except (AuthenticationError, EOFError, OSError):
        return
    finally:
        with suppress(FileNotFoundError):  # the program has removed the folder
            # No second program can connect.
            listener.close()
    with connection:
        _serve_messages(connection, Enclave())


def _serve_messages(connection: Connection[Any, Any], enclave: Enclave) -> None:
    """Call the enclave's method that each message names, and send its answer or error, until the end."""
    handlers: dict[str, Callable[..., tuple[Any, Any]]] = {
        "hold": enclave.hold, "forward": enclave.forward, "backward": enclave.backward,
        "accumulate": enclave.accumulate, "step": enclave.step, "read": enclave.read,
    }  # fmt: skip
    while True:
        try:
            header, tensors = receive(connection)
        except EOFError:
            return
        try:
            answer, outputs = handlers[header.pop("kind")](tensors, **header)
        except Exception as error:  # the program raises it as a ProtectError
            answer, outputs = {"error": f"{type(error).__name__}: {error}"}, ()
        send(connection, answer, outputs)


class _Execution(NamedTuple):
    """Tensors in the process, and paths of the parameters that an op read, for its backward pass."""

    arguments: Sequence[Any]
    outputs: Sequence[Any]
    parameter_paths: Sequence[str]


class Enclave:
    """The parameters by their paths, and the executions that may have a backward pass, by their numbers.

    Each method handles one kind of message, and returns the header and the tensors of its answer.
    The program numbers executions of ops, backward passes and optimizers.
    """

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._parameters: dict[str, Any] = {}
        self._executions: dict[int, _Execution] = {}
        self._pass_gradients: dict[int, dict[str, Any]] = {}  # by backward pass, then by parameter
        self._optimizers: dict[int, Any] = {}

    def hold(self, tensors: PackedTensors, path: str, trained: bool) -> tuple[Any, Any]:
        """Hold a parameter or buffer from now on."""
        self._parameters[path] = unpack_tensor(*tensors[0]).requires_grad_(trained)
        return {}, ()

    def read(self, tensors: PackedTensors, path: str) -> tuple[Any, Any]:
        """Return the values of a parameter or buffer."""
        return {}, [pack_tensor(self._parameters[path])]

    def forward(
        self, tensors: PackedTensors, op: str, inputs: Sequence[Any], execution: int, trained: Sequence[bool],
        has_backward: bool, random: bool, in_place: bool, dropped_executions: Sequence[int],
        failed_passes: Sequence[int],
    ) -> tuple[Any, Any]:  # fmt: skip
        """Run an op on encoded inputs, and answer with its outputs; with has_backward, keep what that needs.

        If an output is not a tensor, the answer names the type of the first such output, and has no tensors.
        It has none either for an op in place that gives back a parameter.
        random: the last tensor is the state of the generator to draw from, and so is that of the answer.
        trained: for each tensor, True if it needs a gradient.  dropped_executions, failed_passes: to forget.
        """
        torch = self._torch
        self._forget(dropped_executions, failed_passes)
        arguments = [unpack_tensor(*packed_tensor) for packed_tensor in tensors]
        if random:  # `ProtectedExecution.forward` sends the generator's state after the arguments
            torch.set_rng_state(arguments.pop())
        for argument, is_trained in zip(arguments, trained, strict=True):
            # Arguments are leaves here: their gradients are what the program is sent.
            argument.requires_grad_(is_trained)
        with nullcontext() if has_backward else torch.no_grad():
            values = [self._decode_input(encoded, arguments) for encoded in inputs]
            # An op in place on a tensor of the program, encoded as {"tensor": 0}.
            if in_place and "tensor" in inputs[0]:  # autograd forbids a write to a leaf that needs a gradient
                values[0] = values[0].clone()
            result = _call_by_schema(torch, op, values)
        is_sequence = isinstance(result, (tuple, list))  # a named tuple too, as of `max` with an axis
        outputs = list(result) if is_sequence else [result]
        non_tensors = [output for output in outputs if not isinstance(output, torch.Tensor)]
        if non_tensors:
            return {"non_tensor": type(non_tensors[0]).__name__}, ()
        if has_backward:
            self._executions[execution] = _Execution(arguments, outputs, _parameter_paths(inputs))
        # An op in place on a parameter gives it back: its values must not leave the process.
        returns_parameter = any(result is parameter for parameter in self._parameters.values())
        answer = {
            "is_sequence": is_sequence, "returns_parameter": returns_parameter,
            "trained": [output.requires_grad for output in outputs],
        }  # fmt: skip
        sent_tensors = [] if returns_parameter else outputs
        if random:
            sent_tensors = [*sent_tensors, torch.get_rng_state()]
        return answer, [pack_tensor(tensor) for tensor in sent_tensors]

    def _forget(self, dropped_executions: Sequence[int], failed_passes: Sequence[int]) -> None:
        """Free executions that the program can no longer differentiate, and gradients of failed passes."""
        for execution in dropped_executions:
            self._executions.pop(execution, None)
        for backward_pass in failed_passes:
            self._pass_gradients.pop(backward_pass, None)

    def _decode_input(self, encoded: Any, arguments: Sequence[Any]) -> Any:
        """Return the value that `MessageInputs._encode` has encoded.  arguments: the message's tensors."""
        if isinstance(encoded, list):
            return [self._decode_input(item, arguments) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        ((kind, value),) = encoded.items()  # such as {"parameter": path} or {"tensor": position}
        if kind == "slice":
            return slice(*value)
        if kind == "tuple":
            return tuple(self._decode_input(item, arguments) for item in value)
        if kind == "torch":
            return getattr(self._torch, value)
        return self._parameters[value] if kind == "parameter" else arguments[value]

    def backward(
        self, tensors: PackedTensors, execution: int, outputs: Sequence[int], backward_pass: int
    ) -> tuple[Any, Any]:
        """Return the gradients of an op's arguments; keep those of parameters until the pass ends.

        The answer also lists the parameters that have gradients in this pass so far.
        tensors: gradients of the op's outputs at the positions in `outputs`.
        """
        # By pass: a gradient becomes the parameter's only if the whole pass succeeds.
        pass_gradients = self._pass_gradients.setdefault(backward_pass, {})
        arguments, results, parameter_paths = self._executions[execution]
        trained_arguments = [argument for argument in arguments if argument.requires_grad]
        # A parameter may have been frozen since.
        trained_paths = [path for path in parameter_paths if self._parameters[path].requires_grad]
        trained_parameters = [self._parameters[path] for path in trained_paths]
        gradients = self._torch.autograd.grad(
            [results[i] for i in outputs], [*trained_arguments, *trained_parameters],
            [unpack_tensor(*packed_tensor) for packed_tensor in tensors],
            retain_graph=True, allow_unused=True,  # the program may differentiate again, until it drops this
        )  # fmt: skip
        argument_gradients = gradients[: len(trained_arguments)]
        parameter_gradients = gradients[len(trained_arguments) :]
        for path, gradient in zip(trained_paths, parameter_gradients, strict=True):
            if gradient is not None:
                earlier_gradient = pass_gradients.get(path)
                # Not in place: autograd may share the tensor between two inputs.
                pass_gradients[path] = gradient if earlier_gradient is None else earlier_gradient + gradient
        has_gradient = [gradient is not None for gradient in argument_gradients]
        packed_gradients = [pack_tensor(gradient) for gradient in argument_gradients if gradient is not None]
        return {"has_gradient": has_gradient, "parameters": list(pass_gradients)}, packed_gradients

    def accumulate(
        self, tensors: PackedTensors, backward_pass: int, replaces: Mapping[str, bool]
    ) -> tuple[Any, Any]:
        """Add the gradients of a backward pass that has ended to `grad` of the parameters, and forget them.

        replaces: by path, True for a gradient that replaces the earlier one, which the program has zeroed.
        """
        pass_gradients = self._pass_gradients.pop(backward_pass, {})
        for path, replaces_gradient in replaces.items():
            parameter, gradient = self._parameters[path], pass_gradients[path]
            # `zero_grad` of the program is not seen here, but the program's stand-in tells it.
            if replaces_gradient or parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad = parameter.grad + gradient
        return {}, ()

    def step(
        self, tensors: PackedTensors, optimizer: int, name: str, groups: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, Any]:
        """Step the optimizer of this number and name, which the first step constructs, on its parameters.

        groups: for each parameter group, `paths`, whether each has a gradient in the program, and `options`.
        Gradients that the program has not are dropped first.
        Raises ProtectError if a group has not as many parameters as at the first step.
        """
        if optimizer not in self._optimizers:
            new_groups = [
                {"params": [self._parameters[path] for path in group["paths"]], **_group_options(group)}
                for group in groups
            ]
            self._optimizers[optimizer] = getattr(self._torch.optim, name)(new_groups)
        protected_optimizer = self._optimizers[optimizer]
        for protected_group, group in zip(protected_optimizer.param_groups, groups, strict=True):
            if len(protected_group["params"]) != len(group["paths"]):
                raise ProtectError("an optimizer was given more protected parameters after its first step")
            # A schedule may have changed the learning rate since the last step.
            protected_group.update(_group_options(group))
            for path, has_gradient in zip(group["paths"], group["gradients"], strict=True):
                if not has_gradient:
                    # The optimizer passes over a parameter without a gradient.
                    self._parameters[path].grad = None
        protected_optimizer.step()
        return {}, ()


def _parameter_paths(inputs: Sequence[Any]) -> list[str]:
    """Return the paths of the parameters among encoded inputs of an op, each once, also those in lists."""
    paths: list[str] = []
    for encoded in inputs:
        kind, value = next(iter(encoded.items())) if isinstance(encoded, dict) else ("", encoded)
        if kind == "parameter":
            paths.append(value)
        elif isinstance(value, list):  # of a list, or of {"tuple": items}
            paths += _parameter_paths(value)
    return list(dict.fromkeys(paths))


def _group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer's group, with tuples again for the lists of JSON."""
    return {key: _list_to_tuple(value) for key, value in group["options"].items()}


def _call_by_schema(torch: Any, op: str, inputs: Sequence[Any]) -> Any:
    """Call a callable of torch on inputs in the order of its schema.

    Inputs after the positional ones are passed by keyword, where all overloads that have so many arguments
    take fewer positional ones.
    """
    path = op.removeprefix("torch.")
    function = attrgetter(path)(torch)
    # Functions such as `sum` take some arguments by keyword alone, as schemas of ATen's overloads tell.
    operator = getattr(torch.ops.aten, path.rpartition(".")[2].strip("_"), None)
    overloads = [] if operator is None else [getattr(operator, name) for name in operator.overloads()]
    argument_lists = [overload._schema.arguments for overload in overloads]
    fitting_lists = [
        arguments
        for arguments in argument_lists
        if len(arguments) >= len(inputs) and not any(argument.is_out for argument in arguments)
    ]
    positional_counts = [
        sum(not argument.kwarg_only for argument in arguments) for arguments in fitting_lists
    ]
    if not fitting_lists or max(positional_counts) >= len(inputs):
        return function(*inputs)
    # The first overload names the keywords.
    arguments, positional_count = fitting_lists[0], positional_counts[0]
    keyword_names = [argument.name for argument in arguments[positional_count:]]
    keywords = dict(zip(keyword_names, inputs[positional_count:], strict=False))
    return function(*inputs[:positional_count], **keywords)


def _list_to_tuple(value: Any) -> Any:
    """Return a tuple for a list, as JSON makes of the tuples in options; another value as it is."""
    return tuple(value) if isinstance(value, list) else value

"""The protected process: holds parameters, runs the ops that read them, and steps their optimizers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from operator import attrgetter
from typing import Any

from amanda.tools.partition._channel import ProtectError, Tensors, receive, send
from amanda.tools.partition._pytorch_bytes import packed, unpacked


def serve(settings: Mapping[str, Any]) -> None:
    """Answer the messages of the one program that knows the key, until it hangs up."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(settings["threads"])
    listener = Listener(settings["address"], "AF_UNIX", authkey=bytes.fromhex(settings["key"]))
    try:
        connection: Any = listener.accept()
    except (AuthenticationError, EOFError, OSError):
        return
    finally:
        with suppress(FileNotFoundError):  # the program has removed the folder
            listener.close()
    with connection:
        _answer(connection, Enclave())


def _answer(connection: Connection[Any, Any], enclave: Enclave) -> None:
    kinds: dict[str, Callable[..., tuple[Any, Any]]] = {
        "hold": enclave.hold, "forward": enclave.forward, "backward": enclave.backward,
        "accumulate": enclave.accumulate, "step": enclave.step, "read": enclave.read,
    }  # fmt: skip
    while True:
        try:
            header, tensors = receive(connection)
        except EOFError:
            return
        try:
            answer, made = kinds[header.pop("kind")](tensors, **header)
        except Exception as error:  # the program is told
            answer, made = {"error": f"{type(error).__name__}: {error}"}, ()
        send(connection, answer, made)


class Enclave:
    """The parameters by their paths, the executions under way by their numbers."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._held: dict[str, Any] = {}
        self._executions: dict[int, tuple[list[Any], list[Any], list[str]]] = {}
        self._arrived: dict[int, dict[str, Any]] = {}
        self._optimizers: dict[int, Any] = {}

    def hold(self, tensors: Tensors, path: str, trained: bool) -> tuple[Any, Any]:
        """Hold a parameter or buffer from now on."""
        self._held[path] = unpacked(*tensors[0]).requires_grad_(trained)
        return {}, ()

    def read(self, tensors: Tensors, path: str) -> tuple[Any, Any]:
        """Return the values of a parameter or buffer."""
        return {}, [packed(self._held[path])]

    def forward(
        self, tensors: Tensors, op: str, inputs: Sequence[Any], number: int, trained: Sequence[bool],
        records: bool, random: bool, in_place: bool, dropped: Sequence[int], failed: Sequence[int],
    ) -> tuple[Any, Any]:  # fmt: skip
        """Run an op; keep what its backward pass needs where `records` is true.

        dropped, failed: executions and backward passes to forget.
        """
        torch = self._torch
        for one in dropped:
            self._executions.pop(one, None)
        for one in failed:
            self._arrived.pop(one, None)
        given = [unpacked(*one) for one in tensors]
        if random:
            torch.set_rng_state(given.pop())
        for one, is_trained in zip(given, trained, strict=True):
            one.requires_grad_(is_trained)
        with nullcontext() if records else torch.no_grad():
            values = [self._value(one, given) for one in inputs]
            if in_place and "given" in inputs[0]:
                values[0] = values[0].clone()
            made = _call(torch, op, values)
        outputs = list(made) if isinstance(made, (tuple, list)) else [made]
        others = [type(one).__name__ for one in outputs if not isinstance(one, torch.Tensor)]
        if others:
            return {"other": others[0]}, ()
        if records:
            paths = [one["held"] for one in inputs if isinstance(one, dict) and "held" in one]
            self._executions[number] = given, outputs, list(dict.fromkeys(paths))
        state = [packed(torch.get_rng_state())] if random else []
        several = isinstance(made, (tuple, list))
        is_held = any(made is one for one in self._held.values())
        found = [] if is_held else [packed(one) for one in outputs]
        trained = [one.requires_grad for one in outputs]
        return {"several": several, "held": is_held, "trained": trained}, [*found, *state]

    def _value(self, told: Any, given: Sequence[Any]) -> Any:
        if isinstance(told, list):
            return [self._value(one, given) for one in told]
        if not isinstance(told, dict):
            return told
        ((kind, value),) = told.items()
        if kind == "slice":
            return slice(*value)
        if kind == "tuple":
            return tuple(self._value(one, given) for one in value)
        if kind == "torch":
            return getattr(self._torch, value)
        return self._held[value] if kind == "held" else given[value]

    def backward(
        self, tensors: Tensors, number: int, outputs: Sequence[int], backward_pass: int
    ) -> tuple[Any, Any]:
        """Return the gradients of what an op was given; keep those of parameters until the pass ends."""
        arrived = self._arrived.setdefault(backward_pass, {})
        given, made, paths = self._executions[number]
        wanted = [one for one in given if one.requires_grad]
        held = [path for path in paths if self._held[path].requires_grad]
        found = self._torch.autograd.grad(
            [made[i] for i in outputs], [*wanted, *(self._held[path] for path in held)],
            [unpacked(*one) for one in tensors], retain_graph=True, allow_unused=True,
        )  # fmt: skip
        for path, gradient in zip(held, found[len(wanted) :], strict=True):
            if gradient is not None:
                before = arrived.get(path)
                arrived[path] = gradient if before is None else before + gradient
        there = [one is not None for one in found[: len(wanted)]]
        told = [packed(one) for one in found[: len(wanted)] if one is not None]
        return {"there": there, "parameters": list(arrived)}, told

    def accumulate(self, tensors: Tensors, backward_pass: int, fresh: Mapping[str, bool]) -> tuple[Any, Any]:
        """Add the gradients of a pass that has ended; fresh: whether they take the place of older ones."""
        arrived = self._arrived.pop(backward_pass, {})
        for path, is_first in fresh.items():
            parameter, gradient = self._held[path], arrived[path]
            parameter.grad = gradient if is_first or parameter.grad is None else parameter.grad + gradient
        return {}, ()

    def step(
        self, tensors: Tensors, optimizer: int, name: str, groups: Sequence[Mapping[str, Any]]
    ) -> tuple[Any, Any]:
        """Step the optimizer of this number, which begins without state."""
        options = [{key: _tuples(value) for key, value in group["options"].items()} for group in groups]
        if optimizer not in self._optimizers:
            parameters = [[self._held[path] for path in group["paths"]] for group in groups]
            pairs = zip(parameters, options, strict=True)
            kind = getattr(self._torch.optim, name)
            self._optimizers[optimizer] = kind([{"params": one, **more} for one, more in pairs])
        stepped = self._optimizers[optimizer]
        for group, told, more in zip(stepped.param_groups, groups, options, strict=True):
            if len(group["params"]) != len(told["paths"]):
                raise ProtectError("an optimizer was given more protected parameters after its first step")
            group.update(more)
            for path, has_gradient in zip(told["paths"], told["gradients"], strict=True):
                if not has_gradient:
                    self._held[path].grad = None
        stepped.step()
        return {}, ()


def _call(torch: Any, op: str, inputs: Sequence[Any]) -> Any:
    """Call a callable of torch on inputs in the order of its schema."""
    owner, _, name = op.rpartition(".")
    function = getattr(torch if owner == "torch" else attrgetter(owner.removeprefix("torch."))(torch), name)
    packet = getattr(torch.ops.aten, name.strip("_"), None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    schemas = [
        one._schema.arguments for one in overloads if not any(arg.is_out for arg in one._schema.arguments)
    ]
    fitting = [arguments for arguments in schemas if len(arguments) >= len(inputs)]
    ahead = [sum(not one.kwarg_only for one in arguments) for arguments in fitting]
    if not fitting or max(ahead) >= len(inputs):
        return function(*inputs)
    positional = ahead[0]
    rest = zip(fitting[0][positional:], inputs[positional:], strict=False)
    return function(*inputs[:positional], **{one.name: value for one, value in rest})


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

"""Messages between a program and its protected process: plain values and raw bytes, nothing pickled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection
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


class ProtectError(AmandaError, RuntimeError):
    """An op cannot run in the protected process, or the program touched what lies there."""


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
    """Send a message, wipe the memory that it was put together in, and return its bytes."""
    header_bytes = json.dumps({**header, "tensors": [tensor_header for tensor_header, _ in tensors]}).encode()
    size = 4 + len(header_bytes) + sum(tensor_header.size for tensor_header, _ in tensors)
    # One buffer for all, so that there is one place to wipe: a copy could stay readable in freed memory.
    message = bytearray(max(size, _MIN_MESSAGE_BYTES))
    message[:4], message[4 : 4 + len(header_bytes)] = len(header_bytes).to_bytes(4, "little"), header_bytes
    view, offset = np.frombuffer(message, np.uint8), 4 + len(header_bytes)
    for tensor_header, content in tensors:
        view[offset : offset + tensor_header.size] = content
        offset += tensor_header.size
    try:
        connection.send_bytes(message)
    finally:
        view[:] = 0
    return size


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], PackedTensors]:
    """Return a message.  Raises ProtectError for one whose length is not what it declares."""
    message = connection.recv_bytes()
    end = 4 + int.from_bytes(message[:4], "little")
    header = json.loads(message[4:end])
    tensor_headers = [
        TensorHeader(fields[0], tuple(fields[1]), tuple(fields[2]), fields[3])
        for fields in header.pop("tensors")
    ]
    declared = end + sum(tensor_header.size for tensor_header in tensor_headers)
    if max(declared, _MIN_MESSAGE_BYTES) != len(message):
        raise ProtectError(f"a message declares {declared:,} bytes and has {len(message):,}")
    tensors, content = [], np.frombuffer(message, np.uint8)
    for tensor_header in tensor_headers:
        tensors.append((tensor_header, content[end : end + tensor_header.size]))
        end += tensor_header.size
    return header, tensors


class ProcessLink:
    """The protected process, and the authenticated connection to it; one call at a time.

    settings: sent to the process as it starts.  Raises ProtectError if the process does not start.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        folder = tempfile.TemporaryDirectory(prefix="amanda-")
        self._lock = RLock()
        # The key goes through standard input: arguments and environment are open to other programs.
        address, key = str(Path(folder.name) / "socket"), os.urandom(32)
        command = [sys.executable, "-I", "-c", _CHILD_CODE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        process_settings = {**settings, "path": sys.path, "address": address, "key": key.hex()}
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(process_settings) + "\n")
        try:
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
        """Send a message; return the header and the tensors of the answer, and the bytes that crossed.

        Raises ProtectError with the error of the process, or if the process has died.
        """
        with self._lock:
            try:
                sent = send(self._connection, header, tensors)
                answer, results = receive(self._connection)
            except (EOFError, OSError) as error:
                raise ProtectError(
                    f"the protected process is gone (exit status {self._process.poll()}), and the parameters "
                    "that it held with it"
                ) from error
        if "error" in answer:
            raise ProtectError(answer["error"])
        return answer, results, sent + sum(tensor_header.size for tensor_header, _ in results)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._wait_or_kill(10.0)

    def _wait_or_kill(self, timeout: float) -> None:
        """Wait for the end of the process, and kill it after so many seconds."""
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
    flat = tensor.permute(order).contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorHeader(dtype, tuple(tensor.shape), order, flat.numel()), flat.numpy()


def unpack_tensor(header: TensorHeader, content: RawBytes) -> Any:
    """Return a new tensor of PyTorch with this header and these bytes."""
    import torch

    tensor = torch.empty_permuted(header.shape, header.order, dtype=getattr(torch, header.dtype))
    tensor.permute(header.order).view(-1).view(torch.uint8).copy_(torch.from_numpy(content.copy()))
    return tensor

"""Messages between a program and its protected process: plain values and raw bytes, nothing pickled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client, Connection
from pathlib import Path
from threading import RLock
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from amanda.errors import AmandaError
from amanda.tools.libraries import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bytes: TypeAlias = "NDArray[np.uint8]"

_LEAST = 16_385
"""Bytes of a message that `multiprocessing.connection` writes without a copy that nobody could wipe."""
_PATIENCE = 120.0
_CHILD = (
    "import json, sys; told = json.loads(sys.stdin.readline()); sys.path[:] = told['path']; "
    "from amanda.tools.partition._enclave import serve; serve(told)"
)


class ProtectError(AmandaError, RuntimeError):
    """An op cannot run in the protected process, or the program touched what lies there."""


class Form(NamedTuple):
    """A tensor as it is declared ahead of its bytes.  order: of the axes in memory, the slowest first."""

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Tensors = Sequence[tuple[Form, Bytes]]


def send(connection: Connection[Any, Any], header: Mapping[str, Any], tensors: Tensors) -> int:
    """Send a message, wipe the memory that it was put together in, and return its bytes."""
    told = json.dumps({**header, "tensors": [form for form, _ in tensors]}).encode()
    size = 4 + len(told) + sum(form.size for form, _ in tensors)
    message = bytearray(max(size, _LEAST))
    message[:4], message[4 : 4 + len(told)] = len(told).to_bytes(4, "little"), told
    room, at = np.frombuffer(message, np.uint8), 4 + len(told)
    for form, content in tensors:
        room[at : at + form.size] = content
        at += form.size
    try:
        connection.send_bytes(message)
    finally:
        room[:] = 0
    return size


def receive(connection: Connection[Any, Any]) -> tuple[dict[str, Any], Tensors]:
    """Return a message.  Raises ProtectError for one whose length is not what it declares."""
    message = connection.recv_bytes()
    end = 4 + int.from_bytes(message[:4], "little")
    header = json.loads(message[4:end])
    forms = [Form(one[0], tuple(one[1]), tuple(one[2]), one[3]) for one in header.pop("tensors")]
    declared = end + sum(form.size for form in forms)
    if max(declared, _LEAST) != len(message):
        raise ProtectError(f"a message declares {declared:,} bytes and has {len(message):,}")
    tensors, content = [], np.frombuffer(message, np.uint8)
    for form in forms:
        tensors.append((form, content[end : end + form.size]))
        end += form.size
    return header, tensors


class Link:
    """The protected process, and the authenticated connection to it; one call at a time.

    settings: told to the process as it starts.  Raises ProtectError where it does not start.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        folder = tempfile.TemporaryDirectory(prefix="amanda-")
        self._lock = RLock()
        address, key = str(Path(folder.name) / "socket"), os.urandom(32)
        command = [sys.executable, "-I", "-c", _CHILD]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        told = {**settings, "path": sys.path, "address": address, "key": key.hex()}
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(told) + "\n")
        try:
            self._connection = self._connected(address, key)
        except BaseException:
            self._end(0.0)
            raise
        finally:
            folder.cleanup()

    def _connected(self, address: str, key: bytes) -> Connection[Any, Any]:
        until = monotonic() + _PATIENCE
        while self._process.poll() is None and monotonic() < until:
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

    def call(self, header: Mapping[str, Any], tensors: Tensors = ()) -> tuple[dict[str, Any], Tensors, int]:
        """Send a message; return the answer, its tensors, and the bytes of both.

        Raises ProtectError with what the process says went wrong, or where it is gone.
        """
        with self._lock:
            try:
                sent = send(self._connection, header, tensors)
                answer, made = receive(self._connection)
            except (EOFError, OSError) as error:
                raise ProtectError(
                    f"the protected process is gone (exit status {self._process.poll()}), and the parameters "
                    "that it held with it"
                ) from error
        if "error" in answer:
            raise ProtectError(answer["error"])
        return answer, made, sent + sum(form.size for form, _ in made)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._end(10.0)

    def _end(self, patience: float) -> None:
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

"""Comparison of gradients and parameters over data-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from amanda.tools.sentinel import _pytorch
from amanda.tools.sentinel._alarms import Alarm

_KINDS = ("gradient", "parameter")


class Ranks:
    """Compares hashes of what every rank of `torch.distributed` holds alike, as an optimizer's step begins.

    The hashes travel through a process group of their own, and nobody waits for them before the next
    comparison.  The ranks agree on its step: the number of steps that each wants in between travels along.

    remarks: on what could not be compared.  comparisons: that were made.
    """

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self.comparisons = 0
        self.remarks: dict[str, None] = {}
        self._name_of = name_of
        self._next = 0
        self._between = 1
        self._group: Any = None
        self._pending: tuple[Any, list[Any], list[str], int] | None = None

    def is_due(self, step: int) -> bool:
        """Return True where there are ranks, and this step is one at which they compare."""
        import torch.distributed as distributed

        if step < self._next or not (distributed.is_available() and distributed.is_initialized()):
            return False
        return distributed.get_world_size() > 1

    def send(self, step: int, parameters: Sequence[Any], interval: Callable[[], int]) -> list[Alarm]:
        """Send hashes, after those before have arrived; return the alarms of those before.

        interval: gives the number of steps that this rank wants until the next time.
        """
        import torch
        import torch.distributed as distributed

        alarms = self.received(wait=True)
        plain = [one for one in parameters if _pytorch.is_plain(one)]
        if left := len(parameters) - len(plain):
            self.remarks[
                f"{left} parameters are sharded, or no plain tensors: ranks do not compare them."
            ] = None
        if self._group is None and not self._begin(len(plain)):
            self._next = 1 << 62
            return alarms
        values, names = [], []
        for one in plain:
            for kind, value in zip(_KINDS, (one.grad, one), strict=True):
                is_there = value is not None and _pytorch.is_plain(value)
                values.append(_pytorch.digest(value) if is_there else torch.zeros((), dtype=torch.int64))
                names.append(f"{kind} {self._name_of(one)}")
        device = self._device()
        told = torch.tensor([interval()], device=device)
        hashes = torch.cat([told, torch.stack([one.to(device) for one in values])])
        received = [torch.empty_like(hashes) for _ in range(distributed.get_world_size())]
        work = distributed.all_gather(received, hashes, group=self._group, async_op=True)
        self._pending = work, received, names, step
        self._next = step + self._between
        return alarms

    def _begin(self, number: int) -> bool:
        """Make the process group; return True if all ranks have the same number of parameters, and any."""
        import torch
        import torch.distributed as distributed

        self._group = distributed.new_group()
        mine = torch.tensor([number], device=self._device())
        numbers = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(numbers, mine, group=self._group)
        if len({int(one) for one in numbers}) > 1:
            self.remarks["The ranks hold different numbers of parameters, and were not compared."] = None
            return False
        return number > 0

    def _device(self) -> str:
        import torch.distributed as distributed

        return "cuda" if distributed.get_backend(self._group) == "nccl" else "cpu"

    def received(self, wait: bool = False) -> list[Alarm]:
        """Return an alarm for each rank that differs, if hashes have arrived; wait: until they have."""
        if self._pending is None:
            return []
        import torch

        work, hashes, names, step = self._pending
        if not wait and not work.is_completed():
            return []
        work.wait()
        self._pending = None
        self.comparisons += 1
        rows = torch.stack(hashes).tolist()
        self._between = max(row[0] for row in rows)
        return compared(step, [row[1:] for row in rows], names)


def compared(step: int, hashes: Sequence[Sequence[int]], names: Sequence[str]) -> list[Alarm]:
    """Return an alarm for each rank that differs from most; hashes: a row for each rank."""
    wrong: dict[int | None, list[str]] = {}
    for column, name in zip(zip(*hashes, strict=True), names, strict=True):
        (usual, most), *rest = Counter(column).most_common()
        if not rest:
            continue
        odd: Sequence[int | None] = [rank for rank, one in enumerate(column) if one != usual]
        if most <= len(column) - most:  # no majority
            odd = [None]
        for rank in odd:
            wrong.setdefault(rank, []).append(name)
    alarms = []
    for rank, differing in wrong.items():
        who = f"rank {rank} differs from the other ranks" if rank is not None else "the ranks differ"
        module = differing[0].split(" ", 1)[1]
        detail = f"{who} in {len(differing)} of {len(names)} gradients and parameters, first {differing[0]}"
        alarms.append(Alarm("ranks", step, "optimizer", "", module, "", detail))
    return alarms

"""Comparison of gradients and parameters over data-parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from amanda.tools.sentinel import _reruns
from amanda.tools.sentinel._result import Alarm

_KINDS = ("gradient", "parameter")


class Ranks:
    """Comparison of hashes of gradients and parameters over ranks, before an optimizer's step.

    The hashes travel through a separate process group; no rank waits for them before the next comparison.
    Each rank sends its interval, in steps, along with the hashes; the longest decides the next comparison.

    remarks: sentences on parameters that were not compared.  comparisons: number of comparisons.
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
        """Return True for a step at which the ranks compare; False without ranks."""
        import torch.distributed as distributed

        if step < self._next or not (distributed.is_available() and distributed.is_initialized()):
            return False
        return distributed.get_world_size() > 1

    def send(self, step: int, parameters: Sequence[Any], interval: Callable[[], int]) -> list[Alarm]:
        """Receive the hashes sent before, then send new ones; return alarms for the received hashes.

        interval: return the number of steps that this rank wants until the next comparison.
        """
        import torch
        import torch.distributed as distributed

        alarms = self.received_alarms(wait=True)
        plain = [parameter for parameter in parameters if _reruns.is_plain(parameter)]
        if skipped := len(parameters) - len(plain):
            self.remarks[
                f"{skipped} parameters are sharded, or no plain tensors: ranks do not compare them."
            ] = None
        if self._group is None and not self._begin_group(len(plain)):
            self._next = 1 << 62
            return alarms
        values, names = [], []
        for parameter in plain:
            for kind, value in zip(_KINDS, (parameter.grad, parameter), strict=True):
                is_there = value is not None and _reruns.is_plain(value)
                values.append(_reruns.digest(value) if is_there else torch.zeros((), dtype=torch.int64))
                names.append(f"{kind} {self._name_of(parameter)}")
        device = self._group_device()
        wanted_interval = torch.tensor([interval()], device=device)
        hashes = torch.cat([wanted_interval, torch.stack([value.to(device) for value in values])])
        received = [torch.empty_like(hashes) for _ in range(distributed.get_world_size())]
        work = distributed.all_gather(received, hashes, group=self._group, async_op=True)
        self._pending = work, received, names, step
        self._next = step + self._between
        return alarms

    def _begin_group(self, number: int) -> bool:
        """Make the process group; return True if all ranks have the same number of parameters, above 0."""
        import torch
        import torch.distributed as distributed

        self._group = distributed.new_group()
        mine = torch.tensor([number], device=self._group_device())
        numbers = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
        distributed.all_gather(numbers, mine, group=self._group)
        if len({int(number_of_rank) for number_of_rank in numbers}) > 1:
            self.remarks["The ranks hold different numbers of parameters, and were not compared."] = None
            return False
        return number > 0

    def _group_device(self) -> str:
        import torch.distributed as distributed

        return "cuda" if distributed.get_backend(self._group) == "nccl" else "cpu"

    def received_alarms(self, wait: bool = False) -> list[Alarm]:
        """Return an alarm for each rank that differs, if hashes have arrived.  wait: wait for the hashes."""
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
        return compare_hashes(step, [row[1:] for row in rows], names)


def compare_hashes(step: int, hashes: Sequence[Sequence[int]], names: Sequence[str]) -> list[Alarm]:
    """Return an alarm for each rank that differs from the majority.  hashes: a row for each rank."""
    differing_names: dict[int | None, list[str]] = {}
    for column, name in zip(zip(*hashes, strict=True), names, strict=True):
        (common, votes), *rarer = Counter(column).most_common()
        if not rarer:
            continue
        odd: Sequence[int | None] = [rank for rank, rank_hash in enumerate(column) if rank_hash != common]
        if votes <= len(column) - votes:  # no majority
            odd = [None]
        for rank in odd:
            differing_names.setdefault(rank, []).append(name)
    alarms = []
    for rank, differing in differing_names.items():
        who = f"rank {rank} differs from the other ranks" if rank is not None else "the ranks differ"
        module = differing[0].split(" ", 1)[1]
        detail = f"{who} in {len(differing)} of {len(names)} gradients and parameters, first {differing[0]}"
        alarms.append(Alarm("ranks", step, "optimizer", "", module, "", detail))
    return alarms

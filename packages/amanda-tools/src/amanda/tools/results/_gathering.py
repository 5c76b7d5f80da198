"""Results of the ranks of `torch.distributed`, over its process groups."""

from __future__ import annotations

import json
from typing import Any

import amanda
from amanda.errors import AmandaError
from amanda.options import NonNegativeInt, checked
from amanda.tools.results._files import to_json
from amanda.tools.results._merging import by_rank, merge
from amanda.tools.results._result import Result
from amanda.tools.results._table import restored


@checked
def gather(
    result: Result, group: Any = None, *, to: NonNegativeInt | None = None, per_rank: bool = False
) -> Any:
    """One result of all ranks of a process group; every rank of it calls this, with its own.

    group: of `torch.distributed`; the default group if None.  to: the rank, of all processes, that gets it;
    the others get None.  Every rank gets it if `to` is None.  per_rank: keep the rows of each rank, under a
    column `rank`.

    The result is of the class of those that were given, if these can be merged, as `merge` says, else a
    `Table`.  Raises AmandaError where `torch.distributed` is not initialised, where ranks give results of
    several tools, and where one gives none.

    merged = gather(flops.result, to=0)
    """
    import torch.distributed as distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        raise AmandaError(
            "gather puts together what the ranks of torch.distributed have, and there is no process group: "
            "torch.distributed.init_process_group(...) comes first"
        )
    with amanda.disabled():
        own = to_json(result.to_dict()) if isinstance(result, Result) else type(result).__name__
        found: list[Any] = [None] * distributed.get_world_size(group)
        if to is None:
            distributed.all_gather_object(found, own, group)
        else:
            mine = distributed.get_rank() == to
            distributed.gather_object(own, found if mine else None, dst=to, group=group)
            if not mine:
                return None
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    return _together(result, {f"rank{rank}": told for rank, told in zip(ranks, found, strict=True)}, per_rank)


def _together(result: Result, told: dict[str, str], per_rank: bool) -> Result:
    without = [f"{name} gave {text}" for name, text in told.items() if not text.startswith("{")]
    if without:
        raise AmandaError(f"gather takes the result of a tool on every rank; {', '.join(without)}")
    results = {name: restored(json.loads(text), result) for name, text in told.items()}
    return by_rank(results) if per_rank else merge(results)

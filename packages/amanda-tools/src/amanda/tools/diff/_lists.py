"""Ops over lists of tensors, as optimizers run them, as the ops over single tensors that they stand for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from amanda.tools.dump import Entry, Op

_FOREACH, _FUSED = "_foreach_", "_fused_"
"""PyTorch's private prefixes: of an op on each tensor of a list, and of a whole optimizer in one op."""
_OUTPUT = "output"


def spread(ops: Sequence[Op], entries: Sequence[Entry]) -> tuple[list[Op], list[Entry]]:
    """Replace each op over lists by ops for single tensors, which come after all others.

    An op on each tensor of a list becomes that op, once for each tensor.  A fused optimizer becomes an op for
    each tensor that it writes.
    """
    over_lists = {i for i, op in enumerate(ops) if op.type.startswith((_FOREACH, _FUSED))}
    if not over_lists:
        return list(ops), list(entries)
    all_ops, all_entries, waiting = list(ops), [], defaultdict(list)
    for entry in entries:
        if entry.op in over_lists:
            waiting[entry.op].append(entry)
        else:
            all_entries.append(entry)
    for index, list_entries in waiting.items():
        lists: dict[tuple[int, str, int], list[Entry]] = defaultdict(list)
        for entry in list_entries:
            lists[entry.execution, entry.role, entry.position].append(entry)
        singles: dict[tuple[int, int], int] = {}
        for (execution, role, position), tensors in lists.items():
            if role != _OUTPUT:
                continue
            for number, tensor in enumerate(tensors):
                single = singles.setdefault((position, number), len(all_ops))
                if single == len(all_ops):
                    all_ops.append(replace(ops[index], type=ops[index].type.removeprefix(_FOREACH)))
                all_entries.append(replace(tensor, op=single, position=0))
                all_entries += [
                    replace(read[number if len(read) == len(tensors) else 0], op=single)
                    for (other, kind, _), read in lists.items()
                    if other == execution and kind in ("input", "weight") and len(read) in (1, len(tensors))
                ]
    all_entries.sort(key=lambda entry: entry.order)
    return all_ops, all_entries

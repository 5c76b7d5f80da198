"""Print in how many of twenty planted differences diff, DebugMode and TorchLens name the changed module.

    python benchmarks/planted.py [MODEL ...]

The cases are those of packages/amanda-tools/tests/test_diff_models.py, in eager mode: two changes of one op
in each of ten models, and one harmless pair of each (channels last, or attention in plain ops).  The logs of
DebugMode, with hashes, and the tensors of TorchLens are compared line by line, for equality: neither has a
tolerance of its own.  TorchLens leaves torch changed, so it comes last.  Pairs of programs that differ in
structure, where the others have no lines to compare, follow with `diff` alone.
"""

import copy
import random
import sys
import warnings
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from _models import let_torchvision_load
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "packages/amanda-tools/tests"), str(ROOT / "packages/amanda-tools/tests/support")]
let_torchvision_load()
import test_diff_models as cases  # noqa: E402
import test_diff_planted as structure  # noqa: E402

from amanda.tools.diff import diff  # noqa: E402

Found = str | None
NOTHING = "nothing"


def by_diff(model: nn.Module, other: nn.Module, given: Tensor) -> Found:
    """Return the module of the first op that diff names."""
    first = cases.compared(model, other, given).first
    return None if first is None else first.module


def by_debug_mode(model: nn.Module, other: nn.Module, given: Tensor) -> Found:
    """Return the module of the first line that differs in two logs of DebugMode with hashes of outputs."""
    from torch.utils._debug_mode import DebugMode

    logs = []
    for one in (model, other):
        with torch.no_grad(), DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
            one(given)
        logs.append(mode.debug_string().splitlines())
    inside: list[tuple[int, str]] = []
    for line, twin in zip_longest(*logs, fillvalue=""):
        depth = len(line) - len(line.lstrip())
        inside = [entry for entry in inside if entry[0] < depth]
        if line != twin:
            return inside[-1][1].partition(".")[2] if inside else ""
        if line.lstrip().startswith("[nn.Mod] "):
            inside.append((depth, line.split()[1]))
    return None


def by_torchlens(model: nn.Module, other: nn.Module, given: Tensor) -> Found:
    """Return the module of the first op whose tensor differs in two traces of TorchLens."""
    import torchlens

    traces = []
    for one in (model, other):
        with torch.no_grad():
            trace: Any = torchlens.trace(one, given)
        traces.append([(op.func_name, op.module, op.out) for op in trace.layer_list if op.is_compute_op])
    for pair in zip_longest(*traces):
        if None in pair or pair[0][0] != pair[1][0] or not torch.equal(pair[0][2], pair[1][2]):
            module = next(one for one in pair if one is not None)[1]
            return str(module or "").rpartition(":")[0]
    return None


TOOLS: dict[str, Callable[[nn.Module, nn.Module, Tensor], Found]] = {
    "`diff`, control in float64": by_diff, "DebugMode with hashes": by_debug_mode, "TorchLens": by_torchlens,
}  # fmt: skip


def main(names: list[str]) -> None:
    """Print a table, with a line on stderr for each case that a tool gets wrong."""
    import transformers

    warnings.simplefilter("ignore")
    print("| | changed module named | said to differ though harmless |\n|---|---|---|")
    for tool, find in TOOLS.items():
        planted = harmless = named = false = 0
        for seed, name in enumerate([*cases.MODELS, *cases.MODELS]):
            if names and name not in names:
                continue
            model, given = cases.made(name, transformers)
            other, chance = copy.deepcopy(model), random.Random(seed)
            chosen = chance.choice(cases.leaves(other))
            cases.change(other.get_submodule(chosen), random.Random(seed))
            found = find(model, other, given)
            planted, named = planted + 1, named + (found == chosen)
            if found != chosen:
                print(f"{tool}: {name}, {chosen}: {found or NOTHING}", file=sys.stderr, flush=True)
            if seed < len(cases.MODELS):
                other = copy.deepcopy(model)
                if given.is_floating_point():
                    other.to(memory_format=torch.channels_last)
                else:
                    other.set_attn_implementation("eager")
                found = find(model, other, given)
                harmless, false = harmless + 1, false + (found is not None)
        print(f"| {tool} | {named} of {planted} | {false} of {harmless} |", flush=True)


def pairs() -> None:
    """Print in how many pairs of programs diff names the cause, or errs where nothing is wrong."""
    counts: dict[bool, list[bool]] = {True: [], False: []}
    for name, make in structure.planted.PAIRS.items():
        torch.manual_seed(1)
        wanted = make()
        result = diff(wanted.a, wanted.b, **wanted.options)
        counts[wanted.is_equal].append(structure.is_named(result.first, wanted))
        if not counts[wanted.is_equal][-1]:
            print(f"{name}: {result.sentence}", file=sys.stderr, flush=True)
    equal, different = counts[True], counts[False]
    print(f"\nPairs of programs: {sum(different)} of {len(different)} causes named with their line,")
    print(f"{len(equal) - sum(equal)} of {len(equal)} said to differ though nothing is wrong")


if __name__ == "__main__":
    main(sys.argv[1:])
    if not sys.argv[1:]:
        pairs()

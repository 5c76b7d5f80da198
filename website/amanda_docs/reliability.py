"""Attacks on each framework: a session writes docs/reliability.json, and docs/reliability.md shows it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from amanda_docs.pages import DOCS

DATA, PAGE = DOCS / "reliability.json", DOCS / "reliability.md"
Row = dict[str, Any]
HEAD = """# Reliability

```bash
nox -s reliability               # every attack on every framework, in under 20 minutes
nox -s reliability -- signals    # one attack
```

The session attacks each framework while tools are on, and writes this page. The program under attack is a
training step of two matrix products with ReLU between them; ONNX Runtime only infers. Weights and inputs
are small integers, so each output and each gradient has one right value to the bit, in eager and in
compiled code. In most attacks a tool doubles the output of ReLU: then a step in a scope has another right
value than a step outside, and a tool that is lost, or leaks into another thread, gives a wrong one.

MindSpore is left out of three attacks: with and without tools it ends a process whose threads take
gradients at once, and under a tool with backward routines a handler that raises during its backward pass
can end the process. TensorFlow ends the process, also without tools, where a handler raises in a function
that its native code calls: there handlers raise while functions of Amanda are under way.

*Wrong* counts wrong values, exceptions that are not those that were raised, files that cannot be read, and
options that are accepted, or not refused by an error that names them.
*Left behind* lists what is not as it was without a scope: changed attributes of the framework, open scopes,
memory that grows. The figures were measured on two cores that other work shared, so latencies tell little
beyond their order; an attack lasts seconds, which is why slow frameworks have few attempts.
"""
ATTACKS = {
    "threads": (
        "Threads",
        "16 threads run steps in scopes and outside, each with a tool of its own and with one that all "
        "share.",
    ),
    "server": (
        "Server",
        "8 threads answer requests; another thread opens and closes scopes of `profile` and `flops` "
        "meanwhile. Threads that started before a scope are not part of it, but share the processor and "
        "Python's lock with it.",
    ),
    "exceptions": (
        "Exceptions",
        "A tool raises at ReLU: in the analysis, before, after and in place of the op, forward and "
        "backward. The program has to get that exception, and afterwards the framework is as it was and "
        "steps are right.",
    ),
    "signals": (
        "Signals",
        "A timer's handler raises KeyboardInterrupt at a random instant while a scope opens, runs a "
        "step, and closes. A scope is stopped if the exception came before the first line of its "
        "`__exit__`, which no context manager written in Python survives.",
    ),
    "soak": (
        "Soak",
        "Steps in one scope, then scopes of one step each. Left behind is what grows by half an object a "
        "step or more, or by three megabytes. Dynamo and JAX remember each compilation, so there the scopes "
        "have one tool; with new tools each scope adds some 80 kB in compiled PyTorch, and some 90 kB in "
        "JAX, until `torch._dynamo.reset()` or `jax.clear_caches()`.",
    ),
    "kills": (
        "Kills",
        "Processes that write a dump and a result after each step are killed (SIGKILL) at a random "
        "instant. The result and every tensor of the dump have to be readable, and another dump replaces "
        "it.",
    ),
    "full_disk": (
        "Full disk",
        "No file can grow for a while: during a dump, during a save over another result, and during "
        "`amanda run --every 0.2`, whose process is killed at the end. Steps go on and are right, the "
        "dump says that it is incomplete, the earlier result stays whole, and later saves have what was "
        "counted meanwhile.",
    ),
    "options": (
        "Wrong options",
        "Values of wrong classes (nan, -1, a text, a function, an array, ...) for each option of each tool, "
        "selection, schedule and public function, and texts for those that the command line reads. Each "
        "has to be refused by one `AmandaError` that names option and value, within ten seconds, or its "
        "annotation allows it.",
    ),
    "damage": (
        "Damaged files",
        "Bits flip, bytes are overwritten or missing, in each kind of file that tools write. Each file "
        "is read, or refused by one `AmandaError` that names it.",
    ),
}
"""The title and a description of each attack."""


def record(rows: Iterable[Row], data: Path = DATA, page_file: Path = PAGE) -> None:
    """Add rows in place of earlier ones of the same attack and framework; write the page."""
    earlier = json.loads(data.read_text()) if data.exists() else []
    measured = {(row["attack"], row["framework"]): row for row in earlier}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    date = datetime.now(timezone.utc).date().isoformat()
    for row in rows:
        measured[row["attack"], row["framework"]] = {**row, "date": date, "machine": machine}
    order = list(ATTACKS)
    kept = sorted(measured.values(), key=lambda row: (order.index(row["attack"]), row["framework"]))
    data.write_text(json.dumps(kept, indent=1) + "\n")
    page_file.write_text(page(kept))


def page(rows: Sequence[Row]) -> str:
    """Return the page that rows make."""
    parts = [HEAD]
    for attack, (title, description) in ATTACKS.items():
        of_attack = [row for row in rows if row["attack"] == attack]
        if of_attack:
            parts.append(f"\n## {title}\n\n{description}\n\n" + "\n".join(_table(of_attack)) + "\n")
    return "".join(parts)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| framework | attempts | wrong | left behind | | when, where |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        cells = [
            f"{row['framework']} ({row['version']})",
            f"{row['count']:,} {row['unit']}",
            str(row["wrong"]),
        ]
        cells += ["; ".join(row["left"]) or "nothing", row["note"], f"{row['date']}, {row['machine']}"]
        yield f"| {' | '.join(cells)} |"

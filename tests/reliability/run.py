"""Attacks every installed framework in every way: `python tests/reliability/run.py [ATTACK ...]`.

Each framework is attacked in a process of its own, which is started anew after an attack that ended it.
Prints a row for each attack and framework; with --record, docs/reliability.md has it too. Exits with 1 if a
value was wrong or something was left behind.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import children
from frameworks import FRAMEWORKS, Framework, X

ATTACKS = ("threads", "server", "exceptions", "signals", "soak", "kills", "full_disk", "damage", "options")
OF_TOOLS = {"damage": "PyTorch", "options": "PyTorch"}
"""Attacks on tools alone, which are the same for every framework: the one that they are tried with."""
START, CHILD = 180.0, 60.0
"""Seconds that a framework has to start, and that an attack has beside its own."""
Row = dict[str, Any]


def main() -> int:
    """Run attacks in child processes; return 1 if some found something."""
    parser = argparse.ArgumentParser(description="Attack frameworks under tools.")
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}; all if none")
    parser.add_argument(
        "--framework", action="append", choices=FRAMEWORKS, help="all that are installed if none"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="that an attack goes on for")
    parser.add_argument("--minutes", type=float, default=13.0, help="that all attacks have together")
    parser.add_argument("--record", action="store_true", help="write the rows into docs/reliability.md")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.attacks) - set(ATTACKS):
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    chosen = options.attacks or ATTACKS
    if options.rows is not None:
        _attack(FRAMEWORKS[options.framework[0]], chosen, options.seconds, options.rows)
        return 0
    failed, end = False, time.monotonic() + 60 * options.minutes
    for name in options.framework or FRAMEWORKS:
        if not FRAMEWORKS[name].installed():
            continue
        attacks = [
            attack
            for attack in chosen
            if OF_TOOLS.get(attack, name) == name and attack not in FRAMEWORKS[name].without
        ]
        rows = attacked(name, attacks, options.seconds, end)
        failed |= any(row["wrong"] or row["left"] for row in rows)
        if options.record:
            from amanda_docs import reliability

            reliability.record(rows)
    return int(failed)


def attacked(name: str, attacks: Sequence[str], seconds: float, end: float) -> list[Row]:
    """Return the rows of a framework; an attack that ends the process has a row that tells how.

    end: the moment, of the monotonic clock, at which the attack under way is ended and others are left out.
    """
    rows: list[Row] = []
    with TemporaryDirectory() as folder:
        while len(rows) < len(attacks):
            file, rest = Path(folder, str(len(rows))), attacks[len(rows) :]
            options = ("--framework", name, "--seconds", str(seconds), "--rows", str(file))
            limit = min(START + len(rest) * (CHILD + 3 * seconds), end - time.monotonic())
            ended = "not tried: the time of all attacks was over"
            if limit > 0:
                ended = _run([*rest, *options], limit)
            lines = file.read_text().splitlines() if file.exists() else []
            rows += map(json.loads, lines)
            if len(lines) < len(rest):
                none = {"count": 0, "unit": "attempts", "wrong": 1, "left": []}
                rows.append(_row(FRAMEWORKS[name], rest[len(lines)], **none, note=ended))
                _print(rows[-1])
    return rows


def _run(arguments: Sequence[str], limit: float) -> str:
    """Run attacks in a child process; say how it ended."""
    try:
        done = children.run([sys.executable, __file__, *arguments], limit=limit, stdout=None, stderr=None)
    except AssertionError:
        return f"the process ran longer than {limit:.0f} s"
    return f"the process ended with {done.returncode}"


def _attack(framework: Framework, attacks: Sequence[str], seconds: float, file: Path) -> None:
    """Run attacks in this process; write a line for each into a file."""
    step = framework.start()
    step(X[0])  # the first call compiles
    for name in attacks:
        start = time.monotonic()
        outcome = importlib.import_module(name).attack(framework, step, seconds)
        took = round(time.monotonic() - start, 1)
        row = _row(framework, name, **outcome._asdict(), seconds=took)
        _print(row)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def _row(framework: Framework, attack: str, **values: Any) -> Row:
    named = {"attack": attack, "framework": framework.name, "version": framework.version()}
    return {**named, **values, "left": list(values["left"])}


def _print(row: Row) -> None:
    cells = (row["attack"], row["framework"], f"{row['count']:,} {row['unit']}", f"{row['wrong']} wrong")
    sys.stdout.write(" | ".join([*cells, ", ".join(row["left"]) or "nothing left", row["note"]]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Draw what commands print in a terminal of 80 columns.

python -m amanda_docs.terminal docs/answer.svg examples "amanda run nan masked_attention.py"
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import termios
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 80, 60


def output_of(command: str, folder: Path) -> str:
    """Return what a command prints in a terminal, with the codes of its colours."""
    # A terminal and not a pipe: the width and the colours of a table depend on it.
    terminal, child_side = pty.openpty()
    fcntl.ioctl(child_side, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    process = subprocess.Popen(
        command.split(), cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=child_side,
        stderr=child_side,
    )  # fmt: skip
    os.close(child_side)
    printed = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            printed += chunk
    except OSError:  # Linux says so when the other side is closed
        pass
    finally:
        os.close(terminal)
    process.wait()
    return printed.decode().replace("\r\n", "\n")


def draw(path: Path, folder: Path, commands: list[str]) -> None:
    """Write the commands and what they print as SVG."""
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(output_of(command, folder)))
    path.write_text(console.export_svg(title="", unique_id=path.stem))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="amanda_docs.terminal", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("folder", type=Path, help="where the commands run")
    parser.add_argument("commands", nargs="+")
    options = parser.parse_args()
    draw(options.picture, options.folder, options.commands)


if __name__ == "__main__":
    main()

"""The commands of pages run, and print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import children
import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [("command.md", 5), ("tools/diff.md", 4), ("recipes/ci.md", 1), ("recipes/ddp.md", 2)]
SCRIPTS = {"amanda": "amanda", "pytest": "pytest", "torchrun": "torch.distributed.run"}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "commands"), PAGES)
def test_commands_print_what_the_page_says(page: str, commands: int, tmp_path: Path) -> None:
    for name, module in SCRIPTS.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    run = 0
    for language, text in BLOCK.findall((DOCS / page).read_text()):
        if language != "console":
            if named := re.match(r"# (\w+\.\w+)\n", text):
                (tmp_path / named[1]).write_text(text)
            continue
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            done = children.run(
                command, shell=True, cwd=tmp_path, env=environment,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            check(done.stdout, expected)
            run += 1
    assert run == commands


def check(printed: str, expected: str) -> None:
    """Line by line, of any spacing; "..." stands for anything, a line of a table for one of any length."""
    lines, wanted = plain(printed), plain(expected)
    assert len(lines) == len(wanted), printed
    for line, want in zip(lines, wanted, strict=True):
        assert fnmatchcase(line, want), printed


def plain(text: str) -> list[str]:
    lines = [re.sub("─+", "─", " ".join(line.split())) for line in text.splitlines()]
    return [line.replace("[", "(").replace("]", ")").replace("...", "*") for line in lines]

"""Results under `amanda run` where something is missing: a stream, a folder, the process itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import children
import pytest

RUN = [sys.executable, "-m", "amanda", "run"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def amanda_run(folder: Path, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = children.run([*RUN, *arguments], cwd=folder)
    assert done.returncode == status, done.stderr
    return done


def calls(path: Path, type: str) -> int:
    """Executions of a type of op, of a result of the flops tool."""
    rows = json.loads(path.read_text())["rows"]
    return sum(row["calls"] for row in rows if row["type"] == type)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", ">&- 2>&-"])
def test_a_stream_that_the_shell_has_closed_changes_nothing(script: Path, closed: str) -> None:
    script.write_text("import sys, torch\ntorch.ones(3).cumsum(0)\nsys.exit(7)")
    command = [*RUN, "-q", "-t", "flops", "-o", "out", "train.py"]
    done = children.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], cwd=script.parent)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
    assert calls(script.parent / "out" / "flops.json", "cumsum") == 1


@pytest.mark.slow
def test_a_program_runs_in_a_working_directory_that_is_gone(tmp_path: Path, script: Path) -> None:
    script.write_text("print('ran')")
    for given, status, told in (
        ((), 0, ""),
        (("-o", "out"), 2, "amanda run: results cannot be saved in out: No such file or directory\n"),
        (("-t", "nan:out=x.json"), 2, "x.json is in the working directory, which has been deleted\n"),
    ):
        (tmp_path / "gone").mkdir()
        command = [*RUN, "-q", "-t", "flops", *given, str(script)]
        go = 'cd gone && rmdir ../gone && exec "$@"'
        done = children.run(["sh", "-c", go, "sh", *command], cwd=tmp_path)
        assert (done.returncode, done.stdout) == (status, "" if status else "ran\n"), done.stderr
        assert done.stderr.endswith(told)


@pytest.mark.slow
def test_a_program_that_starts_python_has_the_results_of_its_child(script: Path) -> None:
    script.write_text("import torch\ntorch.ones(3).cumsum(0)")
    program = ["--", "env", "A=1", sys.executable, "train.py"]
    done = amanda_run(script.parent, "dump,flops", "-o", "out", *program)
    assert "lost" not in done.stderr
    assert "amanda: dump of main\nDumped tensors\n" in done.stderr
    assert sorted(path.name for path in (script.parent / "out").iterdir()) == ["flops.json", "main.dump.json"]
    assert calls(script.parent / "out" / "flops.json", "cumsum") == 1
    script.with_name("starts.py").write_text(
        "from subprocess import run\nimport sys\nfor _ in 'ab':\n    run([sys.executable, 'train.py'])"
    )
    done = amanda_run(script.parent, "dump:folder=two", "starts.py")
    assert "no tools" not in done.stderr
    assert done.stderr.count("amanda: dump of process") == 2
    assert len(list((script.parent / "two").rglob("index.json"))) == 2


def test_a_folder_that_cannot_be_made_is_told_before_the_program_runs(script: Path) -> None:
    script.write_text("print('ran')")
    (script.parent / "file").write_text("")
    done = amanda_run(script.parent, "-q", "-t", "flops", "-o", "file/out", "train.py", status=2)
    assert (done.stdout, done.stderr) == (
        "",
        "amanda run: results cannot be saved in file/out: Not a directory\n",
    )


@pytest.mark.slow
def test_a_result_that_is_lost_is_told_where_none_is_printed(script: Path) -> None:
    script.write_text("import os, torch\ntorch.ones(3).cumsum(0)\nos.mkdir('out/flops.json')")
    done = amanda_run(script.parent, "-q", "-t", "flops", "-o", "out", "train.py")
    assert done.stderr.startswith("amanda: flops cannot be saved in ")
    assert done.stderr.count("\n") == 1
    assert "Is a directory" in done.stderr


BECOMES = """
import os, sys, torch
torch.ones(3).cumsum(0)
times = int(sys.argv[1])
try:
    os.execv(sys.argv[0], ["refused"])
except OSError:
    pass
print(times, flush=True)
if times:
    os.execl(sys.executable, sys.executable, sys.argv[0], str(times - 1))
if len(sys.argv) == 3:
    os.execlp("sh", "sh", "-c", "echo other")
"""


@pytest.mark.long
def test_what_was_counted_before_a_process_became_another_program_is_kept(script: Path) -> None:
    script.write_text(BECOMES)
    done = amanda_run(script.parent, "-t", "flops", "-o", "out", "train.py", "2")
    out = script.parent / "out"
    assert done.stdout == "2\n1\n0\n"
    assert calls(out / "flops.json", "cumsum") == 3
    assert calls(out / "main.flops.json", "cumsum") == calls(out / "main.restart2.flops.json", "cumsum") == 1
    assert "Of main.restart2, main and main.restart1 together." in done.stderr


def test_results_are_told_before_a_process_becomes_a_program_without_tools(script: Path) -> None:
    script.write_text(BECOMES)
    done = amanda_run(script.parent, "-t", "flops", "-o", "out", "train.py", "0", "other")
    assert done.stdout == "0\nother\n"
    assert calls(script.parent / "out" / "flops.json", "cumsum") == 1
    assert "amanda: flops is in" in done.stderr

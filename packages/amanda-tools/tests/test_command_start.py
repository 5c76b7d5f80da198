"""`amanda run` starts cheaply: Amanda is imported only where a program needs it, and no op is missed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import children
import pytest

import amanda

RUN = [sys.executable, "-m", "amanda", "run"]
WORK = """
def work(number=0):
    import torch
    (torch.ones(2, 2) @ torch.ones(2, 2)).cumsum(0)
"""


def matmuls(folder: Path, program: str) -> int:
    """Return the matrix products that FLOPs counted in a program and its processes."""
    (folder / "script.py").write_text(program)
    children.run([*RUN, "-q", "-t", "flops", "-o", "out", "script.py"], cwd=folder, check=True, limit=120)
    rows = json.loads((folder / "out" / "flops.json").read_text())["rows"]
    return sum(row["calls"] for row in rows if row["type"] == "matmul")


def test_a_program_without_a_framework_imports_nothing_of_amanda(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sorted(sys.modules))")
    done = children.run([*RUN, "-t", "flops", "-t", "flops:end=5", "script.py"], cwd=tmp_path, check=True)
    assert "'threading'" in done.stdout
    assert "amanda" not in done.stdout
    tools_without_ops = [line.partition(": no op of ")[0] for line in done.stderr.splitlines()]
    assert tools_without_ops == ["amanda: flops", "amanda: flops-2"]


def test_the_options_of_a_program_are_not_followed_by_a_word_about_ops(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import argparse; argparse.ArgumentParser().parse_args()")
    done = children.run([*RUN, "-t", "flops", "script.py", "--help"], cwd=tmp_path, check=True)
    assert done.stdout.startswith("usage: script.py")
    assert done.stderr == ""


def test_no_tool_imports_a_library_before_it_is_used() -> None:
    """A library, such as numpy, takes longer to import than all of Amanda."""
    ours = ("amanda-tools", "amanda-compress", "amanda-labs")
    names = [tool.name for tool in amanda.list_tools() if tool.distribution in ours]
    code = "import sys; from amanda.plugins import tool_class; list(map(tool_class, sys.argv[1:]))"
    libraries = ("autoray", "ml_dtypes", "networkx", "numpy", "rich", "safetensors", "yaml")
    question = f"print([name for name in {libraries} if name in sys.modules])"
    done = children.run([sys.executable, "-c", f"{code}; {question}", *names], check=True)
    assert "flops" in names
    assert done.stdout == "[]\n"


def test_the_first_step_of_a_torch_program_does_not_import_autoray() -> None:
    code = """
import sys, numpy, torch, amanda
from amanda.tools.libraries import infer_backend
from amanda.tools.mapping import backend_of
from amanda.tools.nan import NanTool
with amanda.apply(NanTool()):
    torch.nn.Linear(2, 2)(torch.rand(2, 2)).sum().backward()
values = [1, 1.5, None, [2.5], numpy.zeros(1), numpy.float32(1), torch.rand(1)]
backends = list(map(backend_of, values))
print("autoray" in sys.modules, backends == list(map(infer_backend, values)))
class Subclass(torch.Tensor):
    pass
tensor = torch.rand(2).as_subclass(Subclass)
print(backend_of(tensor), infer_backend(tensor), infer_backend(torch.nn.Parameter(torch.rand(2))))
"""
    done = children.run([sys.executable, "-c", code], check=True)
    assert done.stdout == "False True\ntorch torch torch\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.long) for method in ("spawn", "forkserver"))]
)
def test_processes_that_import_a_framework_themselves_are_merged(tmp_path: Path, method: str) -> None:
    start = f"""
import multiprocessing
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    process = context.Process(target=work)
    process.start()
    process.join()
    with context.Pool(2) as pool:
        pool.map(work, range(4), chunksize=1)
"""
    assert matmuls(tmp_path, WORK + start) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "import threading\nthread = threading.Thread(target=work)\nthread.start()\nthread.join()\nwork()",
        pytest.param(
            "import _thread, time\n_thread.start_new_thread(work, ())\ntime.sleep(9)\nwork()",
            marks=pytest.mark.long,
        ),
        "import asyncio\nasync def main():\n    work()\nasyncio.run(main())\nwork()",
        pytest.param(
            "import amanda, asyncio\nasync def main():\n    work()\nasyncio.run(main())\nwork()",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "import contextvars\ncontextvars.copy_context().run(work)\nwork()", marks=pytest.mark.long
        ),
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(1) as pool:\n    pool.submit(work).result()\nwork()",
    ],
    ids=["thread", "low-level thread", "task", "task beside amanda", "context", "pool"],
)
def test_a_framework_that_is_first_imported_elsewhere_is_seen_everywhere(
    tmp_path: Path, program: str
) -> None:
    assert matmuls(tmp_path, WORK + program) == 2


@pytest.mark.slow
def test_a_framework_that_a_handler_at_the_end_imports_is_seen(tmp_path: Path) -> None:
    # Python lets nobody import concurrent.futures at its end, once threading has been imported
    assert matmuls(tmp_path, WORK + "import atexit, concurrent.futures.thread\natexit.register(work)") == 1


@pytest.mark.slow
def test_a_program_that_replaces_one_without_a_framework_is_seen(tmp_path: Path) -> None:
    (tmp_path / "next.py").write_text(f"{WORK}\nwork()")
    assert matmuls(tmp_path, "import os, sys\nos.execv(sys.executable, [sys.executable, 'next.py'])") == 1

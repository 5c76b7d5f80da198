"""Programs under `amanda run` do what they do without it: status, output, tracebacks, signals, processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import children
import pytest

RUN = [sys.executable, "-m", "amanda", "run", "-q", "-t", "flops", "--"]


def outcome(command: Sequence[str], folder: Path, stdin: str = "") -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    done = children.run(command, cwd=folder, input=stdin, limit=120)
    return done.returncode, done.stdout, done.stderr


def both(program: Sequence[str], folder: Path, stdin: str = "") -> tuple[int, str, str]:
    """The outcome of a program, which is the same with and without tools."""
    plain = outcome([sys.executable, *program], folder, stdin)
    assert outcome([*RUN, *program], folder, stdin) == plain
    return plain


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


SURROUNDINGS = """
import os, sys
import __main__
print(sys.argv, sys.path[:3], __file__, __name__)
print(getattr(__spec__, "name", None), __main__.__dict__ is globals())
print(sys.flags, sys.stdin.read(), os.getcwd(), sys.orig_argv[1:])
print(sorted(name for name in globals()), __builtins__, sys.modules["__main__"].__loader__.__class__)
"""


def test_a_script_finds_itself_as_it_is(script: Path) -> None:
    script.write_text(SURROUNDINGS)
    status, out, _ = both(["script.py", "--epochs", "1", "-t", "x", "--", "y z"], script.parent, "typed")
    assert status == 0
    assert "'--', 'y z'" in out
    assert "typed" in out


@pytest.mark.slow
def test_a_module_a_folder_and_code_do_too(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(SURROUNDINGS)
    assert both(["-m", "package", "--help"], tmp_path)[0] == 0
    assert both(["package", "a"], tmp_path)[0] == 0
    assert both(["-c", SURROUNDINGS.replace(", __file__", ""), "a"], tmp_path)[0] == 0
    assert both(["-"], tmp_path, "print(__name__)")[1] == "__main__\n"


def test_modules_of_the_standard_library_run(tmp_path: Path) -> None:
    assert both(["-m", "this"], tmp_path)[0] == 0
    status, out, _ = outcome([*RUN, "-m", "timeit", "-n", "10", "-r", "1", "pass"], tmp_path)
    assert (status, "10 loops" in out) == (0, True)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(3)", 3),
        ("sys.exit('a message')", 1),
        ("raise SystemExit", 0),
        ("os._exit(4)", 4),
        ("raise KeyError('x') from ValueError('y')", 1),
        ("def f(n): return f(n - 1) if n else 1 / 0\nf(3)", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(5)", -signal.SIGINT),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM)", 7),
        ("import threading; threading.Thread(target=lambda: 1 / 0, name='one').start()", 0),
        ("syntax error", 1),
    ],
)
def test_a_script_ends_as_it_does(script: Path, ending: str, status: int) -> None:
    script.write_text("import os, signal, sys, time\nprint('begun', flush=True)\n" + ending)
    if ending == "syntax error":
        script.write_text(ending)
    assert both(["script.py"], script.parent)[0] == status


def test_a_reader_that_goes_away_changes_nothing(script: Path) -> None:
    script.write_text("for i in range(100_000): print(i)")
    told = []
    for command in ([sys.executable], RUN):
        with children.started(
            [*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as program:
            assert program.stdout is not None
            assert program.stderr is not None
            program.stdout.readline()
            program.stdout.close()
            told.append((program.stderr.read(), program.wait(timeout=60)))
    assert told[0] == told[1]
    assert "BrokenPipeError" in told[0][0]


PROCESSES = """
import multiprocessing, os, pickle, subprocess, sys

class Own:
    def __init__(self, number):
        self.number = number

def double(own):
    return Own(2 * own.number)

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Own(3))).number == 3
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            print(method, [own.number for own in pool.map(double, [Own(1), Own(2)])])
        process = context.Process(target=sys.exit, args=(5,))
        process.start()
        process.join()
        print(process.exitcode)
    child = os.fork()
    if child == 0:
        sys.exit(6)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv); sys.exit(8)"]).returncode)
"""


@pytest.mark.slow
def test_processes_of_a_script_do_what_they_do(script: Path) -> None:
    script.write_text(PROCESSES)
    status, out, _ = both(["script.py"], script.parent)
    assert status == 0
    assert "forkserver [2, 4]" in out


FORKED = """
import os, signal

child = os.fork()
if child == 0:
    print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)], flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_child_without_a_framework_has_no_handlers_of_signals(script: Path) -> None:
    script.write_text(FORKED)
    assert both(["script.py"], script.parent)[1].count("SIG_DFL") == 2


EARLY = """
import ctypes, os, signal

def first_in_child():
    os.kill(os.getpid(), signal.SIGTERM)
    os.write(1, b"waits ")  # or Python forgets it when it prepares the child

callback = ctypes.CFUNCTYPE(None)(first_in_child)
ctypes.CDLL(None)["__register_atfork"](None, None, callback, None)
child = os.fork()
if child == 0:
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it takes glibc to act in a fork before Python")
def test_a_signal_that_a_child_gets_as_it_begins_ends_it(script: Path) -> None:
    script.write_text(EARLY)
    done = outcome([*RUN, "script.py"], script.parent)
    assert done == (0, f"waits {-signal.SIGTERM} set()\n", "")


def test_a_sitecustomize_that_is_shadowed_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = True")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in ([sys.executable], RUN):
        code = "import sys, sitecustomize; print(customized, sitecustomize.__file__, sys.path)"
        done = children.run([*command, "-c", code], env=environment, check=True)
        assert done.stdout.startswith(f"True {tmp_path / 'sitecustomize.py'}")
        assert "launch" not in done.stdout


def test_a_command_that_is_not_pythons_is_run_and_waited_for(tmp_path: Path) -> None:
    shell = tmp_path / "train.sh"
    shell.write_text('#!/bin/sh\nread line\necho "$line" "$@"\nkill -TERM $$\n')
    shell.chmod(0o755)
    assert outcome([*RUN, "./train.sh", "a", "-m"], tmp_path, "typed\n") == (
        -signal.SIGTERM,
        "typed a -m\n",
        "",
    )
    assert outcome([*RUN, "sh", "-c", "exit 9"], tmp_path)[0] == 9
    assert outcome([*RUN, sys.executable, "-c", "print(7)"], tmp_path) == (0, "7\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["./start.sh", f"{sys.executable} -m no_such_module"])
def test_a_program_that_fails_before_any_op_has_the_last_word(command: str, tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -m no_such_module\n")
    script.chmod(0o755)
    tools = [sys.executable, "-m", "amanda", "run", "flops"]
    status, stdout, stderr = outcome([*tools, *command.split()], tmp_path)
    assert (status, stdout) == (1, "")
    assert stderr.endswith("No module named no_such_module\n")


def test_a_signal_reaches_a_command_that_is_not_pythons(tmp_path: Path) -> None:
    with children.started(
        [*RUN, "sh", "-c", 'trap "exit 5" TERM; echo ready; while :; do sleep 0.1; done'],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.terminate()
        assert program.wait(timeout=60) == 5


def test_a_command_that_cannot_be_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("\x7fELF")
    (tmp_path / "tool").chmod(0o755)
    status, _, stderr = outcome([*RUN, "./tool"], tmp_path)
    assert status == 2
    assert stderr.startswith("amanda run: ./tool cannot be run: ")

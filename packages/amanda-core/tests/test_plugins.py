"""Discovery, with real third-party distributions that are good, broken, outdated and doubled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import children
import pytest
from repository import repository_path

from amanda.backend import DRIVER_API

PLUGINS = repository_path("tests/plugins")
SPEAKS = f"speaks {DRIVER_API}"


@pytest.fixture(scope="session")
def third_parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every distribution of tests/plugins installed."""
    place = tmp_path_factory.mktemp("site")
    sources = [str(path.parent) for path in PLUGINS.glob("*/pyproject.toml")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    children.run([*pip, "--no-build-isolation", "--target", place, *sources], check=True)
    return place


class Run:
    """Runs Python in a process of its own, where the third parties are installed."""

    def __init__(self, place: Path) -> None:
        # Wide, so that each row is on one line.
        self.env = {**os.environ, "PYTHONPATH": str(place), "COLUMNS": "400"}

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return children.run([sys.executable, *arguments], env=self.env)

    def code(self, source: str) -> str:
        """What the source prints; it logs to standard output."""
        logs = "import logging, sys; logging.basicConfig(stream=sys.stdout, format='LOG %(message)s')\n"
        done = self("-c", logs + source)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def run(third_parties: Path) -> Run:
    return Run(third_parties)


STATES = """
import amanda
for plugin in amanda.list_{what}({load}):
    print(plugin.name, plugin.distribution, plugin.version, plugin.state, plugin.message, sep="|")
"""


def states(run: Run, kind: str, load: str = "") -> dict[str, list[list[str]]]:
    rows: dict[str, list[list[str]]] = {}
    for line in run.code(STATES.format(what=kind, load=load)).splitlines():
        name, *fields = line.split("|")
        rows.setdefault(name, []).append(fields)
    return rows


def test_finding_imports_nothing(run: Run) -> None:
    out = run.code(
        "import amanda; amanda.list_drivers(); amanda.list_tools()\n"
        "print(sorted(m for m in sys.modules if 'fake_' in m or m.endswith('frame')))"
    )
    assert out.strip() == "[]"


def test_drivers_wait_for_their_framework(run: Run) -> None:
    drivers = states(run, "drivers")
    assert drivers["goodframe"] == [["fake-good", "0.3.0", "not loaded", "loads once goodframe is imported"]]
    assert drivers["brokenframe"][0][2] == "not loaded"


def test_a_framework_that_is_not_installed_is_told_with_its_fix(run: Run) -> None:
    absent = ["fake-good", "0.3.0", "absent", "missingframe is not installed: pip install missingframe"]
    assert states(run, "drivers")["missingframe"] == [absent]


def test_two_drivers_of_one_name_are_duplicates_before_they_load(run: Run) -> None:
    (first, second) = states(run, "drivers")["twinframe"]
    assert first[2] == second[2] == "duplicate"
    assert first[3] == second[3]
    for part in (
        "fake-twin-one 0.3.0",
        "fake-twin-two 0.3.0",
        "pip uninstall fake-twin-one or fake-twin-two",
    ):
        assert part in first[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "state", "parts"),
    [
        ("goodframe", "ready", []),
        ("modeframe/eager", "ready", []),
        ("modeframe/graph", "ready", []),
        (
            "brokenframe",
            "broken import",
            ["fake-broken 0.3.0", "ModuleNotFoundError", "pip install --upgrade"],
        ),
        ("failingframe", "broken import", ["failingframe itself fails to import", "no accelerator"]),
        (
            "oldframe",
            "wrong API",
            ["driver API 0", SPEAKS, "pip install --upgrade fake-outdated"],
        ),
        (
            "newframe",
            "wrong API",
            ["driver API 99", SPEAKS, "pip install --upgrade", "amanda-core"],
        ),
        ("twinframe", "duplicate", ["fake-twin-one 0.3.0 and twinframe of fake-twin-two 0.3.0"]),
        ("missingframe", "absent", ["pip install missingframe"]),
    ],
)
def test_loading_tells_states_apart(
    run: Run, loaded: dict[str, list[list[str]]], framework: str, state: str, parts: list[str]
) -> None:
    for _, _, actual, message in loaded[framework]:
        assert actual == state
        assert all(part in message for part in parts), message
        assert bool(message) == (state != "ready")


@pytest.fixture(scope="module")
def loaded(third_parties: Path) -> dict[str, list[list[str]]]:
    return states(Run(third_parties), "drivers", "load=True")


def test_a_bad_driver_is_logged_once_and_stops_no_other(run: Run) -> None:
    out = run.code(
        "import brokenframe, oldframe, twinframe, goodframe\n"
        "from amanda.plugins import manager\n"
        "for _ in range(2): print([kind.__name__ for kind in manager.loaded_drivers()])\n"
        "print(len(manager.faulty_drivers()))"
    )
    lines = out.splitlines()
    logged = [line for line in lines if line.startswith("LOG")]
    assert len(logged) == 3  # the twins share a message
    assert lines.count("['GoodDriver']") == 2
    assert lines[-1] == "4"


FAILING_ONCE = """
import amanda, goodframe
fails = [{error}]
class Failing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "fake_good" and fails:
            raise fails.pop()
sys.meta_path.insert(0, Failing)
def reasons(scope): return [entry.reason for entry in scope.report]
with amanda.apply(amanda.Tool()) as outer:
    print("outer", reasons(outer))
    with amanda.apply(amanda.Tool()) as inner:
        print("inner", reasons(inner))
with amanda.apply(amanda.Tool()) as later:
    print("later", reasons(later))
"""


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ('OSError(24, "Too many open files")', "free memory, open files or disk"),
        ("MemoryError()", "free memory, open files or disk"),
        ('ImportError("libgood.so: cannot open shared object file: Too many open files")', "free memory"),
        ('ImportError("no module named good")', "pip install --upgrade fake-good"),
        ('FileNotFoundError(2, "No such file")', "pip install --upgrade fake-good"),
        ('OSError("libgood.so: cannot open shared object file: Too many open files")', "free memory"),
        ('OSError("libgood.so: cannot open shared object file")', "pip install --upgrade fake-good"),
        ('IsADirectoryError(21, "Is a directory")', "pip install --upgrade fake-good"),
        ('PermissionError(13, "Permission denied", "/there/good.py")',
         "; give your user access to /there/good.py; the next use tries again"),
    ],
)  # fmt: skip
def test_a_driver_whose_import_failed_once_is_used_by_the_next_scope(
    run: Run, error: str, advice: str
) -> None:
    out = run.code(FAILING_ONCE.format(error=error)).splitlines()
    lines = {line.split()[0]: line for line in out if not line.startswith("LOG")}
    assert advice in lines["outer"]
    assert lines["inner"] == "inner []"
    assert lines["later"] == "later []"


def test_a_scope_reports_the_drivers_that_cannot_be_used(run: Run) -> None:
    out = run.code(
        "import amanda, brokenframe, oldframe, goodframe\n"
        "with amanda.apply(amanda.Tool()) as scope: pass\n"
        "print(sorted((entry.what, bool(entry.reason)) for entry in scope.report))"
    )
    assert out.splitlines()[-1] == "[('brokenframe', True), ('oldframe', True)]"


def test_a_driver_attaches_when_its_framework_is_imported_inside_a_scope(run: Run) -> None:
    out = run.code(
        "import amanda\n"
        "from fake_good import GoodDriver, Recorder\n"
        "before = list(sys.meta_path); place = sys.meta_path\n"
        "with amanda.apply(amanda.Tool()):\n"
        "    print(GoodDriver.attached)\n"
        "    import goodframe\n"
        "    print(GoodDriver.attached)\n"
        "print(GoodDriver.attached, sys.meta_path is place and sys.meta_path == before)\n"
        "print([line for line in Recorder.told if 'tensorflow' not in line and 'torch' not in line])"
    )
    lines = [line for line in out.splitlines() if not line.startswith("LOG")]
    assert lines[:3] == ["False", "True", "False True"]
    assert lines[3] == "['entered', 'attached goodframe', 'detached goodframe', 'left']"


def test_bad_hook_plugins_are_logged_and_stop_no_other(run: Run) -> None:
    out = run.code(
        "from amanda.plugins import plugin_manager\n"
        "plugin_manager(); manager = plugin_manager()\n"
        "print([name for name, plugin in manager.list_name_plugin()])"
    )
    *logged, names = out.splitlines()
    assert names == "['recorder of fake-good 0.3.0']"
    assert len(logged) == 2
    assert any("amanda_scope_entred" in line and "fake-broken 0.3.0" in line for line in logged)
    assert any("a_module_that_nobody_has" in line for line in logged)


def test_tools_are_told_apart(run: Run) -> None:
    tools = states(run, "tools", "load=True")
    assert tools["counter"][0][2] == "ready"
    assert tools["broken"][0][2] == "broken import"
    assert [plugin[2] for plugin in tools["twin"]] == ["duplicate", "duplicate"]


@pytest.mark.parametrize(
    ("tool", "part"),
    [
        ("interrupting", "(KeyboardInterrupt)"),
        ("exiting", "(SystemExit: 0)"),
        ("cancelled", "(Cancelled: not now)"),
    ],
)
def test_a_plugin_that_would_end_the_program_is_a_broken_import(run: Run, tool: str, part: str) -> None:
    code = (
        "import amanda, threading\n"
        "def load():\n"
        f"    try: amanda.load_tool({tool!r})\n"
        "    except amanda.errors.PluginError as error: print(error)\n"
        "{start}\n"
    )
    for start in ("load()", "thread = threading.Thread(target=load); thread.start(); thread.join()"):
        out = run.code(code.replace("{start}", start))
        assert f"fails to import {part}; pip install --upgrade fake-broken" in out


def test_the_users_interrupt_gets_through_while_a_plugin_is_imported(run: Run) -> None:
    out = run.code(
        "import amanda, signal\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "from amanda.plugins.entries import run_import\n"
        "try: run_import(lambda: __import__('fake_ending.signalled'))\n"
        "except KeyboardInterrupt: print('interrupted', signal.getsignal(signal.SIGINT) is before)"
    )
    assert out == "interrupted True\n"


def test_load_tool_makes_a_tool_with_its_options(run: Run) -> None:
    out = run.code(
        "import amanda\n"
        "tool = amanda.load_tool('counter', limit=4, label='nodes')\n"
        "print(tool.limit, tool.label)"
    )
    assert out.strip() == "4 nodes"


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        ("'countr', limit=3", "UnknownToolError", ["did you mean counter?"]),
        ("'counter'", "OptionError", ["'limit'", "limit: an integer, label: a string = 'ops'"]),
        (
            "'counter', limit=3, lable=''",
            "OptionError",
            ["'lable'", "limit: an integer, label: a string = 'ops'"],
        ),
        ("'broken'", "PluginError", ["fake-broken 0.3.0", "ModuleNotFoundError"]),
        ("'twin'", "PluginError", ["fake-twin-one 0.3.0", "fake-twin-two 0.3.0"]),
        ("'pretender'", "PluginError", ["makes a Pretender"]),
    ],
)
def test_load_tool_says_what_to_do(run: Run, call: str, error: str, parts: list[str]) -> None:
    out = run.code(
        "import amanda\n"
        f"try: amanda.load_tool({call})\n"
        "except amanda.AmandaError as error: print(type(error).__name__, error)"
    )
    assert out.startswith(error)
    assert all(part in out for part in parts), out


def test_info_tells_versions_states_and_fixes(run: Run) -> None:
    done = run("-m", "amanda")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: python -m amanda ")
    usage, _, information = done.stdout.partition("\n\n")
    assert "`python -m amanda --help` lists the commands." in " ".join(usage.split())
    assert information == run("-m", "amanda", "info").stdout
    for part in ("Python 3.", "Interceptor: ", "goodframe", "pip install missingframe", "Commands: "):
        assert part in done.stdout


def test_a_command_of_another_distribution_runs_with_its_arguments(run: Run) -> None:
    done = run("-m", "amanda", "greet", "you", "there")
    assert (done.returncode, done.stdout) == (3, "hello you there\n")


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["gret"], 2, "did you mean greet?"),
        (["info", "--laod"], 2, "did you mean --load?"),
        (["broken"], 1, "a_module_that_nobody_has"),
        (["info", "countr"], 2, "did you mean counter?"),
        (["info", "counter", "nan"], 2, "one tool, not 2"),
        (["tools", "counter"], 2, "amanda tools: it takes no argument, and was given 'counter'"),
        (["info", "--help", "counter"], 0, ""),
    ],
)
def test_a_wrong_command_line_is_told(run: Run, arguments: list[str], status: int, part: str) -> None:
    done = run("-m", "amanda", *arguments)
    assert done.returncode == status
    assert part in done.stderr


def test_info_tells_the_options_of_a_tool(run: Run) -> None:
    done = run("-m", "amanda", "info", "counter")
    assert done.returncode == 0
    assert "Has one option that it needs and one with a default." in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["limit", "required", "integer"] in lines
    assert ["label", "ops", "string"] in lines


@pytest.mark.slow
def test_lines_fit_the_terminal(run: Run) -> None:
    run.env["COLUMNS"] = "80"
    for command in ("", "info flops", "info quantize", "info dynamic_channel_prune", "tools", "doctor"):
        lines = run("-m", "amanda", *command.split()).stdout.splitlines()
        # Only a word that is longer than a line is left whole.
        assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
    words = " ".join(run("-m", "amanda", "info", "flops").stdout.split())
    assert "when `result` is read; an op without a formula for all shapes is analysed for each set." in words


def test_tools_lists_the_tools_and_what_is_wrong_with_them(run: Run) -> None:
    text = run("-m", "amanda", "tools").stdout
    words = " ".join(text.split())
    assert "counter Has one option that it needs and one with a default." in words
    assert "pip install --upgrade fake-broken" in words
    # By purpose: "counter" states none.
    places = [text.index(part) for part in ("Look into a model:", "  flops ", "Others:", "  counter ")]
    assert places == sorted(places)
    assert "standard_mapping" not in text


def test_help_lists_the_commands_of_all_distributions(run: Run) -> None:
    done = run("-m", "amanda", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: python -m amanda COMMAND")
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["greet", "Say hello."] in lines
    assert "Usage: python -m amanda info [--load] [TOOL]" in run("-m", "amanda", "info", "nan", "-h").stdout
    assert re.fullmatch(r"Amanda \d.* \(amanda-core\)\n", run("-m", "amanda", "--version").stdout)
    assert "exit status is 1 if a check fails" in run("-m", "amanda", "doctor", "--help").stdout


@pytest.mark.slow
def test_doctor_says_what_is_wrong_and_the_fix(run: Run) -> None:
    done = run("-m", "amanda", "doctor")
    assert done.returncode == 1
    verdicts = {line.split()[1]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert verdicts["goodframe"].split()[0] == "ok"
    assert verdicts["missingframe"].split()[0] == "note"
    for name, fix in (
        ("oldframe", "pip install --upgrade fake-outdated"),
        ("newframe", "pip install --upgrade"),
        ("twinframe", "pip uninstall fake-twin-one or fake-twin-two"),
        ("brokenframe", "pip install --upgrade fake-broken"),
    ):
        assert verdicts[name].split()[0] == "wrong"
        assert fix in verdicts[name]
    advice = 'it asks for fake-frameworks<0.3, and 0.3.0 is installed: pip install "fake-frameworks<0.3"'
    assert verdicts["fake-outdated"].split()[0] == "wrong"
    assert advice in verdicts["fake-outdated"]
    assert "not-installed" not in done.stdout
    assert verdicts["fake-good"].split()[0] == "ok"
    assert re.fullmatch(r"\d+ problems? found \(\d+ checks\)\.", done.stdout.splitlines()[-1])

"""What belongs to a distribution of ours that is not installed is an error that says how to install it."""

from __future__ import annotations

import pytest

import amanda
from amanda.__main__ import main
from amanda.errors import UnknownToolError
from amanda.plugins import entries, import_from
from amanda.plugins.entries import Offer, registry

COMMAND = r'pip install "amanda-core\[{}\]"'


@pytest.fixture
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entries", lambda group, fresh=True: [])


@pytest.fixture
def absent_package(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(entries.OFFERS, "absent", Offer((), (), ("absent_package",)))
    return "absent_package"


@pytest.mark.usefixtures("nothing_is_installed")
@pytest.mark.parametrize(("tool", "extra"), [("flops", "tools"), ("prune", "compress"), ("search", "labs")])
def test_a_tool_that_is_not_installed(tool: str, extra: str) -> None:
    with pytest.raises(UnknownToolError, match="not installed: " + COMMAND.format(extra)):
        amanda.load_tool(tool)


@pytest.mark.usefixtures("nothing_is_installed")
@pytest.mark.parametrize(("command", "extra"), [("run", "tools"), ("sweep", "compress")])
def test_a_command_that_is_not_installed(
    command: str, extra: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    assert f'pip install "amanda-core[{extra}]"' in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_is_installed")
def test_the_list_of_tools_ends_with_those_that_are_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools"]) == 0
    first, _, rest = capsys.readouterr().out.partition("Not installed:\n")
    assert first.strip() == 'none is installed: pip install "amanda-core[tools]"'
    lines = rest.splitlines()
    assert [line.strip() for line in lines if "pip install" in line] == [
        f'pip install "amanda-core[{extra}]"' for extra in ("tools", "compress", "labs")
    ]
    assert max(map(len, lines)) <= 80


def test_a_package_that_is_not_installed(absent_package: str) -> None:
    tools = pytest.importorskip("amanda.tools")
    with pytest.raises(AttributeError, match=COMMAND.format("absent")):
        getattr(tools, absent_package)
    with pytest.raises(ImportError, match="not installed: " + COMMAND.format("absent")):
        import_from(f"amanda.tools.{absent_package}", "anything")


def test_names_of_others_have_no_distribution_of_ours() -> None:
    assert entries.install_command("prune", "commands") is None
    assert entries.install_command("no_such_tool", "tools") is None

"""What belongs to a distribution of ours that is not installed is an error that says how to install it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import amanda
from amanda.__main__ import main
from amanda.errors import UnknownToolError
from amanda.plugins import drivers, entries, import_from
from amanda.plugins.entries import Offer, registry

COMMAND = r'pip install "amanda-core\[{}\]"'


@pytest.fixture(autouse=True)
def core_of_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    set_origin(monkeypatch, None)


def set_origin(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    """Let amanda-core be installed from an origin: the content of a direct_url.json, or None for an index."""
    text = None if origin is None else json.dumps(origin)
    core = SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr(entries, "distribution", {"amanda-core": core}.__getitem__)
    uncached = inspect.unwrap(entries._address_beside_core)
    monkeypatch.setattr(entries, "_address_beside_core", uncached)


def set_installed(monkeypatch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    def version(name: str) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return "0.2.0"

    monkeypatch.setattr(entries, "version", version)


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


@pytest.mark.usefixtures("nothing_is_installed")
@pytest.mark.parametrize("folder", ["clone", "my clone"])
def test_a_core_from_a_clone_has_the_rest_in_the_same_clone(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tmp_path / folder / "packages"
    for name in ("amanda-core", "amanda-compress"):
        (packages / name).mkdir(parents=True)
        (packages / name / "pyproject.toml").touch()
    url = (packages / "amanda-core").as_uri()
    set_origin(monkeypatch, {"url": url, "dir_info": {"editable": True}})
    set_installed(monkeypatch, ["amanda-core", "amanda-tools"])
    path = str(packages / "amanda-compress")
    command = f'pip install "{path}"' if " " in path else f"pip install {path}"
    with pytest.raises(UnknownToolError) as caught:
        amanda.load_tool("prune")
    assert (
        str(caught.value) == f"no tool 'prune'; it is in amanda-compress, which is not installed: {command}"
    )
    # The clone lacks amanda-labs, and the driver.
    assert entries.extra_command("labs") == 'pip install "amanda-core[labs]"'
    assert entries.extra_command("torch") == 'pip install "amanda-core[torch]"'


@pytest.mark.parametrize(("revision", "suffix"), [(None, ""), ("v0.2", "@v0.2")])
def test_a_core_from_git_has_the_rest_in_the_same_repository(
    revision: str | None, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vcs = {"vcs": "git", "commit_id": "0" * 40} | ({"requested_revision": revision} if revision else {})
    url = "https://forge.example/amanda.git"
    set_origin(monkeypatch, {"url": url, "vcs_info": vcs, "subdirectory": "packages/amanda-core"})
    set_installed(monkeypatch, ["amanda-core", "amanda-tools"])

    def requirement(name: str) -> str:
        return f'"{name} @ git+{url}{suffix}#subdirectory=packages/{name}"'

    assert entries.install_command("prune", "tools") == f"pip install {requirement('amanda-compress')}"
    assert entries.extra_command("tensorflow") == f"pip install {requirement('amanda-driver-tf')}"
    # amanda-labs needs amanda-compress, which no index has either.
    names = ["amanda-compress", "amanda-labs"]
    assert entries.install_command("search", "tools") == f"pip install {' '.join(map(requirement, names))}"
    driver = "amanda-driver-torch"
    assert entries.upgrade_command(driver) == f"pip install --upgrade {requirement(driver)}"
    assert entries.upgrade_command("amanda-others") == "pip install --upgrade amanda-others"


def test_a_core_from_a_wheel_points_to_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    set_origin(monkeypatch, {"url": "file:///wheels/amanda_core-0.2.0-py3-none-any.whl", "archive_info": {}})
    assert entries.install_command("prune", "tools") == 'pip install "amanda-core[compress]"'


@pytest.mark.usefixtures("nothing_is_installed")
@pytest.mark.parametrize(
    ("frameworks", "end"),
    [
        (["jax", "torch"], "{jax} {torch}"),
        (["tensorflow"], "{tf}"),
        ([], "{torch}, or jax, tf in place of torch"),
    ],
)
def test_without_a_driver_the_hint_installs_those_of_the_frameworks_that_are_here(
    frameworks: list[str], end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(drivers, "_driver_extras", lambda: ["all", "jax", "tensorflow", "tf", "torch"])
    monkeypatch.setattr(drivers, "_is_installed", frameworks.__contains__)
    set_installed(monkeypatch, ["amanda-core"])
    paths = {}
    for name in ("amanda-core", "amanda-driver-jax", "amanda-driver-tf", "amanda-driver-torch"):
        folder = paths[name.rpartition("-")[2]] = tmp_path / name
        folder.mkdir()
        (folder / "pyproject.toml").touch()
    set_origin(monkeypatch, {"url": paths["core"].as_uri(), "dir_info": {}})
    assert drivers.how_to_install() == f"pip install {end.format(**paths)}"
    with amanda.apply(amanda.Tool()) as scope:
        pass
    (entry,) = scope.report
    assert entry.reason == f"no driver is installed, so no op is seen: {drivers.how_to_install()}"


@pytest.mark.usefixtures("nothing_is_installed")
def test_without_a_driver_and_with_a_core_of_an_index_the_hint_names_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drivers, "_driver_extras", lambda: ["all", "tensorflow", "tf", "torch"])
    monkeypatch.setattr(drivers, "_is_installed", lambda name: True)
    assert main(["info"]) == 0
    assert 'none is installed: pip install "amanda-core[tensorflow,torch]"' in capsys.readouterr().out


def test_a_framework_whose_driver_is_installed_needs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_driver_extras", lambda: ["jax", "torch"])
    monkeypatch.setattr(drivers, "_is_installed", lambda name: name == "torch")
    monkeypatch.setattr(drivers, "driven_frameworks", lambda: ["torch"])
    assert drivers.how_to_install() == 'pip install "amanda-core[torch]", or jax in place of torch'

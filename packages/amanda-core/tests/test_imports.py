"""Knowing when a module has been imported, without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from amanda.interceptor import imports
from amanda.interceptor.imports import is_imported, when_imported

Write = Callable[[str], str]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Nothing else is watched, as what drivers wait for is where they were loaded before."""
    others = [finder for finder in sys.meta_path if finder is not imports._watch]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "meta_path", others)
        patch.setattr(imports, "_watch", imports._Watch())
        yield


@pytest.fixture
def module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Write]:
    """Writes a module that can be imported, and gives its name."""
    name = f"watched_{abs(hash(request.node.name))}"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield write
    sys.modules.pop(name, None)


def test_it_is_called_once_after_the_body_has_run(module: Write) -> None:
    name, calls = module("value = 1"), []
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    assert calls == []
    importlib.import_module(name)
    importlib.reload(sys.modules[name])
    assert calls == [1]


def test_it_is_called_at_once_when_the_module_is_there(module: Write) -> None:
    name, calls = module(""), []
    importlib.import_module(name)
    when_imported(name, lambda: calls.append(1))
    assert calls == [1]


def test_it_may_import_the_module(module: Write) -> None:
    name, calls = module("value = 1"), []
    when_imported(name, lambda: calls.append((is_imported(name), importlib.import_module(name).value)))
    importlib.import_module(name)
    assert calls == [(True, 1)]


def test_every_watch_of_a_module_is_told(module: Write) -> None:
    name, calls = module(""), []
    when_imported(name, lambda: calls.append("first"))
    when_imported(name, lambda: calls.append("second"))
    importlib.import_module(name)
    assert calls == ["first", "second"]


@pytest.mark.parametrize("leave", ["import", "cancel"])
def test_the_finders_are_as_before(module: Write, leave: str) -> None:
    name, place, before = module(""), sys.meta_path, list(sys.meta_path)
    cancel = when_imported(name, lambda: None)
    assert len(sys.meta_path) == len(before) + 1
    importlib.import_module(name) if leave == "import" else cancel()
    assert sys.meta_path is place
    assert sys.meta_path == before


def test_a_finder_that_joined_meanwhile_stays(module: Write) -> None:
    class Finder:
        @staticmethod
        def find_spec(*_: object) -> None:
            return None

    place, before, finder = sys.meta_path, list(sys.meta_path), Finder()
    cancel = when_imported(module(""), lambda: None)
    sys.meta_path.append(finder)  # type: ignore[arg-type]
    cancel()
    assert sys.meta_path is place
    assert sys.meta_path == [*before, finder]
    sys.meta_path.remove(finder)  # type: ignore[arg-type]


def test_another_finder_that_asks_all_others_is_no_endless_circle(
    module: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asking:
        def find_spec(self, *arguments: object) -> object:
            found = (one.find_spec(*arguments) for one in sys.meta_path if one is not self)  # type: ignore[arg-type]
            return next((spec for spec in found if spec), None)

    name, calls = module(""), []
    cancel = when_imported(name, lambda: calls.append(1))
    before = [finder for finder in sys.meta_path if finder is not imports._watch]
    monkeypatch.setattr(sys, "meta_path", [Asking(), *sys.meta_path])
    importlib.import_module(name)
    cancel()
    assert calls == [1]
    monkeypatch.undo()
    assert sys.meta_path == before


def test_a_module_that_puts_another_object_in_its_place_is_told(module: Write) -> None:
    name = module("import sys, types\nsys.modules[__name__] = types.SimpleNamespace(value=1)")
    calls = []
    when_imported(name, lambda: calls.append(sys.modules[name].value))
    importlib.import_module(name)
    assert calls == [1]


def test_a_cancelled_watch_is_not_told(module: Write) -> None:
    name, calls = module(""), []
    when_imported(name, lambda: calls.append("kept"))
    cancel = when_imported(name, lambda: calls.append("cancelled"))
    cancel()
    cancel()
    importlib.import_module(name)
    assert calls == ["kept"]


def test_the_loader_keeps_its_type_and_is_left_as_it_was(module: Write) -> None:
    name = module("")
    cancel = when_imported(name, lambda: None)
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert type(spec.loader) is SourceFileLoader
    loader = importlib.import_module(name).__loader__
    assert type(loader) is SourceFileLoader
    assert "exec_module" not in vars(loader)
    cancel()


def test_a_failing_import_fails_as_before_and_is_watched_again(module: Write) -> None:
    name, calls = module("raise ValueError('not yet')"), []
    when_imported(name, lambda: calls.append(1))
    with pytest.raises(ValueError, match="not yet"):
        importlib.import_module(name)
    assert calls == []
    module("value = 1")
    importlib.import_module(name)
    assert calls == [1]


def test_a_callback_that_fails_leaves_the_import_alone(
    module: Write, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ValueError("of the callback")

    name, calls = module("value = 1"), []
    when_imported(name, fails)
    when_imported(name, lambda: calls.append(1))
    assert importlib.import_module(name).value == 1
    assert calls == [1]
    assert "of the callback" in caplog.text


def test_an_import_under_way_on_another_thread_is_waited_for(module: Write) -> None:
    name = module("import builtins; builtins.started.set(); builtins.go_on.wait(10); value = 1")
    import builtins

    builtins.started, builtins.go_on = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    told = threading.Event()
    importing = threading.Thread(target=importlib.import_module, args=(name,))
    importing.start()
    builtins.started.wait(10)  # type: ignore[attr-defined]
    assert not is_imported(name)
    when_imported(name, told.set)
    assert not told.is_set()
    builtins.go_on.set()  # type: ignore[attr-defined]
    assert told.wait(10)
    importing.join()
    del builtins.started, builtins.go_on  # type: ignore[attr-defined]


def test_many_threads_that_import_at_once_tell_once(module: Write) -> None:
    name, calls = module("import time; time.sleep(0.05)"), []
    when_imported(name, lambda: calls.append(1))
    threads = [threading.Thread(target=importlib.import_module, args=(name,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]

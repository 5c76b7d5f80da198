"""Files of models: how they are found, refused and written; by a kind of file whose ops are lines of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

import amanda
from amanda.action import routine_name
from amanda.backend import DRIVER_API, Artefact, Inlining, Namespace, OpFacts, TensorOps
from amanda.errors import ArtefactError, NotTraceableError
from amanda.export import inlining
from amanda.files import replacing_all


class Numbers(TensorOps):
    """Tensors that are integers."""

    is_tensor = signature = shapes = version = detach_value = differentiable_copy = staticmethod(
        lambda value: None
    )
    without_autodiff = staticmethod(nullcontext)
    write = staticmethod(lambda target, value, isolated: None)
    straight_through = staticmethod(lambda original, value: value)


class Sums(Artefact):
    """A file with a number on each line, which is added to what comes from the line above."""

    api = DRIVER_API
    kind = "sum"

    def __init__(self, path: Path) -> None:
        self.lines = list(map(int, path.read_text().split()))
        self.lines_written = list(self.lines)

    def instrument(self, inlining: Inlining) -> None:
        analysis = inlining.analysis(Numbers())
        self.lines_written = list(self.lines)
        for number, line in enumerate(self.lines):
            facts = OpFacts("add", number, Namespace("toy/1/graph/static"), ["x"], [line], op_type="add")
            for action in analysis.analyse_forward(facts, [None]).before:
                self.lines_written[number] = action.func(self.lines_written[number], **action.kwargs)
                inlining.record_stored(action)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        path.write_text("\n".join(map(str, self.lines_written)))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inlining, "artefact_kind", lambda path: Sums)
    path = tmp_path / "model.sum"
    path.write_text("1\n2\n3")
    return path


@amanda.traceable
def doubled(value: int) -> int:
    return 2 * value


class Doubling(amanda.Tool):
    def __init__(self, routine: Callable[..., Any] = doubled, backward: bool = False) -> None:
        self.static: list[bool] = []
        self.routine = routine
        self.add_inst_for_op(self.analyse)
        if backward:
            self.add_inst_for_op(self.analyse, backward=True)

    def analyse(self, context: amanda.OpContext) -> None:
        self.static.append(context.is_static())
        context.insert_before_op(self.routine)


def test_a_copy_has_the_routines(model: Path, tmp_path: Path) -> None:
    tool = Doubling(backward=True)
    done = amanda.instrument(model, tool, out=tmp_path / "out.sum")
    assert (tmp_path / "out.sum").read_text() == "2\n4\n6"
    assert model.read_text() == "1\n2\n3"
    assert (done.analysed, done.kind, tool.static) == (3, "sum", [True] * 3)
    assert done.inlined[0] == ("add", "", "add", "insert_before_op", "doubled", "Doubling", True)
    assert [(entry.what, entry.reason) for entry in done.left] == [
        ("backward ops for Doubling", "a file holds the forward pass alone")
    ]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model.sum", "out.sum"]


def counted(value: int) -> int:
    return value


def with_run(value: int, run: Mapping[str, Any]) -> int:
    return value


@pytest.mark.parametrize(
    ("routine", "why"),
    [
        (counted, f"insert_before_op(counted at {__file__}:"),
        (counted, "): it is not marked @amanda.traceable"),
        (amanda.traceable(with_run), "it takes `run`"),
        (
            amanda.traceable(amanda.observer(lambda value: None)),
            "it gives nothing to what the model computes",
        ),
    ],
)
def test_routines_that_need_python_are_listed_and_nothing_is_written(
    model: Path, tmp_path: Path, routine: Callable[..., Any], why: str
) -> None:
    with pytest.raises(NotTraceableError) as error:
        amanda.instrument(model, Doubling(routine), out=tmp_path / "out.sum")
    assert f"Doubling, insert_before_op({routine_name(routine)}): " in str(error.value)
    assert why in str(error.value)
    assert "at add, add, add" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model.sum"]


def test_a_file_is_there_as_a_whole_or_not_at_all(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Sums, path: Path, about: Mapping[str, Any]) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Sums, "write", interrupted)
    (tmp_path / "there.sum").write_text("before")
    for name in ("out.sum", "there.sum"):
        with pytest.raises(KeyboardInterrupt):
            amanda.instrument(model, Doubling(), out=tmp_path / name, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.sum", "there.sum"]
    assert (tmp_path / "there.sum").read_text() == "before"


@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("there.sum", "is there already; force"),
        ("model.sum", "never changed"),
        ("nowhere/out.sum", "there is no folder"),
        ("out.onnx", "does not end in .sum"),
    ],
)
def test_what_may_not_be_written_is_refused_before_anything_is_read(
    model: Path, tmp_path: Path, out: str, why: str
) -> None:
    (tmp_path / "there.sum").write_text("before")
    tool = Doubling()
    with pytest.raises(ArtefactError, match=why):
        amanda.instrument(model, tool, out=tmp_path / out)
    assert not tool.static
    assert (tmp_path / "there.sum").read_text() == "before"
    amanda.instrument(model, tool, out=tmp_path / "there.sum", force=True)
    assert (tmp_path / "there.sum").read_text() == "2\n4\n6"


def test_data_beside_a_file_are_put_in_place_with_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: Sums, path: Path, about: Mapping[str, Any]) -> None:
        path.write_text(str(about["model"]))
        Path(f"{path}.data").write_text("data")

    monkeypatch.setattr(Sums, "write", write)
    (tmp_path / "out.sum.data").write_text("before")
    with pytest.raises(ArtefactError, match=r"out.sum.data is there already"):
        amanda.instrument(model, Doubling(), out=tmp_path / "out.sum")
    assert not (tmp_path / "out.sum").exists()
    amanda.instrument(model, Doubling(), out=tmp_path / "out.sum", force=True)
    assert [(tmp_path / name).read_text() for name in ("out.sum", "out.sum.data")] == ["model.sum", "data"]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("old")
    for force in (False, True):
        outcome = nullcontext() if force else pytest.raises(ArtefactError)
        with outcome, replacing_all(target, force) as path:
            path.mkdir()
            (path / "new").write_text("new")
        assert [path.name for path in target.iterdir()] == ["new" if force else "old"]
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_tools_that_insert_nothing_write_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="insert nothing at any of the 3 ops"):
        amanda.instrument(model, amanda.Tool(), out=tmp_path / "out.sum")


class Halves(amanda.Tool):
    """Writes the lines of a file into two."""

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[amanda.Tool], None], about: Mapping[str, Any]
    ) -> None:
        self.doubling = Doubling()
        analyse(self.doubling)
        lines = source.read_text().split()
        if len(lines) < 2:
            raise ArtefactError("there is one line")
        for name, part in (("first", lines[:1]), ("second", lines[1:])):
            (folder / name).write_text(" ".join(part))
        (folder / "about").write_text(about["model"])


def test_a_tool_writes_a_folder_of_files(model: Path, tmp_path: Path) -> None:
    tool = Halves()
    done = amanda.instrument(model, tool, out=tmp_path / "parts")
    assert {path.name: path.read_text() for path in (tmp_path / "parts").iterdir()} == {
        "first": "1", "second": "2 3", "about": "model.sum",
    }  # fmt: skip
    assert (done.path, done.kind, done.analysed, done.inlined) == (tmp_path / "parts", "sum in parts", 3, [])
    assert tool.doubling.static == [True] * 3
    with pytest.raises(ArtefactError, match="Halves, Doubling: a tool that writes a model in several files"):
        amanda.instrument(model, tool, Doubling(), out=tmp_path / "other")
    with pytest.raises(ArtefactError, match="parts is there already"):
        amanda.instrument(model, tool, out=tmp_path / "parts")
    (tmp_path / "model.txt").touch()
    with pytest.raises(ArtefactError, match=r"model.txt is a file, and what is written is a folder"):
        amanda.instrument(model, tool, out=tmp_path / "model.txt", force=True)
    model.write_text("7")
    with pytest.raises(ArtefactError, match="there is one line"):
        amanda.instrument(model, tool, out=tmp_path / "parts", force=True)
    assert (tmp_path / "parts" / "first").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.sum", "model.txt", "parts"]


def test_state_that_no_op_asks_for_is_an_error(model: Path, tmp_path: Path) -> None:
    tool = Doubling()
    tool.load_state_dict({"encoder/linear/mask": 1})
    with pytest.raises(ArtefactError, match="Doubling was given for encoder/linear/mask"):
        amanda.instrument(model, tool, out=tmp_path / "out.sum")


def test_a_tool_that_prepares_sees_every_op_before_the_first_is_instrumented(
    model: Path, tmp_path: Path
) -> None:
    class Total(amanda.Tool):
        """Adds what all lines come to."""

        total = 0
        prepares = False
        calibrates_when_prepared = True

        def __init__(self) -> None:
            self.add_inst_for_op(self.analyse)

        @contextmanager
        def calibrating(self) -> Iterator[None]:
            self.prepares = True
            yield
            self.prepares = False

        def analyse(self, context: amanda.OpContext) -> None:
            if self.prepares:
                self.total += context.get_value(0)
            else:
                context.insert_before_op(amanda.traceable(lambda value: self.total))

    class Former(Total):
        """Overrides the method by its former name."""

        calibrates_when_prepared = False

        def preparing(self) -> AbstractContextManager[None]:
            return self.calibrating()

    done = amanda.instrument(model, Total(), out=tmp_path / "out.sum")
    assert (tmp_path / "out.sum").read_text() == "6\n6\n6"
    assert done.analysed == 3
    with pytest.warns(DeprecationWarning, match="Former.preparing is deprecated since amanda-core 0.2"):
        amanda.instrument(model, Former(), out=tmp_path / "former.sum")
    assert (tmp_path / "former.sum").read_text() == "6\n6\n6"


@pytest.mark.parametrize("name", ["model.txt", "model", "folder"])
def test_other_files_are_told_apart_from_those_that_drivers_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for file in ("model.txt", "model", "folder/model.bin"):
        (tmp_path / file).write_text("")
    with pytest.raises(ArtefactError) as error:
        amanda.instrument(tmp_path / name, amanda.Tool(), out=tmp_path / "out.txt")
    assert f"{name} is not a file that an installed driver reads" in str(error.value)
    assert "drivers come by pip install " in str(error.value)
    with pytest.raises(ArtefactError, match=r"nothing\.onnx does not exist"):
        amanda.instrument(tmp_path / "nothing.onnx", amanda.Tool(), out=tmp_path / "out.onnx")

"""What annotations accept, and what `checked` says of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import amanda
from amanda.errors import OptionError, ScopeError, ToolError
from amanda.options import (
    AnyFloat,
    File,
    Length,
    Mismatch,
    Name,
    NonNegativeFloat,
    OutputFile,
    OutputFolder,
    PositiveInt,
    Range,
    Seed,
    Share,
    Where,
    checked,
    deprecated,
    kind_of,
    options_of,
    renamed,
)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (bool, [True, False], [0, 1, "no", None]),
        (int, [0, -3, 2**63 - 1], [True, 1.0, "1", 2**63, 10**5000, nan]),
        (float, [0.5, 3, -1e308], [nan, inf, True, "0.5", 1j, Fraction(1, 2), 10**400]),
        (AnyFloat, [nan, -inf, 1], ["nan", None]),
        (PositiveInt, [1, 7], [0, -1, 2**63]), (Seed, [0, 2**64 - 1], [-1, 2**64]),
        (Share, [0, 0.5, 1], [-0.1, 1.1, nan]),
        (Annotated[float, Range(above=0, below=1)], [0.5], [0, 1]),
        (str, ["", "a"], [b"a", 1]), (Name, ["a"], [""]),
        (Literal["no", "full"], ["no"], ["No", "", None, True]), (Literal[1, 3], [1, 3], [2, True, "1"]),
        (int | None, [None, 3], ["x", 1.5]),
        (Sequence[int], [[], (1, 2), range(3)], ["12", 1, {1}, [1, nan], [[1]]]),
        (Annotated[Sequence[int], Length(2)], [[1, 2]], [[1]]),
        (tuple[int, int], [(1, 2)], [(1,), (1, 2, 3), 1, ("a", "b")]),
        (Iterable[Share], [[0.5], (), {0.5}], ["0.5", [2]]),
        (Mapping[str, Share], [{}, {"a": 0.5}], [{"a": 2}, {1: 0.5}, [("a", 0.5)]]),
        (Callable[[], Any], [len, int], [3, None]), (Path, ["a", Path("a")], ["", b"a", 3, "a\0b"]),
        (Annotated[int, Where("an even number", lambda n: n % 2 == 0)], [2], [3, "2"]),
        (Any, [object(), None], []), (amanda.Tool, [amanda.Tool()], [amanda.Tool, None]),
    ],
)  # fmt: skip
def test_an_annotation_accepts(annotation: Any, right: list[Any], wrong: list[Any]) -> None:
    kind = kind_of(annotation)
    for value in right:
        kind.accept(value)
    for value in wrong:
        with pytest.raises(Mismatch):
            kind.accept(value)


def test_a_list_without_an_end_is_refused() -> None:
    def endless() -> Any:
        while True:
            yield 1

    with pytest.raises(Mismatch, match="1000001 items"):
        kind_of(Iterable[int]).accept(endless())
    with pytest.raises(Mismatch, match="items"):
        kind_of(Sequence[int]).accept(range(10**12))


def test_files_and_folders_are_where_they_must_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert kind_of(File).accept(file) == file
    assert kind_of(OutputFile).accept(tmp_path / "new") == tmp_path / "new"
    assert kind_of(OutputFolder).accept(tmp_path / "a/b/c") == tmp_path / "a/b/c"
    for annotation, path, why in (
        (File, tmp_path / "none", "no such file"), (File, tmp_path, "it is a folder"),
        (OutputFile, tmp_path / "none/new", "there is no folder"), (OutputFile, tmp_path, "it is a folder"),
        (OutputFolder, file / "a", "is not a folder"), (OutputFolder, "x" * 5000, "too long"),
        (OutputFolder, "\ud800", "not a valid file name"), (File, "x" * 5000, "name too long"),
    ):  # fmt: skip
        with pytest.raises(Mismatch, match=why):
            kind_of(annotation).accept(path)


class Sampled(amanda.Tool):
    @checked
    def __init__(
        self, share: Share = 0.5, *, names: Sequence[Name] = (), scale: NonNegativeFloat = 1
    ) -> None:
        self.share, self.names, self.scale = share, names, scale


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampled(2), "Sampled: share is 2; give a number from 0 to 1"),
        (lambda: Sampled(scale=nan), r"Sampled: scale is nan; give a number >= 0 \(it is not finite\)"),
        (lambda: Sampled(names=["a", 3]), r"names is \['a', 3\]; give a list of strings \(item 1 is 3\)"),
        (lambda: Sampled(shar=1), "unexpected keyword argument 'shar'; did you mean share?"),
        (lambda: Sampled(share=10**5000), "share is a int that has no repr; give a number from 0 to 1"),
        (lambda: amanda.load_tool(3), "load_tool: name is 3; give a string"),
        (lambda: amanda.list_tools(load="no"), "list_tools: load is 'no'; give True or False"),
        (lambda: amanda.Tool(namespace=3), "Tool: namespace is 3; give a string or None"),
    ],
)
def test_an_error_names_tool_option_value_and_what_is_right(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make()


def test_an_error_names_the_only_option_that_has_such_a_word() -> None:
    @checked
    def sample(
        share: Share, order: Literal["first", "last"] = "first", name: Name = "a",
        first: Literal["up", "down"] = "up", second: Literal["up"] = "up",
    ) -> None: ...  # fmt: skip

    for word, hint in (("last", "; did you mean order='last'?"), ("any", ""), ("up", "")):
        with pytest.raises(OptionError) as caught:
            sample(word)  # type: ignore[arg-type]
        assert str(caught.value) == f"sample: share is {word!r}; give a number from 0 to 1{hint}"


def test_errors_of_scopes_and_registration_keep_their_classes() -> None:
    with pytest.raises(ScopeError, match=r"compiled is 'eagre'.*did you mean 'eager'"):
        amanda.apply(compiled="eagre")  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="backward is 'no'; give True or False"):
        amanda.Tool().add_inst_for_op(lambda context: None, backward="no")  # type: ignore[arg-type]
    assert issubclass(OptionError, (ToolError, ValueError))


def test_a_subclass_without_a_constructor_and_one_with_its_own_are_checked() -> None:
    class Plain(Sampled):
        pass

    class Own(Sampled):
        def __init__(self, **options: Any) -> None:
            super().__init__(share=0.25, **options)

    assert Plain(0.1).share == 0.1
    assert Own(scale=2).scale == 2
    for kind in (Plain, Own):
        with pytest.raises(OptionError, match=f"{kind.__name__}: scale is -1"):
            kind(scale=-1)


def test_options_are_described_in_words() -> None:
    assert list(map(str, options_of(Sampled).values())) == [
        "share: a number from 0 to 1 = 0.5", "names: a list of strings = ()", "scale: a number >= 0 = 1",
    ]  # fmt: skip


@deprecated(use="area", since="amanda-core 0.2", gone="0.4")
def surface(width: float) -> float:
    """Return the area of a square."""
    return width**2


@renamed(since="amanda-core 0.2", gone="0.4", out="path")
@checked
def written(path: str = "", count: int = 1) -> tuple[str, int]:
    return path, count


def test_a_former_name_works_and_warns_at_the_line_of_its_caller() -> None:
    text = "surface is deprecated since amanda-core 0.2 and goes in 0.4: use area"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert surface(3) == 9
    assert caught[0].filename == __file__
    assert surface.__doc__ == "Return the area of a square."


def test_an_option_under_its_former_name_is_checked_and_warns() -> None:
    text = r"written\(out=...\) is deprecated since amanda-core 0.2 and goes in 0.4: use path=..."
    with pytest.warns(DeprecationWarning, match=text) as caught:
        assert written(out="there", count=2) == ("there", 2)  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    error = pytest.raises(OptionError, match="path is 3; give a string")
    with pytest.warns(DeprecationWarning, match="use path"), error:
        written(out=3)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="out is the former name of path; give path alone"):
        written(path="here", out="there")  # type: ignore[call-arg]
    assert list(options_of(written)) == ["path", "count"]
    assert written("here") == ("here", 1)


def test_a_list_of_words_is_read_once() -> None:
    kind = kind_of(list[Literal["a", "b", "c", "d"]] | None)
    assert kind.words == "a list of 'a', 'b', 'c' or 'd', or None"
    assert kind.text == "list of a, b, c or d, or none"

"""What is said to `amanda run`: tools, options, selections, configuration files; and what is wrong there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

import amanda
from amanda.__main__ import COMMON_OPTIONS, main
from amanda.errors import AmandaError
from amanda.tools.command import SpecError, ToolSpec, options_of, run
from amanda.tools.command._line import read_config
from amanda.tools.command._run import _in_long_form, find_command
from amanda.tools.command._specs import SELECTORS, Unreadable, make_tools, merge_specs, read, split_tools
from amanda.tools.flops import FlopsResult, FlopsTool, OpCost
from amanda.tools.nan import NanTool
from amanda.tools.results import Mergeable
from amanda.tools.stats import StatsTool
from amanda.tools.steps import Steps


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", int, 12), ("0x10", int, 16), ("-3", int, -3), ("1e-3", float, 1e-3), ("3", float, 3.0),
        ("yes", bool, True), ("Off", bool, False), ("a=b", str, "a=b"),
        ("~/x", Path, Path("~/x").expanduser()),
        ("none", int | None, None), ("5", int | None, 5), ("none", str | None, None), ("5", int | str, 5),
        ("five", int | str, "five"), ("full", Literal["no", "full"], "full"), ("2", Literal[1, 2], 2),
        ("a+b", list[str], ["a", "b"]), (["a+b", "c"], Sequence[str], ["a", "b", "c"]),
        ("1+2", tuple[int, ...], (1, 2)), ("1e+5+2", list[float], [1e5, 2.0]), ("", list[int], []),
        (["7"], int, 7), (7, int, 7), (7, float, 7), (True, bool, True),
        ([0.1, 0.2], Sequence[float], [0.1, 0.2]), ("x", Any, "x"),
    ],
)  # fmt: skip
def test_values_are_read_as_annotated(text: Any, kind: Any, value: Any) -> None:
    read_value = read(text, kind)
    assert read_value == value
    assert type(read_value) is type(value)


@pytest.mark.parametrize(
    ("given", "kind", "part"),
    [
        ("1.5", int, "integer"), ("x", float, "a number"), ("maybe", bool, "true or false"),
        ("ful", Literal["no", "full"], "no or full; did you mean full?"),
        ("x", int | None, "integer or none"),
        ("1+x", list[int], "list of integer"), (["1", "2"], int, "not several"), (3, str, "string"),
        (True, int, "integer"), ("x", dict[str, int], "make the tool in Python"),
        ("x", dict[str, int] | None, "make the tool in Python"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_what_is_expected(given: Any, kind: Any, part: str) -> None:
    with pytest.raises(Unreadable, match=part.replace("?", r"\?")):
        read(given, kind)


def test_options_are_those_of_the_constructor() -> None:
    assert list(map(str, options_of(NanTool).values()))[:4] == [
        "stop: true or false = false", "inf: true or false = false", "backward: true or false = true",
        "limit: integer >= 1 = 20",
    ]  # fmt: skip
    assert [name for name in options_of(NanTool) if name in SELECTORS] == list(SELECTORS)[
        :7
    ]  # those of `select`
    assert not options_of(FlopsTool)["formulas"].readable
    assert str(options_of(StatsTool)["quantiles"]) == "quantiles: list of numbers from 0 to 1 = 0.01+0.5+0.99"


@pytest.mark.parametrize(
    ("text", "name", "given"),
    [
        ("flops", "flops", {}),
        ("nan:stop", "nan", {"stop": ["true"]}),
        ("nan:stop=no,limit=3", "nan", {"stop": ["no"], "limit": ["3"]}),
        ("flops:type=conv2d,type=linear", "flops", {"type": ["conv2d", "linear"]}),
        ("dump:folder='a,b',every=2", "dump", {"folder": ["a,b"], "every": ["2"]}),
        ('flops:out="C:\\x y.csv"', "flops", {"out": ["C:\\x y.csv"]}),
    ],
)
def test_a_tool_is_said_in_a_word(text: str, name: str, given: dict[str, Any]) -> None:
    assert ToolSpec.parse(text) == ToolSpec(name, given)


def test_a_result_with_forms_of_its_own_says_itself_what_it_can_be() -> None:
    tooling = ToolSpec.parse("profile:out=step.trace.json.gz").make(Steps())
    assert tooling.out == Path.cwd() / "step.trace.json.gz"


def test_a_tool_is_made_with_its_options_and_its_selection() -> None:
    tooling = ToolSpec.parse(
        "nan:stop,limit=3,type=conv2d+linear,module=a,module=b,exclude=a.c,out=x.json,end=5"
    ).make(Steps())
    assert isinstance(tooling.tool, NanTool)
    assert (tooling.tool._stop, tooling.tool._limit, tooling.out) == (True, 3, Path.cwd() / "x.json")
    assert str(tooling.tool._amanda.admissions[0]) == "type=conv2d+linear, module=a+b, exclude=a.c"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("flop", ["no tool 'flop'", "did you mean flops?"]),
        ("diff", ["no tool 'diff'; diff is a command: amanda diff --help"]),
        ("live", ["live is the option log=: amanda run stats:log=jsonl:stats.jsonl train.py"]),
        ("dynamic_prune", ["activation_prune, attention_prune and dynamic_channel_prune"]),
        ("xyzzy", ["there are ", "trace; a tool of your own is MODULE.CLASS, as mytools.ZeroSmall"]),
        ("no_such_module.Tool", ["tool no_such_module.Tool cannot be imported: No module named"]),
        ("nan:stap", ["tool nan has no option 'stap'", "did you mean stop?"]),
        ("dump:output=ful", ["tool dump has no option 'output'", "did you mean outputs=full?"]),
        ("flops:part=backwards", ["did you mean phase=backward?"]),
        ("flops:by=layer", ["expected list of phase, type, module or source, or none, was given 'layer'"]),
        ("nan:limit=few", ["tool nan, option limit", "expected an integer", "'few'"]),
        ("flops:formulas=x", ["tool flops, option formulas", "make the tool in Python"]),
        ("flops:phase=front", ["option phase", "expected forward, backward, ", "'front'"]),
        ("flops:start=5,end=2", ["tool flops: end is 2, start 5"]),
        ("stats:every=0", ["tool stats", "every"]),
        ("flops:module='a", ["quotation mark"]),
        (
            "mapping",
            ["tool mapping needs rules, and text cannot express its values: make the tool in Python"],
        ),
        (":limit=3", ["':limit=3' names no tool; give TOOL or TOOL:option=value,..."]),
        ("standard_mapping:out=a.json", ["option out: the tool has no result"]),
        ("prune:xyzzy=1", ["there are begin, ", "module, norm, out, pattern"]),
        ("flops:out=a.xyz", ["option out", "a.xyz ends in none of .csv, .html, .json, .txt"]),
    ],
)
def test_what_is_wrong_with_a_tool_is_said(text: str, parts: list[str]) -> None:
    with pytest.raises(AmandaError) as caught:
        ToolSpec.parse(text).make(Steps())
    assert all(part in str(caught.value) for part in parts), caught.value


TOML = """
output = "results"
[tools.flops]
module = ["a", "b"]
[tools.nan]
stop = true
limit = 3
"""
YAML = """
output: results
tools:
  flops:
    module: [a, b]
  nan:
    stop: true
    limit: 3
"""


@pytest.mark.parametrize(("name", "text"), [("amanda.toml", TOML), ("amanda.yaml", YAML)])
def test_a_configuration_says_the_same_in_both_forms(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = read_config(tmp_path / name)
    assert config.output == Path("results")
    flops, nan = (spec.make(Steps()) for spec in config.tools)
    assert str(flops.tool._amanda.admissions[0]) == "module=a+b"
    assert (nan.tool._stop, nan.tool._limit) == (True, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "text", "part"),
    [
        ("a.toml", "tools = ", "is no TOML"),
        ("a.yaml", "tools: [", "is no YAML"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "is no YAML"),
        ("a.json", "{}", "neither .toml nor .yaml"),
        ("a.toml", "[tool.flops]", "has 'tool'; did you mean tools?"),
        ("a.toml", "tools = 3", "give a table of tools"),
        ("a.toml", "[tools]\nflops = 3", "tool flops is 3; give a table of its options"),
        ("a.yaml", "- flops", "has no keys"),
        ("a.toml", "output = 3", "give the path of a folder"),
        ("none.toml", None, "No such file"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(
    tmp_path: Path, name: str, text: str | None, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert run(["--config", str(tmp_path / name), "script.py"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("amanda run: ")
    assert name in message
    assert part in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["script.py"], "no tool is given"),
        (["hf:llama"], "no tool is given: amanda run flops PROGRAM, -t flops"),
        (["-t", "flops"], "no program is given"),
        (["flops,profile"], "no program is given"),
        (["flop", "script.py"], "did you mean flops?"),
        (["flops:module=a,nan:stap", "script.py"], "tool nan has no option 'stap'"),
        (["flops", "no_such_script.py"], "a command on PATH, or a model such as hf:llama"),
        (["-t", "flop", "script.py"], "did you mean flops?"),
        (
            ["flops", "nan", "x.py", "-v"],
            "is a tool, not a program; join tools by commas: amanda run flops,nan x.py -v",
        ),
        (
            ["flops", "nan:stop", "x.py"],
            "'nan:stop' is a tool, not a program; join tools by commas: amanda run flops,nan:stop x.py",
        ),
        (["-t", "flops", "no_such_script.py"], "there is no 'no_such_script.py'; give a script, -m module"),
        (
            ["-t", "flops", "-o", __file__, "script.py"],
            "test_command.py is a file; results are saved in a folder",
        ),
        (["-t", "flops", "--", "-I", "script.py"], "under python -I, which ignores"),
        (["-t", "flops", "--", "-uE", "script.py"], "under python -E, which ignores"),
        (["flops", "--full", "--top", "3", "script.py"], "give --full or --top, not both"),
        (["--quite"], "Did you mean '--quiet'?"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert part in capsys.readouterr().err


def test_the_name_of_a_script_that_was_meant_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="did you mean train"):
        find_command(["trian.py"])


@pytest.mark.parametrize(
    ("word", "tools"),
    [
        ("flops", ["flops"]),
        ("flops,profile", ["flops", "profile"]),
        ("flops:module=a,type=conv2d,nan:stop,inf", ["flops:module=a,type=conv2d", "nan:stop,inf"]),
        ("flops:out=a.json,nan", ["flops:out=a.json", "nan"]),
        ("dump:folder='a,b',nan", ["dump:folder='a,b'", "nan"]),
    ],
)
def test_a_word_may_name_several_tools(word: str, tools: list[str]) -> None:
    assert split_tools(word) == tools


@pytest.mark.parametrize(
    ("line", "long"),
    [
        ("flops train.py --epochs 1", "-t flops -- train.py --epochs 1"),
        ("flops,nan -o results -q train.py", "-t flops -t nan -o results -q -- train.py"),
        ("-q flops -m package", "-q -t flops -- -m package"),
        ("flops -- train.py", "-t flops -- train.py"),
        ("flops hf:llama --steps 2", "-t flops -- hf:llama --steps 2"),
        ("-t flops nan", "-t flops -- nan"),
        ("--config a.toml torchrun train.py", "--config a.toml -- torchrun train.py"),
        ("train.py", "-- train.py"),
        ("flops train.py --device meta -q", "-t flops -- train.py --device meta -q"),
        ("flops --device meta hf:bert", "-t flops -- hf:bert --device meta"),
        ("--backward flops --steps=2 -- hf:bert", "-t flops -- hf:bert --backward --steps=2"),
        ("flops hf:bert --full --device meta -o a", "-t flops --full -o a -- hf:bert --device meta"),
        ("flops hf:bert --help", "-t flops -- hf:bert --help"),
    ],
)
def test_tools_may_be_the_first_word_and_options_of_models_anywhere(line: str, long: str) -> None:
    assert _in_long_form(line.split()) == long.split()


def test_an_option_of_models_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["flops", "--device", "meta", "train.py"]) == 2
    assert "--device is an option of models, as in hf:bert --device meta" in capsys.readouterr().err


def test_a_model_is_a_program(tmp_path: Path) -> None:
    assert find_command(["hf:llama", "--steps", "2"]) == (
        [sys.executable, "-m", "amanda.tools.models", "hf:llama", "--steps", "2"], True,
    )  # fmt: skip


def test_info_lists_the_options_of_every_tool(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["info", "nan"]) == 0
    output = capsys.readouterr().out
    lines = [line.split()[0] for line in output.partition("on the command line:")[2].splitlines() if line]
    assert [line for line in lines if line in SELECTORS] == list(SELECTORS) == list(COMMON_OPTIONS)
    assert "  stop      false  true or false\n" in output
    assert max(len(line) for line in output.partition("Options")[2].splitlines()) <= 80


def test_info_shows_a_tool_by_its_import_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools_of_mine.py").write_text(
        "import amanda\n\n\nclass ZeroSmall(amanda.Tool):\n"
        "    'Zero small values.'\n    def __init__(self, threshold: float = 0.5) -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["info", "tools_of_mine.ZeroSmall"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tools_of_mine.ZeroSmall: tools_of_mine.ZeroSmall\n")
    assert "Zero small values." in shown
    assert "threshold  0.5" in shown
    assert main(["info", "tools_of_mine.ZeroLarge"]) == 2
    assert "tool tools_of_mine.ZeroLarge cannot be imported: " in capsys.readouterr().err
    assert main(["info", "os.path"]) == 2
    assert "os.path is a module, not the class of a tool" in capsys.readouterr().err


def test_info_names_the_public_path_of_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "flops"]) == 0
    assert capsys.readouterr().out.startswith("flops: amanda.tools.flops.FlopsTool\n")


def test_the_name_of_a_tool_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", "hf:bert"]) == 2
    message = capsys.readouterr().err
    assert "no command 'flops'; did you mean `" in message
    assert message.endswith("amanda run flops`?\n")


def test_a_table_of_a_configuration_file_is_a_mapping() -> None:
    kind = int | Mapping[str, int | None] | None
    assert read({"a": "3", "b": None}, kind) == {"a": 3, "b": None}
    with pytest.raises(Unreadable, match="expected integer or none; by name in a configuration file"):
        read({"a": "x"}, kind)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "amanda run -t flops -- train.py" in capsys.readouterr().out


def test_a_tool_that_is_given_twice_is_refused_unless_its_options_differ() -> None:
    with pytest.raises(SpecError, match="tool flops:module=a is given twice; give it once, or with other"):
        make_tools(map(ToolSpec.parse, ("flops:module=a", "nan", "flops:module=a")))
    assert [tooling.name for tooling in make_tools(map(ToolSpec.parse, ("flops", "flops:module=a")))] == [
        "flops", "flops-2",
    ]  # fmt: skip


def test_the_command_line_comes_before_the_configuration() -> None:
    config = [ToolSpec("flops", {"module": "a", "out": "x.json"}), ToolSpec("nan")]
    line = [ToolSpec.parse("flops:module=b"), ToolSpec.parse("flops:module=c"), ToolSpec("stats")]
    specs = merge_specs(config, line)
    assert [(spec.name, spec.options) for spec in specs] == [
        ("flops", {"module": ["b"], "out": "x.json"}),
        ("nan", {}),
        ("flops", {"module": ["c"]}),
        ("stats", {}),
    ]  # fmt: skip
    assert [tooling.name for tooling in make_tools(specs)] == ["flops", "nan", "flops-2", "stats"]


def test_flops_of_ranks_add_up() -> None:
    def result(calls: int, module: str) -> FlopsResult:
        places = [
            OpCost("forward", "linear", scope, "a.py:1", calls, 10, 20, ((0, 5),), 40)
            for scope in ("", module)
        ]
        return FlopsResult(places)

    one, two = result(2, "a"), result(3, "b")
    merged = one.merged(FlopsResult.from_dict(two.to_dict()))
    assert isinstance(merged, Mergeable)
    assert [row[2:5] for row in merged.rows()] == [("", "a.py:1", 5), ("b", "a.py:1", 3), ("a", "a.py:1", 2)]
    assert merged.total("flops") == one.total("flops") + two.total("flops")
    assert one.total("calls") == 4


def test_findings_of_ranks_are_listed_together() -> None:
    import torch

    results = []
    for _ in range(2):
        finder = NanTool()
        with amanda.apply(finder):
            torch.log(-torch.ones(3)) + 1  # ones, neg, log, add
        results.append(finder.result)
    merged = results[0].merged(type(results[1]).from_dict(results[1].to_dict()))
    assert merged.findings == results[0].findings + results[1].findings
    assert (merged.executions, merged.passed_on) == (8, 2)


@pytest.mark.parametrize("kind", [FlopsResult, type(NanTool().result)])
def test_a_file_of_another_schema_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"its schema is 'amanda\.other', not 'amanda\."):
        kind.from_dict({"schema": "amanda.other", "version": 1})

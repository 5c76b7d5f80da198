"""Tables 3 and 4 of the paper for this repository, into docs/paper-tables.md.

    python benchmarks/paper/paper_tables.py [--write]

Their rows are in pages/paper-tables.yaml.  Every cell of the first is a test that has to exist; the lines
of the second are counted.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))
from _pages import render
from _tables import table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/paper-tables.md"
OF_TOOLS = "packages/*/tests/"
BY_HAND = "examples/baselines/"
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
MODES = ("PyTorch, eager", "TensorFlow, session", "TensorFlow, function", "TensorFlow, eager")
ROWS: dict[str, Any] = yaml.safe_load((ROOT / "benchmarks/pages/paper-tables.yaml").read_text())


def checked(file: str, name: str) -> str:
    """Return the path of a test.

    Raises LookupError where there is none.
    """
    path = ROOT / file
    tree = ast.walk(ast.parse(path.read_text())) if path.exists() else ()
    if name not in {one.name for one in tree if isinstance(one, ast.FunctionDef)}:
        raise LookupError(f"{file} has no test {name}")
    return file


def by_mode(task: dict[str, Any]) -> Sequence[str | None]:
    """Return the test of a task for each of `MODES`; None where the tool does not do it."""
    others = task.get("TensorFlow")
    return [task["PyTorch"], *(others if isinstance(others, list) else [others] * 3)]


def numbered() -> dict[str, int]:
    """Return the tests of all cells, with a number for each."""
    named = dict.fromkeys(test for task in ROWS["tasks"] for test in by_mode(task) if test is not None)
    return {test: i for i, test in enumerate(named, 1)}


def tasks() -> list[str]:
    """Return table 3: each cell has the number of its test, or a dash."""
    numbers = numbered()
    rows = (
        [task["task"], task.get("paper", "")]
        + [f"yes ({numbers[test]})" if test else "-" for test in by_mode(task)]
        for task in ROWS["tasks"]
    )
    return table(["task", "by other means, says the paper", *MODES], rows, words=True).splitlines()


def tests() -> list[str]:
    """Return the tests by their numbers."""
    found = []
    for test, number in numbered().items():
        file, _, name = test.partition("::")
        (path,) = ROOT.glob(OF_TOOLS + file)
        found.append(f"{number}. [{file}](../{checked(path.relative_to(ROOT).as_posix(), name)}): `{name}`")
    return found


def code_lines(file: Path, names: Iterable[str] = ()) -> int:
    """Return the number of lines with code: none that are blank, or have only comments or docstrings.

    names: of functions and classes at the top of the file; all of it if there are none.
    Raises LookupError for a name that is not there.
    """
    source = file.read_text()
    tree, wanted = ast.parse(source), set(names)
    top = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    if wanted - top.keys():
        raise LookupError(f"{file} has no {', '.join(sorted(wanted - top.keys()))}")
    docstrings = {
        line
        for one in ast.walk(tree)
        if isinstance(one, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if ast.get_docstring(one, clean=False) is not None
        for line in lines_of(one.body[0])
    }
    coded = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    if wanted:
        coded &= {
            line
            for name in wanted
            for part in (top[name], *top[name].decorator_list)
            for line in lines_of(part)
        }
    return len(coded - docstrings)


def lines_of(node: Any) -> range:
    """Return the lines of a node of a syntax tree."""
    return range(node.lineno, node.end_lineno + 1)


def package_of(tool: str) -> Path:
    """Return the folder of a tool's package, in whichever distribution."""
    (folder,) = ROOT.glob(f"packages/*/src/amanda/tools/{tool}")
    return folder


def package_lines(package: str) -> int:
    """Return the lines of a tool, with everything that it can do, on every framework."""
    return sum(map(code_lines, sorted(package_of(package).glob("*.py"))))


def projects() -> list[str]:
    """Return table 4."""
    titles = [
        "project", "in the paper: networks", "lines", "Amanda", "by hand: interface", "networks", "lines",
        "of them per family", "the tool: of its own", "networks", "equal results",
    ]  # fmt: skip
    rows = []
    for one in ROWS["projects"]:
        file, test = ROOT / BY_HAND / one["by_hand"], one["equal"].partition("::")
        checked(test[0], test[2])
        family = code_lines(file, one["family"]) if one["family"] else 0
        own = sum(code_lines(package_of(one["package"]) / part, names) for part, names in one["tool"].items())
        rows.append([
            one["project"], *one["paper"], one["interface"], one["families"],
            f"[{code_lines(file)}](../{BY_HAND}{one['by_hand']})", family, own, one["works_on"],
            f"[test](../{test[0]})",
        ])  # fmt: skip
    return table(titles, rows, words=True).splitlines()


def page() -> str:
    """Return docs/paper-tables.md."""
    others = (
        f"{name} [{code_lines(ROOT / BY_HAND / file)}](../{BY_HAND}{file})"
        for name, file in ROWS["others"].items()
    )
    return render(
        "paper-tables", tasks=tasks(), tests=tests(), projects=projects(), others=", ".join(others),
        prune=package_lines("prune"), quantize=package_lines("quantize"),
        dynamic=package_lines("dynamic_prune"),
        listing=code_lines(ROOT / "examples/pruning.py", ("PruningTool", "magnitude_mask")),
    )  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/paper-tables.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()

"""Tools by tensor subclasses and modes: what the tables of docs/limitations.md say, found by running.

`python -m amanda_docs.modes` writes the tables anew.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.dump import DumpTool
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool
from amanda_docs.pages import DOCS
from amanda_docs.subjects import MODES, OTHERS, SUBCLASSES, Program

PAGE = DOCS / "limitations.md"
BEGIN, END = "<!-- tools by modes and subclasses -->", "<!-- end of tools by modes and subclasses -->"
READING: dict[str, Callable[[], Any]] = {
    "flops": FlopsTool,
    "trace": TraceTool,
    "profile": ProfileTool,
    "coverage": CoverageTool,
    "nan": NanTool,
    "stats": StatsTool,
    "dump": lambda: DumpTool(Path(tempfile.mkdtemp()), inputs="full", outputs="full"),
    "inject": lambda: InjectTool(probability=0.0),
}
"""Tools that change nothing; `inject` looks for the elements that could have faults."""
CHANGING: dict[str, Callable[[], Any]] = {
    "prune": lambda: PruneTool(0.5),
    "quantize": lambda: QuantizeTool("dynamic"),
}
SUBJECTS: dict[str, Program] = {
    name: program
    for table in (SUBCLASSES, MODES, OTHERS)
    for name, program in table.items()
    if callable(program)
}
REASONS = {
    name: reason for table in (SUBCLASSES, MODES) for name, reason in table.items() if isinstance(reason, str)
}
ELSEWHERE = ("torch._inductor.", "torch._vendor.", "torch.onnx.", "torch.utils.data.")
"""Beginnings of names of classes that are named like tensors, and are nodes of graphs, or data sets."""
BASES = {"Tensor", "TorchDispatchMode", "TorchFunctionMode"}
_CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.M)


def bits(value: Any) -> Any:
    """Return what a result holds, to be compared with `==`; of a tensor without elements its form."""
    if not isinstance(value, torch.Tensor):
        return [bits(one) for one in value] if isinstance(value, (list, tuple)) else value
    form = type(value), value.dtype, tuple(value.shape), value.requires_grad
    if value.is_meta:
        return form
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value.as_subclass(torch.Tensor)
    return *form, value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(make: Callable[[], Any], program: Program, bare: Any = None) -> str:
    """Run a program under a tool, twice in one scope; return a cell of the table.

    bare: the program's results without a tool, for a tool that changes none.  Raise AssertionError unless
    those with the tool are the same, bit by bit.
    """
    tool = make()
    with amanda.apply(tool):
        results = [bits(program()) for _ in range(2)]
    if bare is not None and results != [bare, bare]:
        raise AssertionError(f"{tool} changes {bare} to {results}")
    # Without the table as text, which takes longer to be laid out than the programs to run.
    text = " ".join(map(str, (*tool.result.notes(), *tool.result.remarks, *tool.result.rows())))
    return "left" if _SAYS.search(text) else "✓"


_SAYS = re.compile(
    r"not read|is skipped|is left|Skipped |it has a shape and no elements|says itself|refuses to be read"
    r"|belongs to a transform"
)


def row(name: str) -> str:
    """Return the row of a subject."""
    return f"| {_title(name)} | {' | '.join(cells(SUBJECTS[name]))} |"


@cache
def cells(program: Program) -> list[str]:
    """Return the cells of a program, which may be that of several subjects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bare = bits(program())
        return [
            *(outcome(make, program, bare) for make in READING.values()),
            *(outcome(make, program) for make in CHANGING.values()),
        ]


def tables() -> str:
    """Return the table of all subjects, and the list of those without a program."""
    head = [
        "| | " + " | ".join((*READING, *CHANGING)) + " |",
        "|---" * (len(READING) + len(CHANGING) + 1) + "|",
    ]
    left = [f"- {_title(name)}: {reason}" for name, reason in REASONS.items()]
    return "\n".join([*head, *map(row, SUBJECTS), "", "Not tried:", "", *left])


def _title(name: str) -> str:
    return name if " " in name else f"`{name.removeprefix('torch.')}`"


def classes() -> set[str]:
    """Return the names of all subclasses of tensors and modes in the source of torch, by their bases."""
    root = Path(torch.__file__).parent
    bases: dict[str, set[str]] = {}
    places: dict[str, list[str]] = {}
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for name, parents in _CLASS.findall(path.read_text(errors="ignore")):
            bases.setdefault(name, set()).update(re.findall(r"(\w+)(?=\s*(?:,|\[|$))", parents))
            places.setdefault(name, []).append(module)
    found = set(BASES)
    while new := {name for name, parents in bases.items() if parents & found} - found:
        found |= new
    names = {f"{module}.{name}" for name in found - BASES for module in places[name]}
    return {name for name in names if not name.startswith(ELSEWHERE)}


def page(text: str, table: str) -> str:
    """Return a page with another table between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def rows_of(text: str) -> Iterator[str]:
    """Yield the lines of the table that a page has."""
    yield from text.partition(BEGIN)[2].partition(END)[0].strip().splitlines()


def main() -> int:
    """Write the tables anew."""
    PAGE.write_text(page(PAGE.read_text(), tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

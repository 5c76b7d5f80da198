"""Pages that are made from raw results: a template, and the tables and plots in it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import _on_gpu
from _estimates import difference, median, quotient
from _plots import Plot, draw
from _tables import against, head, row, table
from jinja2 import Environment, FileSystemLoader

Results = dict[str, Any]
HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
TEMPLATES = Environment(
    loader=FileSystemLoader(HERE / "pages"), trim_blocks=True, lstrip_blocks=True,
    keep_trailing_newline=True,
)  # fmt: skip
TEMPLATES.filters |= {"f": format, "mib": lambda value: f"{value / 2**20:.1f}"}
TEMPLATES.globals |= {
    "head": head, "row": row, "against": against,
    "median": median, "difference": difference, "quotient": quotient,
}  # fmt: skip


def render(name: str, **values: Any) -> str:
    """Return the page of a template."""
    return TEMPLATES.get_template(f"{name}.md.jinja").render(values)


class Page(NamedTuple):
    """A page of docs/ with its raw results.

    schema: of raw results; it grows when something in there means something else.  measured: where in them
    results are by script.  values: of the template.  plots: by the key in `plotted`'s results.
    """

    name: str
    schema: int
    measured: str
    values: Callable[[Results], Results]
    plots: Mapping[str, Plot]
    plotted: Callable[[Results], Results] = dict

    def read(self, file: Path) -> Results:
        """Return raw results.

        Raises ValueError where they have another schema.
        """
        results: Results = json.loads(file.read_text())
        if (found := results.get("schema")) != self.schema:
            raise ValueError(
                f"{file} has schema {found}, this page is made from {self.schema}: measure again"
            )
        return results

    def text(self, results: Results) -> str:
        """Return the page, in Markdown."""
        found = results[self.measured]
        return render(
            self.name, **self.values(found), quick=results["quick"], settings=settings(found),
            busy=max(load for one in found.values() for load in one["load"]) > 1.5,
            commits=sorted({one.get("commit", "unknown") for one in found.values()}),
            took=duration(list(found.values())), gpu=_on_gpu.stages(), on_gpu=_on_gpu, settings_of=settings,
            each=", ".join(f"`{name}` {one['took']} s" for name, one in found.items()),
        )  # fmt: skip

    def write(self, results: Results, folder: Path) -> Path:
        """Write the raw results, the page and its plots into a folder; return the page."""
        (folder / f"{self.name}.json").write_text(one_line_a_list(results))
        page = folder / f"{self.name}.md"
        page.write_text(self.text(results))
        draw(self.plotted(results[self.measured]), folder, self.plots, self.name)
        return page


def settings(found: Results) -> str:
    """Return the machine, versions, commit and time: a table for each machine and commit."""
    groups: dict[str, list[str]] = {}
    for name, one in found.items():
        facts = [one["machine"], one["versions"], one.get("commit")]
        groups.setdefault(json.dumps(facts), []).append(name)
    tables = []
    for names in groups.values():
        members = [found[name] for name in names]
        loads = [load for one in members for load in one["load"]]
        dates = " to ".join(sorted({one["date"] for one in members}))
        commit = {"commit": members[0]["commit"]} if "commit" in members[0] else {}
        rows = members[0]["machine"] | members[0]["versions"] | commit | {
            "measured": f"{dates}, in {duration(members)}",
            "load average": f"{min(loads)} to {max(loads)}; a benchmark alone makes 1",
        }  # fmt: skip
        tables.append(table(["" if len(groups) == 1 else ", ".join(names), ""], rows.items()))
    return "\n\n".join(tables)


def duration(members: list[Results]) -> str:
    """Return the time that scripts took."""
    minutes, seconds = divmod(sum(one["took"] for one in members), 60)
    return f"{minutes} min {seconds} s"


def one_line_a_list(value: Any, depth: int = 0) -> str:
    """Return JSON with each key of an object on a line of its own, and each list on one line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = " " * (depth + 1)
    lines = [f"{inner}{json.dumps(key)}: {one_line_a_list(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}" + ("\n" if depth == 0 else "")

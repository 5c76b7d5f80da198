"""Results of a program's processes, each in a file, merged as the program ends or by `amanda merge`."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from amanda.errors import AmandaError
from amanda.files import naming, write_file
from amanda.tools.command._line import PATH, exit_status, limit_option
from amanda.tools.command._processes import RunSettings, by_number, missing_ranks, no_op_text, number_of_ranks
from amanda.tools.command._specs import Tooling
from amanda.tools.libraries import rich
from amanda.tools.results import Result, by_rank, can_merge, load, read_json, reading, restored, to_json
from amanda.tools.results import merge as merge_results

# Bytes by which a file may grow between the question for its size and its reading.
_MORE = 1 << 28


class ProcessResults:
    """The tools of one process, and the way of their results to the root process.

    messages: the list to which warnings are appended while the process runs.  is_quiet: print no results.
    Each process writes `<label>.json` into the folder that the processes share, after all other files: for
    each tool its result as `to_dict` gives it, or as text, and the messages.
    """

    def __init__(
        self, settings: RunSettings, tools: Sequence[Tooling], messages: Sequence[str], label: str
    ) -> None:
        self._settings = settings
        self._tools = tools
        self._logged = messages
        self._label = label
        self.is_quiet = settings.quiet
        # Several roots that know nothing of each other save under names of their own.
        self._suffix = "" if label.partition(".")[0] == "main" or settings.together else label

    def write(self, saw_op: bool = True, ended: bool = True, followed: bool = False) -> Path | None:
        """Save this process's results, and write them into a file for the root process; return its path.

        saw_op: whether there are results.  ended: False while the process goes on; the results say so.
        followed: whether `exec` is about to replace the program of this process, which may be the root.
        """
        settings, remark = self._settings, None
        self._losses: list[str] = []
        # The root needs no file.
        alone = settings.root == os.getpid() and not settings.together and not followed
        if not ended:
            now = datetime.now(timezone.utc).isoformat(" ", "seconds")
            remark = f"Saved at {now} of a process that went on."
        saved_results: list[Any] = []
        for tooling in self._tools:
            try:
                label = self._suffix if alone else self._label
                saved_results.append(self._saved_result(tooling, label, remark) if saw_op else None)
            except Exception as error:
                saved_results.append(None)
                self._note_loss(tooling, error)
        if alone:
            return None
        # The file comes last: once the root sees it, all that it names has been written.
        contents = {
            "tools": saved_results,
            "messages": self._messages,
            "lost": self._losses,
            "ranks": number_of_ranks(),
        }
        return write_file(Path(settings.folder) / f"{self._label}.json", to_json(contents))

    @property
    def _messages(self) -> list[str]:
        """Return the messages that were logged and that no result repeats."""
        unmatched = tuple({text for tooling in self._tools for text in tooling.tool.unmatched()})
        return [message for message in self._logged if not message.endswith(unmatched)]

    def _note_loss(self, tooling: Tooling, error: Exception) -> None:
        self._losses.append(f"the result of {tooling.name} is lost: {type(error).__name__}: {error}")

    def _saved_result(self, tooling: Tooling, label: str, remark: str | None) -> dict[str, Any]:
        """Save a tool's result; return the path and the result, or its text where it cannot be merged."""
        with tooling.tool._amanda.lock:  # its routines may run on other threads
            result = getattr(tooling.tool, "result", None)
            if remark is not None and isinstance(result, Result):
                result.remarks = [*result.remarks, remark]
            saved = self._save(tooling, result, label)
            if isinstance(result, Result) and can_merge(result):
                return {"saved": saved, "result": result.to_dict(), "text": None}
            text = None if result is None else _text_of(result, self._settings.view)
            return {"saved": saved, "result": None, "text": text}

    def report(self, saw_op: bool) -> None:
        """Merge, save and print the results of all processes.  saw_op: whether this one has results."""
        self._losses = []
        folder = Path(self._settings.folder)
        results = self._read_results(folder)
        if not self.is_quiet:  # the output of the program comes first
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
        printer = Printer(self.is_quiet, self._settings.view)
        # A rank that was killed left no file, so the number of ranks comes from those that did.
        expected = max((result["ranks"] for result in results.values()), default=0)
        missing = missing_ranks(results, expected) if expected else []  # ranks of other hosts are not known
        for index, tooling in enumerate(self._tools):
            others = {
                label: result["tools"][index] for label, result in results.items() if result["tools"][index]
            }
            try:
                self._report_tool(printer, tooling, others, missing, saw_op)
            except Exception as error:  # the other tools' results are printed
                self._note_loss(tooling, error)
        printer.say(*_sentences_once(self._messages, results, "messages"))
        killed = [f"{label} left no results: it was killed, or ended by os._exit" for label in missing]
        # Lost results are told under --quiet too: their absence would pass for success.
        printer.say(*dict.fromkeys([*_sentences_once(self._losses, results, "lost"), *killed]), anyway=True)
        if not self._settings.together or len(list(folder.glob("*.alive"))) >= expected:  # no rank is alive
            shutil.rmtree(folder, ignore_errors=True)

    def _read_results(self, folder: Path) -> dict[str, Any]:
        """Return what other processes left, by their labels; note what cannot be read."""
        results: dict[str, Any] = {}
        for path in sorted(folder.glob("*.json"), key=lambda path: by_number(path.stem)):
            try:
                with reading(path.stat().st_size + _MORE):  # of this program, whatever it comes to
                    results[path.stem] = read_json(path, "file of a process's results", self._checked_results)
            except (AmandaError, OSError) as error:
                self._losses.append(f"the results of {path.stem} are lost: {error}")
        return results

    def _checked_results(self, content: Any) -> Any:
        """Return the content of a process's file; raise an error if it lacks something."""
        # A damaged file is named and left; it must not take the results of the others with it.
        if len(content["tools"]) != len(self._tools) or not isinstance(content["ranks"], int):
            raise ValueError("it is of other tools")
        if any({"saved", "result", "text"} - result.keys() for result in content["tools"] if result):
            raise ValueError("a result in it lacks something")
        for key in ("messages", "lost"):
            content[key] = list(map(str, content[key]))
        return content

    def _report_tool(
        self, printer: Printer, tooling: Tooling, others: Mapping[str, Any], missing: Sequence[str],
        saw_op: bool,
    ) -> None:  # fmt: skip
        """Print the results of one tool, merged where they can be, and save what is merged."""
        name, result = tooling.name, getattr(tooling.tool, "result", None)
        labels = [*([self._label] if saw_op else []), *others]
        if not labels:
            # After an exception that nothing caught there is no need to say why.
            if self._settings.no_op_texts and not hasattr(sys, "last_type"):
                printer.say(no_op_text(name, self._settings.frameworks))
            return
        unmatched = list(tooling.tool.unmatched()) if saw_op else []
        printer.say(*(f"{name}: {text}" for text in unmatched))
        if result is None:
            return
        if others and can_merge(result):
            parts = {label: restored(other["result"], result) for label, other in others.items()}
            if saw_op:
                parts = {self._label: result, **parts}
            # The merged file has the tool's name alone, those of single processes have labels.
            own_path = [self._save(tooling, result, self._label)] if saw_op and not self._suffix else []
            merged = merge_results(parts, missing)
            saved = self._save(tooling, merged, self._suffix)
            if len(labels) > 1:
                printer.say(f"{name} of {len(labels)} processes ({', '.join(labels)})")
            printer.show(merged)
            printer.say_saved(name, saved, *own_path, *(other["saved"] for other in others.values()))
            return
        if saw_op:
            saved = self._save(tooling, result, self._label if others else self._suffix)
            # A table without rows would say that no op was executed.
            if not unmatched or any(True for _ in getattr(result, "rows", tuple)()):
                printer.show(result)
            printer.say_saved(name, saved)
        for label, other in others.items():  # they cannot be merged
            printer.say(f"{name} of {label}")
            if other["text"] is not None:
                printer.show(other["text"])
            printer.say_saved(name, other["saved"])

    def _save(self, tooling: Tooling, result: Any, label: str) -> str | None:
        """Save a result, with the process's label in the file's name; return the path, None without one."""
        path = tooling.out
        if path is None and self._settings.output is not None:
            path = Path(self._settings.output) / f"{tooling.name}.json"
        # NNsight gives every object a `save` of its own.
        if path is None or getattr(type(result), "save", None) is getattr(object, "save", None):
            return None
        if label:
            path = path.with_name(f"{label}.{path.name}")  # the suffix says the form
        try:
            path.parent.mkdir(parents=True, exist_ok=True)  # the program may have removed it
            result.save(path)
        except Exception as error:  # results can still be printed
            self._losses.append(f"{tooling.name} cannot be saved in {path}: {error}")
            return None
        return str(path)


class Printer:
    """Writer to standard error: tables on a terminal, plain text elsewhere, nothing if `quiet`.

    view: what is written of results.
    """

    def __init__(self, quiet: bool = False, view: Mapping[str, Any] | None = None) -> None:
        # A daemon may have closed the stream; Python then has None for it.
        self._is_there = sys.stderr is not None and not sys.stderr.closed
        self._quiet, self._view = quiet, view or {}
        self._console = rich.console.Console(file=sys.stderr, highlight=False)

    def say(self, *texts: str, anyway: bool = False) -> None:
        """Write lines; anyway: also if the writer is quiet."""
        for text in texts:
            self._print(rich.text.Text(f"amanda: {text}"), anyway)

    def say_saved(self, name: str, *paths: str | None) -> None:
        """Write the paths of the files with a tool's result, if there are any."""
        if saved := [path for path in paths if path]:
            self.say(f"{name} is in {', '.join(saved)}")

    def show(self, result: Any) -> None:
        """Write a result, or the text of one."""
        width = self._console.width if self._console.is_terminal else None
        self._print(rich.text.Text(_text_of(result, self._view, width)))

    def _print(self, content: Any, anyway: bool = False) -> None:
        """Print text or a table; stop printing once nobody reads."""
        if not self._is_there or (self._quiet and not anyway):
            return
        try:
            self._console.print(content, soft_wrap=isinstance(content, rich.text.Text))
        except (OSError, ValueError):  # the reader has gone
            self._is_there = False


def _text_of(result: Any, view: Mapping[str, Any], width: int | None = None) -> str:
    return result._text(width, **view) if isinstance(result, Result) else str(result)


def report_other_processes(settings: RunSettings) -> None:
    """Merge, save and print results of others, in a root without any; errors go to standard error."""
    try:
        # The tools are made for their classes alone, which know how to merge.
        results = ProcessResults(settings, tools=settings.toolings(), messages=[], label="main")
        results.report(saw_op=False)
    except Exception as error:  # the program's own end is not ours to change
        Printer().say(f"the results are lost: {type(error).__name__}: {error}")


def _sentences_once(sentences: Iterable[str], results: Mapping[str, Any], key: str) -> list[str]:
    return list(dict.fromkeys([*sentences, *(text for result in results.values() for text in result[key])]))


_OF_PROCESS = re.compile(r"((?:(?:main|rank\d+|process\d+|restart\d+)\.)+)(.+)\.json")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PATH)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="File to write, in the format of its suffix; a folder if FILES is a folder.",
)
@click.option("--per-rank", is_flag=True, help="Keep the rows of each rank, with a column `rank`.")
@click.option(
    "--ranks", type=click.IntRange(min=1), metavar="N", help="Number of ranks, to report missing ones."
)
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def _command(
    files: Sequence[Path], output: Path | None, per_rank: bool, ranks: int | None, quiet: bool
) -> None:
    """Merge the results of several ranks, processes or runs.

    FILES are .json results of one tool, or one folder of `amanda run -o`; in a folder, the results of each
    tool are merged into TOOL.json.
    """
    for tool, result in _merge_files(files, ranks, per_rank).items():
        # The results of a folder are named by their tools; one result has the name that was asked for.
        path = output if not tool else (output or files[0]) / f"{tool}.json"
        if path is not None:
            with naming(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            result.save(path)
        if not quiet:
            sys.stdout.write(f"{result}\n")


def merge(arguments: Sequence[str]) -> int:
    """Merge the results of several ranks, processes or runs."""
    return exit_status(_command, "amanda merge", arguments)


def _merge_files(files: Sequence[Path], ranks: int | None, per_rank: bool) -> dict[str, Result]:
    """Return a merged result for each tool, by the tool's name; "" for files that were named one by one."""
    is_folder = len(files) == 1 and files[0].is_dir()
    results_by_tool = _results_of_folder(files[0]) if is_folder else {"": _results_of_files(files)}
    merged_results: dict[str, Result] = {}
    for tool, results in results_by_tool.items():
        missing = missing_ranks(results, ranks)
        merged_results[tool] = by_rank(results) if per_rank else merge_results(results, missing)
        # Rows side by side cannot say what is missing, as a merged result does.
        if per_rank and missing:
            merged_results[tool].remarks = [f"There is no result of {', '.join(missing)}."]
    return merged_results


def _results_of_folder(folder: Path) -> dict[str, dict[str, Result]]:
    """Return results by tool, then by the label of their process; raise AmandaError for none."""
    results_by_tool: dict[str, dict[str, Result]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: by_number(path.name)):
        if (named := _OF_PROCESS.fullmatch(path.name)) is not None:
            results_by_tool.setdefault(named[2], {})[named[1].rstrip(".")] = load(path)
    if not results_by_tool:
        raise AmandaError(f"{folder} has no results of processes, such as rank0.flops.json")
    return results_by_tool


def _results_of_files(files: Sequence[Path]) -> dict[str, Result]:
    """Return results by the process in the file's name, or by path if two names have the same process."""
    named = [_OF_PROCESS.fullmatch(path.name) for path in files]
    labels = [
        path.stem if name is None else name[1].rstrip(".") for path, name in zip(files, named, strict=True)
    ]
    if len(set(labels)) < len(labels):
        # Two runs in two folders have files of one name.
        labels = [str(path) for path in files]
    return {label: load(path) for label, path in zip(labels, files, strict=True)}

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

# Bytes by which a file may grow after its size was read and before it is read itself.
_GROWTH_MARGIN = 1 << 28


class ProcessResults:
    """The results of one process's tools: saved, written into a file for the root process, or reported by it.

    messages: the list to which warnings are appended while the process runs.  is_quiet: print no results.
    Each process writes `<label>.json` into the folder that the processes share, after all other files: an
    entry for each tool (`_save_and_describe`), the messages, the losses, and the number of ranks.
    """

    def __init__(
        self, settings: RunSettings, tools: Sequence[Tooling], messages: Sequence[str], label: str
    ) -> None:
        self._settings, self._toolings = settings, tools
        self._logged_messages, self._label = messages, label
        self.is_quiet = settings.quiet
        # In front of the name of a merged file: roots that know nothing of each other must not share a name.
        self._merged_label = "" if label.partition(".")[0] == "main" or settings.together else label

    def write_for_root(self, saw_op: bool = True, ended: bool = True, followed: bool = False) -> Path | None:
        """Save the results of the tools, and write the file for the root; return its path, None in the root.

        saw_op: whether there are results.  ended: False while the process goes on; the results say so.
        followed: whether `exec` is about to replace the program of this process, which may be the root: then
        the root writes a file too.  A result that cannot be saved is noted in the file, and raises nothing.
        """
        settings, remark = self._settings, None
        self._losses: list[str] = []
        # The root prints its results itself, from the tools.
        is_only_process = settings.root == os.getpid() and not settings.together and not followed
        if not ended:
            now = datetime.now(timezone.utc).isoformat(" ", "seconds")
            remark = f"Saved at {now} of a process that went on."
        entries: list[Any] = []
        for tooling in self._toolings:
            try:
                label = self._merged_label if is_only_process else self._label
                entries.append(self._save_and_describe(tooling, label, remark) if saw_op else None)
            except Exception as error:
                entries.append(None)
                self._note_loss(tooling, error)
        if is_only_process:
            return None
        # The file comes last: once the root sees it, all that it names has been written.
        contents = {
            "tools": entries, "messages": self._messages, "lost": self._losses, "ranks": number_of_ranks(),
        }  # fmt: skip
        return write_file(Path(settings.folder) / f"{self._label}.json", to_json(contents))

    @property
    def _messages(self) -> list[str]:
        """Return the messages that were logged and that no result repeats."""
        unmatched = tuple({text for tooling in self._toolings for text in tooling.tool.unmatched()})
        return [message for message in self._logged_messages if not message.endswith(unmatched)]

    def _note_loss(self, tooling: Tooling, error: Exception) -> None:  # a sentence that `report` prints
        self._losses.append(f"the result of {tooling.name} is lost: {type(error).__name__}: {error}")

    def _save_and_describe(self, tooling: Tooling, label: str, remark: str | None) -> dict[str, Any]:
        """Save a tool's result; return its entry in the file for the root: path, result or else text.

        remark: added to the result.  The root merges results; those that cannot be merged it prints as text.
        """
        with tooling.tool._amanda.lock:  # its routines may run on other threads
            result = getattr(tooling.tool, "result", None)
            if remark is not None and isinstance(result, Result):
                result.remarks = [*result.remarks, remark]
            saved_path = self._save(tooling, result, label)
            if isinstance(result, Result) and can_merge(result):
                return {"saved": saved_path, "result": result.to_dict(), "text": None}
            text = None if result is None else _text_of(result, self._settings.view)
            return {"saved": saved_path, "result": None, "text": text}

    def report(self, saw_op: bool) -> None:
        """Merge, save and print the results of all processes, then remove the files that they wrote."""
        # saw_op: whether this process has results.  A tool that cannot be reported is named in a line.
        self._losses = []
        folder = Path(self._settings.folder)
        contents = self._read_results(folder)
        if not self.is_quiet:  # the output of the program comes first
            with suppress(OSError, ValueError, AttributeError):
                sys.stdout.flush()
        printer = Printer(self.is_quiet, self._settings.view)
        # By label, the file of each other process.  A rank that was killed left none, so the number of ranks
        # comes from those that did; 0 where ranks of other hosts are not known.
        rank_count = max((content["ranks"] for content in contents.values()), default=0)
        missing_labels = missing_ranks(contents, rank_count) if rank_count else []
        for index, tooling in enumerate(self._toolings):
            entries = ((label, content["tools"][index]) for label, content in contents.items())
            entry_by_label = {label: entry for label, entry in entries if entry}  # None: it executed no op
            try:
                self._report_tool(printer, tooling, entry_by_label, missing_labels, saw_op)
            except Exception as error:  # the other tools' results are printed
                self._note_loss(tooling, error)
        printer.say(*_distinct_sentences(self._messages, contents, "messages"))
        deaths = [f"{label} left no results: it was killed, or ended by os._exit" for label in missing_labels]
        # Lost results are told under --quiet too: their absence would pass for success.
        losses = _distinct_sentences(self._losses, contents, "lost")
        printer.say(*dict.fromkeys([*losses, *deaths]), anyway=True)
        # A rank leaves its .alive behind: the folder goes when all ranks have begun, and none is alive.
        if not self._settings.together or len(list(folder.glob("*.alive"))) >= rank_count:
            shutil.rmtree(folder, ignore_errors=True)

    def _read_results(self, folder: Path) -> dict[str, Any]:
        """Return the contents of other processes' files, by label; a file that cannot be read is a loss."""
        contents: dict[str, Any] = {}
        for path in sorted(folder.glob("*.json"), key=lambda path: by_number(path.stem)):
            try:
                # The limit on the size of files is for those of others: this one is the program's.
                with reading(path.stat().st_size + _GROWTH_MARGIN):
                    contents[path.stem] = read_json(path, "file of a process's results", self._check_content)
            except (AmandaError, OSError) as error:
                self._losses.append(f"the results of {path.stem} are lost: {error}")
        return contents

    def _check_content(self, content: Any) -> Any:
        """Return a process's file, messages as text; raise an error if it lacks a part or has other tools."""
        # `read_json` names a damaged file, which must not take the results of the others with it.
        if len(content["tools"]) != len(self._toolings) or not isinstance(content["ranks"], int):
            raise ValueError("it is of other tools")
        if any({"saved", "result", "text"} - result.keys() for result in content["tools"] if result):
            raise ValueError("a result in it lacks something")
        for key in ("messages", "lost"):
            content[key] = list(map(str, content[key]))
        return content

    def _report_tool(
        self, printer: Printer, tooling: Tooling, entry_by_label: Mapping[str, Any],
        missing_labels: Sequence[str], saw_op: bool,
    ) -> None:  # fmt: skip
        """Save and print the result of one tool, merged with those of other processes; or say why none is.

        Print what matched nothing too.  entry_by_label: the tool's entries in the files of other processes.
        """
        name, result = tooling.name, getattr(tooling.tool, "result", None)
        labels = [*([self._label] if saw_op else []), *entry_by_label]
        if not labels:
            # Python sets last_type for an exception that nothing caught: then there is no need to say why.
            if self._settings.no_op_texts and not hasattr(sys, "last_type"):
                printer.say(no_op_text(name, self._settings.frameworks))
            return
        unmatched = list(tooling.tool.unmatched()) if saw_op else []
        printer.say(*(f"{name}: {text}" for text in unmatched))
        if result is None:
            return
        if entry_by_label and can_merge(result):
            results = {label: restored(entry["result"], result) for label, entry in entry_by_label.items()}
            if saw_op:
                results = {self._label: result, **results}
            # The merged file has the tool's name alone, those of single processes have labels.
            own_path = [self._save(tooling, result, self._label)] if saw_op and not self._merged_label else []
            merged = merge_results(results, missing_labels)
            saved_path = self._save(tooling, merged, self._merged_label)
            paths = [*own_path, *(entry["saved"] for entry in entry_by_label.values())]
            if len(labels) > 1:
                printer.say(f"{name} of {len(labels)} processes ({', '.join(labels)})")
            # The one process's own file has the same result, and is needed of a rank alone, to merge hosts.
            elif saved_path and paths[0] and not labels[0].startswith("rank"):
                Path(paths.pop()).unlink(missing_ok=True)
            printer.show(merged)
            printer.say_saved(name, saved_path, *paths)
            return
        if saw_op:
            saved_path = self._save(tooling, result, self._label if entry_by_label else self._merged_label)
            # A table without rows would say that no op was executed.
            if not unmatched or any(True for _ in getattr(result, "rows", tuple)()):
                printer.show(result)
            printer.say_saved(name, saved_path)
        for label, entry in entry_by_label.items():  # they cannot be merged
            printer.say(f"{name} of {label}")
            if entry["text"] is not None:
                printer.show(entry["text"])
            printer.say_saved(name, entry["saved"])

    def _save(self, tooling: Tooling, result: Any, label: str) -> str | None:
        """Save a result, `label` ahead of the file's name; return its path, else None; note a failure."""
        # Without a path, for a result without `save`, and for a failure, which is noted as a loss.
        path = tooling.out
        if path is None and self._settings.output is not None:
            path = Path(self._settings.output) / f"{tooling.name}.json"
        # NNsight gives every object a `save`: where a result has that of `object` alone, it saves nothing.
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
        if saved_paths := [path for path in paths if path]:
            self.say(f"{name} is in {', '.join(saved_paths)}")

    def show(self, result: Any) -> None:
        """Write a result, or the text of one."""
        width = self._console.width if self._console.is_terminal else None
        self._print(rich.text.Text(_text_of(result, self._view, width)))

    def _print(self, content: Any, anyway: bool = False) -> None:
        """Print text or a table unless quiet, or `anyway`; print nothing more once nobody reads."""
        if not self._is_there or (self._quiet and not anyway):
            return
        try:
            self._console.print(content, soft_wrap=isinstance(content, rich.text.Text))
        except (OSError, ValueError):  # the reader has gone
            self._is_there = False


def _text_of(result: Any, view: Mapping[str, Any], width: int | None = None) -> str:
    return result._text(width, **view) if isinstance(result, Result) else str(result)


def report_other_processes(settings: RunSettings, toolings: Sequence[Tooling] = ()) -> None:
    """Merge, save and print results of other processes, in a root without its own; an error is printed."""
    # toolings: tools for their classes alone, which know how to merge; made where there are none.
    try:
        ProcessResults(settings, toolings or settings.toolings(), [], label="main").report(saw_op=False)
    except Exception as error:  # the program's own end is not ours to change
        Printer().say(f"the results are lost: {type(error).__name__}: {error}")


def _distinct_sentences(sentences: Iterable[str], results: Mapping[str, Any], key: str) -> list[str]:
    return list(dict.fromkeys([*sentences, *(text for result in results.values() for text in result[key])]))


# Labels of the process with a dot behind each, then the tool: rank0.restart1.flops.json.
_NAME_WITH_LABEL = re.compile(r"((?:(?:main|rank\d+|process\d+|restart\d+)\.)+)(.+)\.json")


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=PATH)
@click.option(
    "-o", "--output", type=PATH, metavar="FILE",
    help="File to write, in the format of its suffix; a folder if FILES is a folder.",
)  # fmt: skip
@click.option("--per-rank", is_flag=True, help="Keep the rows of each rank, with a column `rank`.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="How many ranks, to name absent ones.")
@limit_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing.")
def _command(
    files: Sequence[Path], output: Path | None, per_rank: bool, ranks: int | None, quiet: bool
) -> None:
    """Merge the results of several ranks, processes or runs.

    FILES are .json results of one tool, or one folder of `amanda run -o`; in a folder, the results of each
    tool are merged into TOOL.json.
    """
    for tool_name, result in _merge_files(files, ranks, per_rank).items():
        # The results of a folder are named by their tools; one result has the name that was asked for.
        path = output if not tool_name else (output or files[0]) / f"{tool_name}.json"
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
    # ranks: their number, None for up to the highest.  per_rank: rows are put side by side and not merged.
    is_folder = len(files) == 1 and files[0].is_dir()
    results_by_tool = _load_folder(files[0]) if is_folder else {"": _load_files(files)}
    merged_by_tool: dict[str, Result] = {}
    for tool_name, results in results_by_tool.items():
        missing_labels = missing_ranks(results, ranks)
        merged = by_rank(results) if per_rank else merge_results(results, missing_labels)
        # Rows side by side cannot say what is missing, as a merged result does.
        if per_rank and missing_labels:
            merged.remarks = [*merged.remarks, f"There is no result of {', '.join(missing_labels)}."]
        merged_by_tool[tool_name] = merged
    return merged_by_tool


def _load_folder(folder: Path) -> dict[str, dict[str, Result]]:
    """Load the results in a folder, by tool, then by the label of the process; raise AmandaError for none."""
    results_by_tool: dict[str, dict[str, Result]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: by_number(path.name)):
        if (name_match := _NAME_WITH_LABEL.fullmatch(path.name)) is not None:
            label, tool_name = name_match[1].rstrip("."), name_match[2]
            results_by_tool.setdefault(tool_name, {})[label] = load(path)
    if not results_by_tool:
        raise AmandaError(f"{folder} has no results of processes, such as rank0.flops.json")
    return results_by_tool


def _load_files(files: Sequence[Path]) -> dict[str, Result]:
    """Load results, by the process's label in the file's name, or by path where two files have one label."""
    path_matches = [(path, _NAME_WITH_LABEL.fullmatch(path.name)) for path in files]
    labels = [path.stem if match is None else match[1].rstrip(".") for path, match in path_matches]
    if len(set(labels)) < len(labels):
        # Two runs in two folders have files of one name.
        labels = [str(path) for path in files]
    return {label: load(path) for label, path in zip(labels, files, strict=True)}

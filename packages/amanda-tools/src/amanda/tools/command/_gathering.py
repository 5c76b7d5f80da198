"""Results of a program's processes: left by each, gathered, merged and told by the root process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from amanda.tools.command._environment import Handed
from amanda.tools.command._spec import Tooling
from amanda.tools.command._telling import Teller
from amanda.tools.results import Mergeable, Result


class Gathering:
    """The tools of one process and where their results go.

    In the folder that the processes share each leaves `<label>.json` when all else is written: for each
    tool its result as `to_dict` gives it and as text, and what was logged.
    """

    def __init__(self, handed: Handed, tools: Sequence[Tooling], messages: Iterable[str], label: str) -> None:
        self._handed = handed
        self._tools = tools
        self._messages = list(messages)
        self._label = label
        self._suffix = "" if label == "main" else label  # of one of several roots, where a rank has its own

    def leave(self) -> None:
        """Save this process's results and leave them for the root."""
        left: list[Any] = []
        for tooling in self._tools:
            try:
                left.append(self._left(tooling))
            except Exception as error:
                left.append(None)
                self._messages.append(
                    f"the result of {tooling.name} is lost: {type(error).__name__}: {error}"
                )
        path = Path(self._handed.folder) / f"{self._label}.json"
        waiting = path.with_suffix(".part")
        waiting.write_text(json.dumps({"tools": left, "messages": self._messages}), encoding="utf-8")
        waiting.rename(path)

    def _lose(self, tooling: Tooling, error: Exception) -> None:
        self._messages.append(f"the result of {tooling.name} is lost: {type(error).__name__}: {error}")

    def _left(self, tooling: Tooling) -> dict[str, Any]:
        result = getattr(tooling.tool, "result", None)
        saved = self._save(tooling, result, self._label)
        told = result.to_dict() if isinstance(result, Mergeable) and isinstance(result, Result) else None
        return {"saved": saved, "result": told, "text": None if result is None else str(result)}

    def tell(self, saw_op: bool) -> None:
        """Gather, merge, save and print. saw_op: whether this process has results of its own."""
        others = self._others()
        if not self._handed.quiet:
            self._flush()
        teller = Teller(self._handed.quiet)
        for index, tooling in enumerate(self._tools):
            theirs = {label: one["tools"][index] for label, one in others.items() if one["tools"][index]}
            try:
                self._tell(teller, tooling, theirs, saw_op)
            except Exception as error:  # of a tool, whose result is one of several
                self._messages.append(
                    f"the result of {tooling.name} is lost: {type(error).__name__}: {error}"
                )
        messages = [*self._messages, *(message for one in others.values() for message in one["messages"])]
        teller.messages(list(dict.fromkeys(messages)))
        shutil.rmtree(self._handed.folder, ignore_errors=True)

    def _tell(self, teller: Teller, tooling: Tooling, theirs: dict[str, Any], saw_op: bool) -> None:
        result = getattr(tooling.tool, "result", None)
        labels = [*([self._label] if saw_op else []), *sorted(theirs, key=_by_number)]
        if not labels:
            teller.nothing(tooling)
            return
        if not tooling.selection.matched and saw_op:
            teller.unmatched(tooling)
        if result is None:
            return
        if list(theirs) and isinstance(result, Mergeable):
            parts = [type(result).from_dict(theirs[label]["result"]) for label in labels if label in theirs]
            own = [self._save(tooling, result, self._label)] if saw_op and not self._suffix else []
            merged = (result if saw_op else parts.pop(0)).merged(*parts)
            saved = self._save(tooling, merged, self._suffix)
            each = [*own, *(one["saved"] for one in theirs.values())]
            teller.result(tooling, merged, labels, [path for path in (saved, *each) if path])
            return
        if saw_op:
            saved = self._save(tooling, result, self._label if theirs else self._suffix)
            teller.result(tooling, result, labels[:1], [saved] if saved else [])
        for label, one in theirs.items():
            teller.text(tooling, one["text"], label, one["saved"])

    def _others(self) -> dict[str, Any]:
        found = {}
        for path in sorted(Path(self._handed.folder).glob("*.json")):
            found[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _save(self, tooling: Tooling, result: Any, label: str) -> str | None:
        """Save a result in its file, with the process's label in the name; the path, None without one."""
        path = tooling.out
        if path is None and self._handed.output is not None:
            path = Path(self._handed.output) / f"{tooling.name}.json"
        if path is None or not hasattr(result, "save"):
            return None
        if label:
            path = path.with_name(f"{label}.{path.name}")  # what it ends in says the form
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            result.save(path)
        except Exception as error:  # what can still be told is told
            self._messages.append(f"{tooling.name} cannot be saved in {path}: {error}")
            return None
        return str(path)

    @staticmethod
    def _flush() -> None:
        """Let what the program printed come first."""
        try:
            sys.stdout.flush()
        except (OSError, ValueError, AttributeError):
            return


def _by_number(label: str) -> tuple[str, int]:
    """So that rank10 comes after rank2."""
    letters = label.rstrip("0123456789")
    return letters, int(label[len(letters) :] or 0)

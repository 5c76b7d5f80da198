"""Report of what a scope could not instrument, ran differently from the program, or slowly; hidden ops."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet

from amanda import interceptor
from amanda.plan.lifetime import plan_lifetimes

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

logger = logging.getLogger("amanda")

# A training of weeks reports the same op of each new graph; memory and log stay small.
MAX_PER_GROUP = 1000
"""Number of entries of one kind and reason that a report stores."""
MAX_ENTRIES = 10_000
"""Number of entries of all kinds that a report stores."""
_MAX_NAMES = 3
"""Number of names that a line of a report lists."""
_MAX_NAMES_WIDTH = 48
"""Width to which a report pads the names; longer ones push the reason to the right."""


class Uninstrumented(NamedTuple):
    """An op or another part of the program that tools did not see, or that ran differently.

    what: the part.  reason: why.  where: the line of the program, "" if unknown.
    """

    what: str
    reason: str
    where: str


class Report(list[Uninstrumented]):
    """List of the parts of a program that a scope could not instrument, or ran differently, each once.

    `str` has a line for the entries of one kind and reason, with their number.  A report stores 1,000 entries
    of a kind and 10,000 in all, and says where there were more.
    """

    def __init__(self, entries: Iterable[Uninstrumented] = ()) -> None:
        super().__init__(entries)
        self._recount()

    @property
    def op_by_op(self) -> list[Uninstrumented]:
        """Return the entries of compiled callables, and of graphs of theirs, that ran as eager code."""
        return [entry for entry in self if "op by op" in entry.reason]

    def _recount(self) -> None:
        """Compute the counts of groups from the entries; forget the sources of `add_all`."""
        self._distinct_entries = set(self)
        # A graph's entries are the same at each of its runs, and the graph must not live for its report.
        self._reported_sources: WeakSet[Any] = WeakSet()
        self._count_by_group: dict[tuple[str, str], int] = {}
        self._truncated_groups: set[tuple[str, str]] = set()  # with more entries than are stored
        for entry in self:
            group = _group_key(entry)
            self._count_by_group[group] = self._count_by_group.get(group, 0) + 1

    def add(self, subject: str, reason: str, where: str = "", *, is_logged: bool = True) -> None:
        """Add an entry, unless it is there; log a warning for the first of its kind and reason.

        Beyond the limits nothing is stored but that there were more.  Takes constant time.

        Args:
            subject: The op or the part of the program.
            reason: Why it is not instrumented, or runs differently.
            where: "file:line" of the user's code; "" where it is not known.
            is_logged: False where an earlier scope has logged the same entry.
        """
        entry = Uninstrumented(subject, reason, where)
        # A set beside the list, since this is asked at each call of what cannot be instrumented.
        if entry in self._distinct_entries:
            return
        group = _group_key(entry)
        count = self._count_by_group.get(group, 0)
        if count >= MAX_PER_GROUP or len(self._distinct_entries) >= MAX_ENTRIES:
            # Groups without an entry may be any number, so these are bounded as well.
            if count or len(self._truncated_groups) < MAX_ENTRIES:
                self._truncated_groups.add(group)
            return
        self._distinct_entries.add(entry)
        self._count_by_group[group] = count + 1
        self.append(entry)
        # The first of a kind is news; the others are in the report.
        level = logging.WARNING if is_logged and not count else logging.DEBUG
        logger.log(level, "%s: %s%s", subject, reason, f" ({where})" if where else "")

    def add_all(self, source: object, entries: Collection[tuple[str, ...]]) -> None:
        """Add the entries of a source, unless it has been added; a source has the same entries each time.

        Args:
            source: Object with entries that are the same each time.
            entries: Subject, reason and line of each entry.
        """
        if source not in self._reported_sources:
            self._reported_sources.add(source)
            for entry in entries:
                self.add(*entry)

    def clear(self) -> None:
        """Remove all entries, so that the same parts are reported again."""
        super().clear()
        self._recount()

    # The weak set cannot be pickled, and sources of another process mean nothing.
    def __reduce__(self) -> Any:
        return Report, (list(self),)

    def __str__(self) -> str:
        """Return a line for the entries of each kind and reason, with the place of the first."""
        if not self:
            return "everything that ran was instrumented"
        entries_by_group: dict[tuple[str, str], list[Uninstrumented]] = {}
        for entry in self:
            entries_by_group.setdefault(_group_key(entry), []).append(entry)
        labels = [
            _group_label(entries, is_truncated=group in self._truncated_groups)
            for group, entries in entries_by_group.items()
        ]
        width = min(_MAX_NAMES_WIDTH, max(map(len, labels)))
        lines = []
        for label, (first_entry, *_) in zip(labels, entries_by_group.values(), strict=True):
            where = f"  [{first_entry.where}]" if first_entry.where else ""
            lines.append(f"{label:<{width}}  {first_entry.reason}{where}")
        if self._truncated_groups - entries_by_group.keys():  # groups without an entry
            lines.append("and others")
        return "\n".join(lines)


def _kind_and_name(subject: str) -> tuple[str, str]:
    """Split a subject into kind and name: "the state of", "noise"; "function", "f" of "function f"."""
    kind, of, name = subject.partition(" of ")
    if not of:
        kind, _, name = subject.rpartition(" ")
    return f"{kind}{of}".strip(), name


def _group_key(entry: Uninstrumented) -> tuple[str, str]:
    return _kind_and_name(entry.what)[0], entry.reason


def _group_label(entries: Sequence[Uninstrumented], is_truncated: bool) -> str:
    """Return a label for entries of one kind, with the first few names.

    is_truncated: whether there were more entries than the report stores.
    """
    kind, _ = _kind_and_name(entries[0].what)
    names = ", ".join(_kind_and_name(entry.what)[1] for entry in entries[:_MAX_NAMES])
    unnamed_count = len(entries) - _MAX_NAMES
    if is_truncated:
        suffix = f" and more than {unnamed_count} others"
    else:
        suffix = f" and {unnamed_count} more" if unnamed_count > 0 else ""
    return f"{kind} {names}{suffix}".strip()


_MIN_SLOW_CALLS = 1000
"""Number of slow calls from which on a report names them: a program with fewer does not feel their cost."""
_NEW_OP, _NEW_FORM = "new op", "new form of call"
"""Reasons in the statistics for the first call of an op, and of a form, which always run in Python."""


def describe_slow_calls(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Say how many calls ran in Python between two readings of the statistics, and why.

    Returns "" if these are few, or fewer than the calls that native code ran, and without native code.  First
    calls are not counted.
    """
    if not interceptor.NATIVE:
        return ""
    native_count = after["native"] - before["native"]
    learned_count = after["learned"] - before["learned"]
    count_by_reason = {
        reason: count - before["python"].get(reason, 0) for reason, count in after["python"].items()
    }
    # A form that was learned ran in Python once and is native since.
    count_by_reason[_NEW_FORM] = max(0, count_by_reason.get(_NEW_FORM, 0) - learned_count)
    slow_counts = {reason: n for reason, n in count_by_reason.items() if n and reason != _NEW_OP}
    slow_count = sum(slow_counts.values())
    if slow_count < max(_MIN_SLOW_CALLS, native_count):
        return ""
    if _NEW_FORM in slow_counts:
        slow_counts["a form of call that native code cannot learn"] = slow_counts.pop(_NEW_FORM)
    most_frequent_first = sorted(slow_counts.items(), key=lambda item: item[1], reverse=True)
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in most_frequent_first)
    return (
        f"{slow_count:,} of {slow_count + native_count:,} calls with routines ran in Python, several times "
        f"slower than in native code: {reasons}"
    )


_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_COLLECTIONS = (tuple, list, set, frozenset)


def changed_options(tool: AnyTool) -> Iterator[str]:
    """Yield a sentence for each option of a tool that has another value than when a scope opened last.

    Yields nothing unless there are plans of the tool, which were made with the earlier values.  The present
    values are stored for the next scope.
    """
    tool_state = tool._amanda
    # Reading the code of all routines takes long; it changes only with the routines.
    if tool_state.options_read_version != tool_state.version:
        tool_state.options_read = _options_read(tool)
        tool_state.options_read_version = tool_state.version
    names = tool_state.options_read
    if not names:
        return
    # Texts and not values: a list that is changed in place would equal itself.
    options = {name: repr(value) for name in names if _is_plain(value := vars(tool).get(name))}
    earlier_options, tool_state.options = tool_state.options, options
    has_plans = any(tool in stack.applied and stack.plans for stack in list(plan_lifetimes.stacks))
    if earlier_options is None or not has_plans:
        return
    for name, text in options.items():
        earlier_text = earlier_options.get(name, text)
        if text != earlier_text:
            yield (
                f"its analysis reads {name}, which was {earlier_text} and is {text} now: ops that were "
                "analysed before keep their plans; analyse_again() has all of them analysed anew"
            )


def _options_read(tool: AnyTool) -> tuple[str, ...]:
    """Return the attributes named after parameters of the tool's class that its analysis routines read."""
    try:
        parameters = list(inspect.signature(type(tool).__init__).parameters)[1:]  # without `self`
    except (TypeError, ValueError):
        return ()
    # By custom an option lies in an attribute of its name, or of its name after an underscore.
    options = {name for parameter in parameters for name in (parameter, f"_{parameter}")}
    names = {name for analysis in tool._amanda.analyses for name in _names_in_code(analysis.callback)}
    return tuple(sorted(names & options))


def _names_in_code(callback: Any) -> tuple[str, ...]:
    """Return the names in a function's code, without those in functions that it defines, such as routines."""
    code = getattr(inspect.unwrap(callback), "__code__", None)
    names: tuple[str, ...] = () if code is None else code.co_names
    return names


def _is_plain(value: Any) -> bool:
    """Return True for None, a number or a text, and for a collection of these, however nested."""
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, _PLAIN_COLLECTIONS):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN_TYPES)


P = ParamSpec("P")
T = TypeVar("T")


def report_unseen(subject: str, reason: str, where: str = "") -> None:
    """Add an uninstrumented part of the program to the reports of the scopes in force here, if there are any.

    Args:
        subject: The op or the part of the program.
        reason: Why it is not instrumented, or runs differently.
        where: "file:line" of the user's code.
    """
    activation = interceptor.active()
    if activation is not None:
        activation.state.report(subject, reason, where)


def hide_ops(
    function: Callable[P, T], entry_of: Callable[..., tuple[Any, ...] | None] | None = None
) -> Callable[P, T]:
    """Return a stand-in that runs a function without tools, which see no op inside.

    Args:
        function: Function whose ops tools do not see.
        entry_of: Returns the report's entry for a call with these arguments; None for no entry.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        """Report the call if it has an entry, and make it without tools."""
        if entry_of is not None and interceptor.active() is not None:
            entry = entry_of(*args, **kwargs)
            if entry is not None:
                report_unseen(*entry)
        with interceptor.Suspension():
            return function(*args, **kwargs)

    return run

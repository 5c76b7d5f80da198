"""Apply a tool to some ops: by type, module or phase, at some steps.

with amanda.apply(select(FlopsTool(), module="layer4.*", type=["conv2d", "linear"])):
    model(x)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import amanda
from amanda.errors import AmandaError
from amanda.options import Name, NonNegativeInt, PositiveInt, checked, shown
from amanda.tools.mapping import StandardMapping
from amanda.tools.steps import Steps, Window

__all__ = [
    "Globs", "ModulePaths", "Paths", "Patterns", "Phase", "SelectOptions", "Selection", "SelectionError",
    "as_remarks", "leave_construction", "listed", "select", "unmatched",
]  # fmt: skip

_MAX_REJECTED = 10_000
_MAX_EXAMPLES = 8
_WILDCARDS = frozenset("*?[")

Globs: TypeAlias = Sequence[Name] | Name | None
"""Names in which `*` and `?` stand for letters, or a single one; None for all, an empty list for none."""


class Patterns:
    """Patterns of one option that select ops by name; None selects every op.

    `rejected` has the names that no pattern fitted, `unused` the patterns that fitted no name, in order.

    Args:
        option: How the user calls it.
        patterns: Names, in which `*` and `?` stand for letters; or a single one.
    """

    def __init__(self, option: str, patterns: Sequence[str] | str | None) -> None:
        pattern_list = [patterns] if isinstance(patterns, str) else patterns
        self.option = option
        self.patterns = None if pattern_list is None else tuple(map(self._spelt, pattern_list))
        self.unused = dict.fromkeys(self.patterns or ())
        self.rejected: set[str] = set()
        self._answers: dict[tuple[str, ...], bool] = {}  # by names, since many ops have the same

    @property
    def matched(self) -> bool:
        """True if a name was selected by a pattern."""
        return len(self.unused) < len(set(self.patterns or ()))

    def __call__(self, *names: str) -> bool:
        """Return True if an op that has one of these names is selected; note what fitted and what did not."""
        if self.patterns is None:
            return True
        if names in self._answers:
            return self._answers[names]
        texts = [self._spelt(name) for name in names]
        matches = [pattern for pattern in self.patterns if any(self._fits(text, pattern) for text in texts)]
        for pattern in matches:
            self.unused.pop(pattern, None)
        # Bounded: a long run may have any number of names.
        if not matches and len(self.rejected) < _MAX_REJECTED:
            self.rejected.update(texts)
        if len(self._answers) < _MAX_REJECTED:
            self._answers[names] = bool(matches)
        return bool(matches)

    def _spelt(self, name: str) -> str:
        """Return a name, or a pattern, in the spelling in which they are compared."""
        return name

    def _fits(self, name: str, pattern: str) -> bool:
        """Return True if a pattern selects a name, both as `_spelt` returns them."""
        return _matches(name, pattern)

    def __str__(self) -> str:
        return self.text(self.patterns or ())

    def text(self, patterns: Iterable[str]) -> str:
        """Return the option with some patterns, as "module=a+b"."""
        return f"{self.option}={'+'.join(patterns) or '[]'}"


class Paths(Patterns):
    """Patterns of paths of modules or name scopes: a path selects all ops in it; "/" is read as a dot."""

    def _spelt(self, name: str) -> str:
        return name.replace("/", ".")

    def _fits(self, name: str, pattern: str) -> bool:
        return _matches(name, pattern) or _matches(name, f"{pattern}.*")


class ModulePaths(Paths):
    """Patterns of calls of modules: a path selects the module's own call alone, `*` stands within a part."""

    def _fits(self, name: str, pattern: str) -> bool:
        if not name or not pattern:  # the model itself
            return name == pattern
        return name.count(".") == pattern.count(".") and _matches(name, pattern)


def _matches(name: str, pattern: str) -> bool:
    # fnmatchcase: names of modules differ by case, on every system.  It compiles each pattern.
    return name == pattern if _WILDCARDS.isdisjoint(pattern) else fnmatchcase(name, pattern)


def listed(option: str, value: Any, error: type[AmandaError]) -> list[str] | None:
    """Return an option's value, a name or several, as a list of names or patterns; None for None.

    Raises `error` for a value that is neither a name nor names.

    Args:
        option: Name of the option, for the error.
        value: A name, several, or None.
        error: Class of the error.
    """
    if value is None:
        return None
    if not isinstance(value, Iterable):
        raise error(f"{option} is {value!r}; give a name or a list of names")
    names = [value] if isinstance(value, str) else list(value)
    for name in names:
        if not isinstance(name, str) or not name:
            raise error(f"{option} has {name!r}; give names, or patterns with * and ?")
    return names


def unmatched(options: Iterable[Patterns], verb: str = "selected", noun: str = "op") -> list[str]:
    """Return a text for each pattern, or empty option, that no op fitted, with near names; none if none ran.

    Args:
        options: Patterns of the options.
        verb: Participle for the text, such as "selected".
        noun: Noun for the text, such as "op".
    """
    sentences = []
    for option in options:
        if option.unused and (option.rejected or option.matched):
            sentences.append(f"no {noun} was {verb} by {option.text(option.unused)}{_name_hint(option)}")
        elif option.patterns == () and option.rejected and verb == "selected":
            sentences.append(f"no {noun} was selected by {option}; give None for all")
    return sentences


def as_remarks(texts: Iterable[str]) -> list[str]:
    """Return texts as sentences, for a result."""
    return [text[0].upper() + text[1:] + "." * (not text.endswith("?")) for text in texts]


def _name_hint(option: Patterns) -> str:
    """Return the end of a sentence: names near the unused patterns, else some names; "" without names."""
    names = option.rejected - {""}
    close_names = [
        name for pattern in option.unused for name in get_close_matches(pattern, names, n=2, cutoff=0.5)
    ]
    if close_names:
        return f"; did you mean {' or '.join(dict.fromkeys(close_names))}?"
    if not names:
        return ""
    examples = sorted(names)[:_MAX_EXAMPLES]
    others = " and others" if len(names) > len(examples) else ""
    return f"; there were {', '.join(examples)}{others}"


Phase = Literal["forward", "backward", "optimizer", "construction"]
"""Parts of a run: the model, its gradient, the step of an optimiser, or the making of a model."""

ToolT = TypeVar("ToolT", bound=amanda.Tool)


class SelectionError(AmandaError, ValueError):
    """A type, module or phase of a selection is not valid."""


class Selection:
    """Select ops by type, module and phase; an op is selected if it fits every option that is not None.

    Args:
        type: Words of StandardMapping ("conv2d") or the framework's own names ("Conv2D"); `*` and `?` stand
            for letters.  A backward op has the type of its forward op.
        module: Paths of modules; what lies in a module is selected with it, and `*` stands for any part
            ("layer4", "*.attention"); Keras' layers may be given by their names.
        phase: "forward", "backward", "optimizer", for the steps of PyTorch's optimizers, "construction", for
            what makes a model, or None for all.  With "backward" forward analysis routines are called all the
            same, since those of backward ops may read what they note down; nothing that they insert runs.
        exclude: Paths of modules whose ops, and those within, are not selected.
    """

    @checked(error=SelectionError)
    def __init__(
        self, type: Globs = None, module: Globs = None, phase: Phase | None = None, exclude: Globs = None
    ) -> None:
        self._types = Patterns("type", listed("type", type, SelectionError))
        self._modules = Paths("module", listed("module", module, SelectionError))
        self._exclude = Paths("exclude", listed("exclude", exclude, SelectionError) or ())
        self._phase = phase
        self._has_selected = self._has_seen_ops = False

    @property
    def has_modules(self) -> bool:
        """True if modules were given."""
        return self._modules.patterns is not None

    @property
    def has_types(self) -> bool:
        """True if types were given."""
        return self._types.patterns is not None

    def let(self, tool: amanda.Tool) -> None:
        """Restrict a tool to the selected ops, and with phase "backward" its routines to backward ops."""
        if self.has_types or self._phase:
            tool.depends_on(StandardMapping())
        tool.restrict(self)
        # Forward analysis still runs, as that of backward ops may read its notes; its routines are dropped.
        if self._phase == "backward":
            tool.wrap_routines(lambda context, type, routine: routine if type.is_backward else None)

    def __call__(self, context: amanda.OpContext) -> bool:
        """Return True if the analysis routines are called for an op; note for `unmatched` what fits."""
        self._has_seen_ops = True
        return self._has_phase(context) and self.fits(context)

    def fits(self, context: amanda.OpContext, *names: str) -> bool:
        """Return True if type and modules of an op are selected, whatever its phase; note what fits.

        Args:
            context: Context of the op.
            *names: Names of the op's type; by default those in its context.
        """
        self._has_seen_ops = True
        if self.has_types and not names:  # the word of StandardMapping, and the framework's names
            operator_name = getattr(context.get_op(), "__name__", "")
            names = (str(context["type"]), str(context.get_forward_op_type()), operator_name)
        paths = context.get_scopes()
        # Types and modules are both asked, since they note for `unmatched` what fits them.
        has_type = not self.has_types or self._types(*names)
        has_path = self._modules(*paths)
        fits = has_type and has_path and not self._exclude(*paths)
        self._has_selected = self._has_selected or fits
        return fits

    def has_path(self, path: str) -> bool:
        """Return True if the modules of the selection have a path, and those excluded do not; note it."""
        return self._modules(path) and not self._exclude(path)

    def __str__(self) -> str:
        exclude = [str(self._exclude)] if self._exclude.patterns else []
        phase = [f"phase={self._phase}"] if self._phase else []
        return ", ".join([*self._inclusions(), *exclude, *phase])

    def unmatched(self) -> list[str]:
        """Return a text for each pattern that fitted no op, with the nearest names; none if no op ran."""
        if not self._has_seen_ops:
            return []
        texts = [*unmatched([self._types, self._modules]), *unmatched([self._exclude], "excluded")]
        if self._has_selected or texts:
            return texts
        inclusions = self._inclusions()
        if self._exclude.matched:
            return [f"every op of {' and '.join(inclusions) or 'the program'} is excluded by {self._exclude}"]
        if self._types.matched and self._modules.matched:
            return [f"no op was selected by {' and '.join(inclusions)} together"]
        return [f"no op was selected by phase={self._phase}"]

    def _inclusions(self) -> list[str]:
        return [str(option) for option in (self._types, self._modules) if option.patterns is not None]

    def _has_phase(self, context: amanda.OpContext) -> bool:
        """Return True for an op of the phase; for "backward" also for forward ops, which are analysed."""
        if self._phase is None:
            return True
        phase: Phase = context["phase"]
        return phase == self._phase or (phase == "forward" and self._phase == "backward")


class SelectOptions(TypedDict, total=False):
    """Options of `select`, as keywords of a tool's constructor: `**selection: Unpack[SelectOptions]`."""

    type: Globs
    module: Globs
    exclude: Globs
    phase: Phase | None
    start: NonNegativeInt
    end: NonNegativeInt | None
    frequency: PositiveInt
    steps: Steps | None


@checked(error=SelectionError)
def select(
    tool: ToolT, *, type: Globs = None, module: Globs = None, exclude: Globs = None,
    phase: Phase | None = None, start: NonNegativeInt = 0, end: NonNegativeInt | None = None,
    frequency: PositiveInt = 1, steps: Steps | None = None,
) -> ToolT:  # fmt: skip
    """Apply a tool to some ops only, at the steps of `range(start, end, frequency)`; return the tool.

    `select(FlopsTool(), module="0")` is `FlopsTool(module="0")` for tools that take these options.
    Raises SelectionError, and `amanda.tools.steps.WindowError` where no step is in the range.

    Args:
        tool: The tool, which is returned.
        type: See `Selection`.
        module: See `type`.
        exclude: See `type`.
        phase: See `type`.
        start: First step.
        end: Step after the last; None for no end.
        frequency: A number of steps, of which the first counts.
        steps: Counter of steps; None for a new one.
    """
    if not isinstance(tool, amanda.Tool):
        raise SelectionError(f"select: tool is {shown(tool)}; give a tool, such as FlopsTool()")
    if (type, module, exclude, phase) != (None, None, None, None):
        Selection(type, module, phase, exclude).let(tool)
    window = Window(Steps() if steps is None else steps, start, end, frequency)
    # A window that is always open would cost each routine a call.
    if (start, end, frequency) != (0, None, 1):
        window.let(tool)
    return tool


def leave_construction(tool: amanda.Tool) -> None:
    """Apply a tool to what a program computes, but not to the construction of its models."""
    tool.depends_on(StandardMapping())
    tool.restrict(lambda context: context["phase"] != "construction")

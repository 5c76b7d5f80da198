"""Built-in rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from amanda.options import Name, checked
from amanda.tools.rewrite._attention import fuse_attention
from amanda.tools.rewrite._batch_norm import fold_batch_norm
from amanda.tools.rewrite._pattern import Capture, Op, PatternError, Rule


@checked(error=PatternError)
def remove(*types: Name, name: str = "") -> Rule:
    """Return a rule that replaces ops of these types by their first input, as "dropout" in inference."""
    told = name or f"remove {', '.join(types)}"
    return Rule(Op(types, Capture("input")), lambda match: match["input"], name=told)


@checked(error=PatternError)
def insert_after(pattern: Op, function: Callable[[Any], Any], name: str = "") -> Rule:
    """Return a rule that passes the output of a pattern through a function, which takes part in autodiff."""
    told = name or f"insert {getattr(function, '__name__', function)}"
    return Rule(pattern, lambda match: function(match.original()), name=told)


_RULES: dict[str, Callable[[], Sequence[Rule]]] = {
    "fold_batch_norm": fold_batch_norm,
    "fuse_attention": fuse_attention,
    "remove_dropout": lambda: (remove("dropout", "alpha_dropout", "feature_dropout", name="remove_dropout"),),
}


def chosen(rules: Sequence[str | Rule] | str | Rule) -> Iterator[Rule]:
    """Yield the rules, with built-in ones for names; raise PatternError for other names."""
    listed = [rules] if isinstance(rules, (str, Rule)) else rules
    for one in listed:
        yield from [one] if isinstance(one, Rule) else _named(one)


def _named(name: str) -> Sequence[Rule]:
    if name not in _RULES:
        near = get_close_matches(name, _RULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PatternError(f"RewriteTool: rules has {name!r}; there are {', '.join(sorted(_RULES))}{hint}")
    return _RULES[name]()

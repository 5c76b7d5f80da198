"""Namespaces: tags that say which framework, version and mode an op belongs to."""

from __future__ import annotations

from functools import lru_cache

from amanda.errors import NamespaceError


class Namespace(tuple[str, ...]):
    """Tags joined by slashes: framework, version, mode.

    >>> op = Namespace("pytorch/2.13.0/eager")
    >>> op.matches("pytorch"), op.matches("*/*/eager"), op.matches("pytorch/2.12.0")
    (True, True, False)
    >>> op == "pytorch"  # the framework
    True
    """

    __slots__ = ()

    def __new__(cls, tags: str) -> Namespace:
        return super().__new__(cls, tags.split("/"))

    def __eq__(self, other: object) -> bool:
        """Compare with another namespace, or with the name of a framework, as the paper's tools do.

        Raises NamespaceError for a string of several tags.
        """
        if isinstance(other, str):
            # A rule by several tags means a prefix; an equality that is never true would hide the mistake.
            if "/" in other:
                raise NamespaceError(
                    f'a namespace is no string: matches("{other}") says whether {self} begins with these '
                    f'tags, and == Namespace("{other}") whether it has no others'
                )
            return self[0] == other
        return tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        """Return the hash of the framework's name, so that a set or dict of such names finds a namespace."""
        return hash(self[0])

    def __str__(self) -> str:
        return "/".join(self)

    def __repr__(self) -> str:
        return f"Namespace({str(self)!r})"

    def __reduce__(self) -> tuple[type[Namespace], tuple[str]]:
        return Namespace, (str(self),)

    def matches(self, pattern: str | Namespace) -> bool:
        """Return True if every tag of `pattern` is `*` or equals the tag in its place; the rest is free."""
        return _matches(self, Namespace(pattern) if isinstance(pattern, str) else pattern)


# Mapping rules ask for each op, of a handful of namespaces and patterns.
@lru_cache(maxsize=256)
def _matches(tags: Namespace, pattern: Namespace) -> bool:
    return len(pattern) <= len(tags) and all(
        want in ("*", have) for want, have in zip(pattern, tags, strict=False)
    )

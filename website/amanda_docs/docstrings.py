"""The extension of griffe that makes Markdown of docstrings; it is loaded by its path."""

from __future__ import annotations

from typing import Any

import griffe

from amanda_docs.fields import as_markdown

SENTENCES = r"Raises|Returns|Source:|Gives"


class Fields(griffe.Extension):
    """Rewrites "name: what it is.  other: ..." paragraphs of docstrings, for names that the object has."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object with all that is in it."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _names(obj))


def _names(obj: griffe.Object) -> set[str]:
    if isinstance(obj, griffe.Function):
        return {parameter.name for parameter in obj.parameters}
    if isinstance(obj, griffe.Class):
        init = obj.members.get("__init__")
        given = {one.name for one in init.parameters} if isinstance(init, griffe.Function) else set()
        return (given | set(obj.members)) - {"self"}
    return set()

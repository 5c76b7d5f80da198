"""Docstrings as Markdown: the fields that they name become lists, their examples code."""

from __future__ import annotations

import re
from textwrap import dedent

SENTENCES = r"Raises|Returns|Source:|Gives"


def as_markdown(text: str, names: set[str]) -> str:
    """A docstring with its fields as a list, its last sentences as paragraphs, and its code as Python."""
    parts = re.split(r"\n{2,}(?! )", text.strip("\n"))
    return "\n\n".join(_paragraph(part, names) for part in parts)


def _paragraph(text: str, names: set[str]) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if "\n\n    " in text:
        prose, code = text.split("\n\n", 1)
        return f"{_paragraph(prose, names)}\n\n```python\n{dedent(code)}\n```"
    if text.startswith(("- ", "```", "|")):
        return text
    one_of = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    if names:
        several = rf"(?:{one_of})(?:(?:, | and )(?:{one_of}))*"
        text = re.sub(rf"(?:(?<=^)|(?<=  )|(?<=\n))({several}): ", r"\n- `\1`: ", text)
        text = re.sub(r"(- `[^`]*`):", lambda found: re.sub(r"(, | and )", r"`\1`", found[0]), text)
    text = re.sub(rf"(?:(?<=  )|(?<=\n))(?=(?:{SENTENCES}))", "\n\n", text)
    head, *items = re.split(r"\n(?=- `)", text)
    lines = [head.strip(), "" if head.strip() else None, *(item.rstrip() for item in items)]
    joined = "\n".join(line for line in lines if line is not None).strip("\n")
    return re.sub(r"\n{3,}", "\n\n", joined)

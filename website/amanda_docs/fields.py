"""Docstrings as Markdown: the fields that they name become lists, their examples code."""

from __future__ import annotations

import ast
import re

SECTIONS = ("Args:\n", "Returns:\n", "Raises:\n", "Yields:\n")
"""Beginnings of sections that editors and griffe read as they are."""
SENTENCES = r"Raises|Returns|Source:|Gives"


def as_markdown(text: str, names: set[str]) -> str:
    """A docstring with its fields as a list, its last sentences as paragraphs, and its code as code."""
    first, *rest = re.split(r"\n{2,}", text.strip("\n"))
    if _is_code("\n\n".join(rest)):
        rest = ["\n\n".join(rest)]
    return "\n\n".join(_paragraph(part, names) for part in [first, *rest])


def _is_code(text: str) -> bool:
    """Whether it is Python of more than a word; prose hardly ever is."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)


def _paragraph(text: str, names: set[str]) -> str:
    if text.startswith(">>>"):
        return f"```pycon\n{text}\n```"
    if text.startswith("amanda "):
        return f"```sh\n{text}\n```"
    if _is_code(text):
        return f"```python\n{text}\n```"
    if text.startswith(("- ", "```", "|", *SECTIONS)):
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

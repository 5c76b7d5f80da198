"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def amount(value: float, unit: str = "") -> str:
    """A quantity with four digits and a decimal prefix: `4.089 G`, `812 k`, `17`.

    >>> amount(4_089_184_256)
    '4.089 G'
    >>> amount(17, "B")
    '17 B'
    """
    magnitude, prefix = float(value), 0
    while abs(magnitude) >= 999.95 and prefix < len(_PREFIXES) - 1:
        magnitude /= 1000
        prefix += 1
    digits = f"{value:g}" if prefix == 0 else f"{magnitude:.4g}"
    return f"{digits} {_PREFIXES[prefix]}{unit}".rstrip()


def shortened(text: str, width: int) -> str:
    """Return text of at most so many characters: paths of files keep their end, names both ends.

    >>> shortened("model.layers.31.mlp.down_proj", 17)
    'model.la…own_proj'
    """
    if len(text) <= width:
        return text
    kept = 0 if "/" in text else (width - 1) // 2
    return f"{text[:kept]}…{text[len(text) - width + 1 + kept :]}"


NOTHING = "No op was executed under this tool; `with amanda.apply(tool):` runs what is in it under the tool."
"""The note of a result that has nothing to tell."""


def not_met(what: str, names: Sequence[str]) -> list[str]:
    """The note on state that was loaded and that no op has asked for, if there is any.

    >>> not_met("masks", ["module.fc/linear/mask"])
    ['1 of the masks that were loaded is of no op that was met: module.fc/linear/mask.']
    """
    if not names:
        return []
    one = f"is of no op that was met: {names[0]}"
    told = one if len(names) == 1 else f"are of no op that was met, such as {names[0]}"
    return [f"{len(names)} of the {what} that were loaded {told}."]


def fitting(
    heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None, numbers: Sequence[bool]
) -> tuple[list[int], int]:
    """Return the columns of a table that fit a width (None: any), and the longest text of a cell.

    Texts give way first, down to 24 characters, numbers never; then the column "source", then shorter texts,
    then columns from the right; three stay.
    """
    natural = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)]
    kept = list(range(len(heads)))
    if width is None:
        return kept, max(natural, default=1)
    while True:
        source = next((i for i in kept if heads[i] == "source" and len(kept) > 3), None)
        for most in _TEXTS[: None if source is None else _BEFORE_SOURCE]:
            taken = [natural[i] if numbers[i] else max(min(natural[i], most), len(heads[i])) for i in kept]
            if sum(taken) + _BETWEEN * len(kept) + 1 <= width or (len(kept) <= 3 and most == _TEXTS[-1]):
                return kept, most
        kept.remove(kept[-1] if source is None else source)


_TEXTS = (200, 44, 32, 24, 16, 12)
_BEFORE_SOURCE = 4
_BETWEEN = 3

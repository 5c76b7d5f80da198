"""Numbers as people read them."""

from __future__ import annotations

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
    """Text of at most so many characters, its end kept: what tells paths apart is there."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]

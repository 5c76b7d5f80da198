"""Bytes that an op moves which computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from amanda.tools.flops._aten import MOVES as _ATEN
from amanda.tools.flops._formulas import MOVES, STAYS
from amanda.tools.flops._onnxruntime import COPIES as _ONNX_COPIES
from amanda.tools.flops._tensorflow import COPIES as _TENSORFLOW_COPIES

_WORDS = (MOVES | _ATEN) - STAYS
_TYPES = _TENSORFLOW_COPIES | _ONNX_COPIES
_RESHAPED = frozenset({"transpose", "permute", "resize", "as_strided"})
"""Words of ops that in place change how a tensor is read, and nothing in memory."""


def copies(names: tuple[str, str], in_place: bool) -> bool:
    """Return whether an op that computes nothing writes its result into other memory.

    names: the framework's name of the op and its word.
    """
    return names[0] in _TYPES or (names[1] in _WORDS and not (in_place and names[1] in _RESHAPED))


def copied(inputs: Sequence[int], outputs: Sequence[int], in_place: bool) -> int:
    """Return the bytes read and written, given those of each input and output.

    Of its first input an op reads no more than it writes, as a gather does; the others, such as indices, it
    reads whole.  In place it writes as much as the other inputs hold, or all of the first without them.
    """
    written, (first, *rest) = sum(outputs), inputs or (0,)
    others = sum(rest)
    if in_place:
        return others + min(written, others or written)
    return written + min(first, written) + others

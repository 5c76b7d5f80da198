"""Bytes that an op moves."""

from __future__ import annotations

from collections.abc import Sequence

from amanda.tools.flops import _aten, _onnxruntime, _tensorflow, _words

MOVES = _words.MOVES | _aten.MOVES | _tensorflow.MOVES | _onnxruntime.MOVES
"""Names of ops that compute nothing."""

_COPY = ((_words.MOVES | _aten.MOVES) - _words.STAYS, _tensorflow.COPIES | _onnxruntime.COPIES)
"""Of those that write their result into other memory: words, and names of frameworks."""
_RESHAPED = frozenset({"transpose", "permute", "resize", "as_strided"})
"""Words of ops that in place change how a tensor is read, and nothing in memory."""


def traffic(names: tuple[str, str], inputs: Sequence[int], outputs: Sequence[int], in_place: bool) -> int:
    """Return the bytes that an op reads and writes, given those of each input and output.

    names: the framework's name of the op and its word.
    Of its first input an op that copies reads no more than it writes, as a gather does; the others, such as
    indices, it reads whole.  In place it writes as much as the other inputs hold, or all of the first without
    them.
    """
    written, (first, *rest) = sum(outputs), inputs or (0,)
    others = sum(rest)
    if MOVES.isdisjoint(names):
        return sum(inputs) + written
    words, kinds = _COPY
    if names[0] not in kinds and (names[1] not in words or (in_place and names[1] in _RESHAPED)):
        return 0
    if in_place:
        return others + min(written, others or written)
    return written + min(first, written) + others

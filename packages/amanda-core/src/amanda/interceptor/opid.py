"""Ids of ops: what a place in the program is made of, and how it becomes 64 bits.

A place is hashed step by step with a linear congruential generator (Lehmer's, with Knuth's
MMIX constants) whose high half is folded back, so that every input bit reaches every part of
the id. The native interceptor computes the same numbers in C; this is the reference.
"""

from array import array
from collections.abc import Callable
from hashlib import blake2b
from types import CodeType, FrameType

MASK = (1 << 64) - 1
SITE_STEP = 0x9E3779B97F4A7C15
ROOT_HASH = 0x416D616E6461
WALK_LIMIT = 128
WAY_LIMIT = 8
"""Call sites of the program beyond a place outside of modules, which tell apart the ways to the place."""

FRAMEWORK = 1
"""Code of a framework: an op's line in the program is outside of it."""
BOUNDARY = 2
"""Code that makes a call of an enclosing object, a module's; an op within it belongs to that."""
SKIPPED = 4
"""Code that leaves no mark: calls in it lead to an op as if it were not there."""


def mix(state: int, value: int) -> int:
    """One step of the generator, from `state` by `value`; both and the result are 64 bits wide."""
    state = ((state ^ value) * 6364136223846793005 + 1442695040888963407) & MASK
    return state ^ (state >> 32)


def digest(*parts: str | bytes | int) -> int:
    """Return 64 bits of a hash over parts, the same in every process."""
    whole = blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else str(part).encode()
        # With lengths, since "ab", "c" and "a", "bc" are different names.
        whole.update(b"%d:" % len(encoded) + encoded)
    return int.from_bytes(whole.digest(), "little")


def first_instructions(code: CodeType) -> bytes:
    """For each instruction word, the first word of the run that stands for one expression.

    A specialising interpreter is found at different words of one call (CPython 3.11 moves
    from CALL to PRECALL); the words of a call share their source position.
    """
    if not hasattr(code, "co_positions"):
        return b""
    first = array("I")
    previous = None
    for word, position in enumerate(code.co_positions()):
        first.append(first[-1] if position == previous and word else word)
        previous = position
    return first.tobytes()


def code_hash(code: CodeType) -> int:
    """Hash of where code was written and what its lines are."""
    # Not `hash(code)`: that differs between processes, and ids are stored in files.
    name = getattr(code, "co_qualname", code.co_name)
    lines = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
    return digest(code.co_filename, name, code.co_firstlineno, lines)


class CodeRegistry:
    """Kinds of code: a framework's, calls of enclosing objects, and what leaves no mark."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._roots: dict[str, int] = {}
        self._codes: dict[CodeType, int] = {}
        self._files: dict[str, int] = {}  # what the roots say of files that were met
        self._changed = changed

    def add_root(self, prefix: str, kind: int) -> None:
        """Mark code whose file name starts with `prefix` as of this kind; the longest prefix wins."""
        # To describe all code again is slow: a driver that is attached anew changes nothing.
        if self._roots.get(prefix) != kind:
            self._roots[prefix] = kind
            self._files.clear()
            self._changed()

    def add_code(self, code: CodeType, kind: int) -> None:
        """Mark a code object as of this kind besides."""
        if not self._codes.get(code, 0) & kind:
            self._codes[code] = self._codes.get(code, 0) | kind
            self._changed()

    def skip(self, where: str | CodeType) -> None:
        """Leave out a file, what is below a folder (its name ends in a slash), or one code object."""
        if isinstance(where, str):
            self.add_root(where, SKIPPED | self._kind_of_file(where))
        else:
            self.add_code(where, SKIPPED)

    def kind(self, code: CodeType) -> int:
        """Return flags of the kinds that code is of; 0 for the user's own."""
        name = code.co_filename
        if name not in self._files:
            self._files[name] = self._kind_of_file(name)
        return self._files[name] | self._codes.get(code, 0)

    def innermost(self, frame: FrameType | None, but: int) -> FrameType | None:
        """Return the innermost frame from this one outwards whose code is of none of the kinds `but`."""
        files = self._files
        while frame is not None:
            code = frame.f_code
            # Most frames are told by their file: to hash code takes longer than all else here.
            if not files.get(code.co_filename, 0) & but and not self.kind(code) & but:
                return frame
            frame = frame.f_back
        return None

    def is_ours(self, code: CodeType) -> bool:
        """Return True for code of Amanda and of its drivers."""
        return self.kind(code) & (FRAMEWORK | SKIPPED) == SKIPPED

    def _kind_of_file(self, name: str) -> int:
        # testing/ lies in our folder and is not ours: the longest root decides.
        matching = max((root for root in self._roots if name.startswith(root)), key=len, default="")
        return self._roots.get(matching, 0)

    def describe(self, code: CodeType) -> tuple[int, int, bytes]:
        """Return what the interceptor keeps with a code object: hash, kind, first instructions."""
        return code_hash(code), self.kind(code), first_instructions(code)

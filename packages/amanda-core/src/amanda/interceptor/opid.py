"""Ids of ops: the parts of a place in the program, and their hash of 64 bits.

A place is hashed step by step with a linear congruential generator (Lehmer's, with Knuth's
MMIX constants) whose high half is folded back, so that every input bit reaches every part of
the id. The native interceptor computes the same numbers in C; this is the reference.

A region is the call of an enclosing object, such as a module; the root is the region outside of all. A call
site is an instruction in a code object. A way to a place is the chain of call sites beyond the place, at the
root.
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
    """Return the hash of a state and one more value: a step of the generator; all three have 64 bits."""
    state = ((state ^ value) * 6364136223846793005 + 1442695040888963407) & MASK
    return state ^ (state >> 32)


def digest(*parts: str | bytes | int) -> int:
    """Return 64 bits of a hash over parts, the same in every process."""
    hasher = blake2b(digest_size=8)
    for part in parts:
        encoded = part if isinstance(part, bytes) else str(part).encode()
        # With lengths, since "ab", "c" and "a", "bc" are different names.
        hasher.update(b"%d:" % len(encoded) + encoded)
    return int.from_bytes(hasher.digest(), "little")


def first_instructions(code: CodeType) -> bytes:
    """Return for each instruction word the first word of its expression, as an array of uint32 in bytes.

    During one call a frame may be at different words, as the interpreter specialises the call (CPython 3.11
    moves from CALL to PRECALL); the words of a call share their source position.  Returns b"" where code has
    no positions: before Python 3.11.
    """
    if not hasattr(code, "co_positions"):
        return b""
    first_words, first_word, position = [], 0, None
    for word, position_of_word in enumerate(code.co_positions()):
        if position_of_word != position:
            first_word, position = word, position_of_word
        first_words.append(first_word)
    return array("I", first_words).tobytes()


def code_hash(code: CodeType) -> int:
    """Return a hash of the file, the name and the lines of code, the same in every process."""
    # Not `hash(code)`: that differs between processes, and ids are stored in files.
    name = getattr(code, "co_qualname", code.co_name)
    lines = code.co_linetable if hasattr(code, "co_linetable") else code.co_lnotab
    return digest(code.co_filename, name, code.co_firstlineno, lines)


class CodeRegistry:
    """Kinds of code, as flags: FRAMEWORK, BOUNDARY and SKIPPED.

    changed: called when the kind of code may have changed that was asked for before.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._kind_by_root: dict[str, int] = {}  # a root is the start of file names
        self._kind_by_code: dict[CodeType, int] = {}  # further kinds of single code objects
        self._kind_by_file: dict[str, int] = {}  # a cache, computed from the roots
        self._on_change = changed

    def add_root(self, prefix: str, kind: int) -> None:
        """Mark code whose file name starts with `prefix` as of this kind; the longest prefix wins."""
        # To describe all code again is slow: a driver that is attached anew changes nothing.
        if self._kind_by_root.get(prefix) != kind:
            self._kind_by_root[prefix] = kind
            self._kind_by_file.clear()
            self._on_change()

    def add_code(self, code: CodeType, kind: int) -> None:
        """Add a kind to those of a code object."""
        if not self._kind_by_code.get(code, 0) & kind:
            self._kind_by_code[code] = self._kind_by_code.get(code, 0) | kind
            self._on_change()

    def skip(self, where: str | CodeType) -> None:
        """Mark as SKIPPED a file, a folder (its name ends in a slash) with all below, or one code object.

        A file or folder keeps the kinds that it has.
        """
        if isinstance(where, str):
            self.add_root(where, SKIPPED | self._kind_of_file(where))
        else:
            self.add_code(where, SKIPPED)

    def kind(self, code: CodeType) -> int:
        """Return flags of the kinds that code is of; 0 for the user's own."""
        file_name = code.co_filename
        if file_name not in self._kind_by_file:
            self._kind_by_file[file_name] = self._kind_of_file(file_name)
        return self._kind_by_file[file_name] | self._kind_by_code.get(code, 0)

    def innermost_frame(self, frame: FrameType | None, excluded_kinds: int) -> FrameType | None:
        """Return the innermost frame, from this one outwards, whose code has none of the excluded kinds."""
        kind_by_file = self._kind_by_file
        while frame is not None:
            code = frame.f_code
            # The cached kind of the file first, which decides most frames: `kind` hashes the code, which
            # takes longer than all else here.
            is_excluded_by_file = kind_by_file.get(code.co_filename, 0) & excluded_kinds
            if not is_excluded_by_file and not self.kind(code) & excluded_kinds:
                return frame
            frame = frame.f_back
        return None

    def is_ours(self, code: CodeType) -> bool:
        """Return True for code of Amanda and of its drivers."""
        return self.kind(code) & (FRAMEWORK | SKIPPED) == SKIPPED

    def _kind_of_file(self, name: str) -> int:
        # testing/ lies in our folder and is not ours: the longest root decides.
        matching_roots = (root for root in self._kind_by_root if name.startswith(root))
        return self._kind_by_root.get(max(matching_roots, key=len, default=""), 0)

    def describe(self, code: CodeType) -> tuple[int, int, bytes]:
        """Return what the interceptor caches of a code object: `code_hash`, `kind`, `first_instructions`."""
        return code_hash(code), self.kind(code), first_instructions(code)

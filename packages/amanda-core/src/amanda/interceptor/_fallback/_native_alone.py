"""Parts of the native interceptor that pure Python cannot have faster."""

from collections.abc import Callable
from typing import Any


class Memo:
    """An op's plans; what calls of it come to is nothing that Python could do faster."""

    def __init__(self, plans: dict[Any, Any], sized: bool = False) -> None:
        self.plans = plans

    def learn(self, key: int, program: "Program | None") -> None:
        """Learn nothing."""

    def forget(self) -> None:
        """Forget what was learned; the plans stay."""

    def __len__(self) -> int:
        return 0


class _NativeAlone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"a {type(self).__name__} is for the native interceptor")


class Hook(_NativeAlone):
    """The routines of a program on a tuple of values that a framework calls it with."""

    def __call__(self, *values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Run them."""
        raise NotImplementedError


class Program(_NativeAlone):
    """Routines around an op, which native code runs."""

    def hook(self, reader: "Reader", go_on: Callable[..., Any], first: Any, shapes: Any = None) -> Hook:
        """Runs the routines on a tuple of values that it is called with."""
        raise NotImplementedError


class Moments(_NativeAlone):
    """Statistics of the numbers of arrays, read in one pass; bits as `amanda.tools.stats.Bins` has them.

    numbers: those of `amanda.tools.stats.Statistics`, in their order.  counts: of each bin, int64 in bytes;
    None where nothing was counted.
    """

    numbers: tuple[Any, ...]
    counts: bytes | None

    def add(self, array: Any) -> bool:
        """Take in numbers; return False if they are no float or double in one piece of memory."""
        raise NotImplementedError

    def merge(self, moments: Any) -> None:
        """Take in what another one, of the same bins, has taken in."""
        raise NotImplementedError


class Reader(_NativeAlone):
    """A reader of tensors for native code."""

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, sized: bool = False) -> int:
        """Return 64 bits that decide what a call comes to; 0 where that cannot be told."""
        raise NotImplementedError

    def fits(self, original: Any, value: Any) -> bool:
        """Return True if native code may put a value in the place of a tensor."""
        raise NotImplementedError

    def memory(self, value: Any) -> int:
        """Return what tells the memory of a plain tensor; 0 of anything else."""
        raise NotImplementedError

    def version(self, value: Any) -> int | None:
        """Return what changes when a tensor, or one of a list, is written."""
        raise NotImplementedError

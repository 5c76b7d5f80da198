"""Extents that a with statement enters and leaves."""

from contextlib import suppress
from typing import Any

_MOST_TRIES = 16


class Extent:
    """Context manager that calls `_begin` and `_end`, methods of a subclass, on entry and exit.

    An exception out of these is raised once `_unsettled` is false: until then `_end` is called again. Only
    the native interceptor has no instant between the statement and these methods at which a signal may come.
    """

    _unsettled = False

    def _begin(self) -> Any:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        entered = self._unsettled
        try:
            return self._begin()
        except BaseException:
            if not entered:
                self._settle()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        """End what an exception has left unsettled."""
        for _ in range(_MOST_TRIES):
            if not self._unsettled:
                return
            with suppress(BaseException):  # the exception that came first is raised
                self._end()

"""Recording of tapes: not around routines, but the tapes that routines open themselves record."""

import functools
import threading
from typing import Any

from amanda.backend import Attributes
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop


class _Here(threading.local):
    """The number of contexts of ours that do not record and that this thread is in."""

    depth = 0


_here = _Here()


class Unrecorded:
    """`stop_recording` without its generality: no gradient tape or forward accumulator hears of ops.

    Left at the latest as it is freed: an interrupt may come as `__exit__` is called.
    """

    __slots__ = ("_stopped",)

    def __enter__(self) -> None:
        stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        self._stopped = stopped
        _here.depth += 1
        if not stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    def __exit__(self, *_: object) -> None:
        stopped, self._stopped = self._stopped, None
        _here.depth -= 1
        if not stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()

    def __del__(self) -> None:
        if getattr(self, "_stopped", None) is not None:
            self.__exit__()


def allow_tapes_in_routines(attributes: Attributes) -> None:
    """Make a tape that a routine opens record as long as it is open.

    The tapes around hear of it then, in vain: what a routine gives back is cut off from how it was made.
    """
    push, pop = backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape

    @functools.wraps(push)
    def _push_tape(tape: Any) -> None:
        if _here.depth and pywrap_tfe.TFE_Py_TapeSetIsStopped():
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            tape._amanda_restarted = True
        push(tape)

    @functools.wraps(pop)
    def _pop_tape(tape: Any) -> None:
        pop(tape)
        if getattr(tape, "_amanda_restarted", False):
            tape._amanda_restarted = False
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    attributes.set(backprop.GradientTape, "_push_tape", _push_tape)
    attributes.set(backprop.GradientTape, "_pop_tape", _pop_tape)

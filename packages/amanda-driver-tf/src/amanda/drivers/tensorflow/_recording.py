"""Recording on tapes: tapes of the program do not record routines, tapes that a routine opens do."""

import functools
import threading
from typing import Any

from amanda.backend import Attributes
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop


class _UnrecordedDepth(threading.local):
    """The number of open `Unrecorded` contexts of a thread."""

    depth = 0


_unrecorded = _UnrecordedDepth()


class Unrecorded:
    """Context in which no gradient tape or forward accumulator records; faster than `tape.stop_recording`."""

    __slots__ = ("_was_stopped",)

    def __enter__(self) -> None:
        stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
        self._was_stopped = stopped
        _unrecorded.depth += 1
        if not stopped:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()

    def __exit__(self, *_: object) -> None:
        stopped, self._was_stopped = self._was_stopped, None
        _unrecorded.depth -= 1
        if not stopped:
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()

    def __del__(self) -> None:
        # An interrupt may come between the end of the body and `__exit__`, and would leave recording off.
        if getattr(self, "_was_stopped", None) is not None:
            self.__exit__()


def allow_tapes_in_routines(attributes: Attributes) -> None:
    """Make a tape that a routine opens record while it is open.

    TensorFlow stops and restarts recording for all tapes of a thread at once. So the program's tapes record
    the routine's ops, too; these do not count, since the routine's result is cut off from the ops that
    computed it.
    """
    # Recording is stopped in native code, which has no switch for a single tape.
    push, pop = backprop.GradientTape._push_tape, backprop.GradientTape._pop_tape

    @functools.wraps(push)
    def _push_tape(tape: Any) -> None:
        if _unrecorded.depth and pywrap_tfe.TFE_Py_TapeSetIsStopped():
            pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
            # The tape remembers that it restarted recording: tapes may be closed in another order than they
            # were opened.
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

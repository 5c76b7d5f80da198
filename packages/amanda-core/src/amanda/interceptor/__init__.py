"""The cross-language interceptor: calls of native callables pass through Amanda while a scope is open.

It knows CPython and no framework. `Site(target, op, key, hash, handler)` stands for one callable:
a builtin function, a method or getset descriptor, a subscript slot, all placed natively, or any
Python callable, which a `Detour` replaces. While an `Activation` is in force, a call of it gets an op id
(see `amanda.interceptor.opid`), and unless the activation's table keeps None under that id, goes to

    handler(state, plan, op_id, site, args, kwargs)

A plan that is a `Memo` may learn what calls of an op come to: nothing, or the routines of a `Program`.
Native code does that then, as far as it can, and a `Reader` says how it tells calls apart. The handler
of such an op gets two arguments more: under which key the memo may learn of this call (0: it may not),
and what is done of the program, None where nothing: the plan, the last step, what its routine returned, what
the op returned (NotImplemented: it has not run), and the inputs where routines gave some (else None).

`Moments` are statistics of numbers in memory, for observers: they belong to no call.

Without a C compiler at install time the same face is served in pure Python, where callables are
replaced by attribute; `NATIVE` says which one is in force and `REASON` why.
"""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

NATIVE = False
"""True if native code intercepts."""
REASON: str | None = None
"""Why native code does not; None where it does."""

if os.environ.get("AMANDA_NATIVE") == "0":
    REASON = "AMANDA_NATIVE=0 asks for the pure-Python interceptor"
else:
    try:
        from amanda.interceptor import _native  # type: ignore[attr-defined]

        _names: dict[str, object] = {"modules": sys.modules}
        if _refusal := _native.lib.amanda_boot(_native.ffi.cast("void *", id(_names))):
            raise ImportError(
                "it serves the main interpreter alone" if _refusal > 0 else "the report is above"
            )
        NATIVE = True
    except ImportError as error:
        REASON = (
            "the native interceptor cannot be loaded: " + str(error)
            if importlib.util.find_spec("amanda.interceptor._native")
            else "the native interceptor was not built; install a C compiler, then amanda-core again"
        )

if TYPE_CHECKING or not NATIVE:
    from amanda.interceptor._fallback import (
        ACTIVATION,
        OCCURRENCE_CAP,
        Activation,
        Detour,
        Enclosure,
        Extent,
        Graphs,
        Hook,
        Lock,
        Mark,
        Memo,
        Moments,
        PlanTable,
        Program,
        Reader,
        Site,
        Snapshot,
        Suspension,
        Tally,
        active,
        add_identity_type,
        configure,
        failure,
        forget_code,
        forget_failures,
        forked,
        keep_failure,
        ordinal,
        reset_root,
        running,
        set_leaf_type,
        snapshot,
        statistics,
        subjects,
        watch_outside,
    )
else:
    globals().update({name: value for name, value in _names.items() if name != "modules"})

from amanda.interceptor.interrupts import uninterrupted  # noqa: E402
from amanda.interceptor.registry import codes  # noqa: E402 - it needs what is above

TRANSPARENT = 1
"""Flag of a site: ops called inside it are ops of their own."""
IMPLEMENTATION = 2
"""Flag of a site: called inside another op, it is no op."""
ONE_PLACE = 4
"""Flag of a site: the parameters that it is given do not tell its calls apart."""

__all__ = [
    "ACTIVATION",
    "IMPLEMENTATION",
    "NATIVE",
    "OCCURRENCE_CAP",
    "ONE_PLACE",
    "REASON",
    "TRANSPARENT",
    "Activation",
    "Detour",
    "Enclosure",
    "Extent",
    "Graphs",
    "Hook",
    "Lock",
    "Mark",
    "Memo",
    "Moments",
    "PlanTable",
    "Program",
    "Reader",
    "Site",
    "Snapshot",
    "Suspension",
    "Tally",
    "active",
    "add_identity_type",
    "codes",
    "configure",
    "failure",
    "forget_code",
    "forget_failures",
    "forked",
    "keep_failure",
    "ordinal",
    "reset_root",
    "running",
    "set_leaf_type",
    "snapshot",
    "statistics",
    "subjects",
    "uninterrupted",
    "watch_outside",
]

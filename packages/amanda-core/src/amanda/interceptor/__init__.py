"""The cross-language interceptor: calls of native callables pass through Amanda while a scope is open.

It knows CPython and no framework. `Site(target, op, key, hash, handler)` stands for one callable:
a builtin function, a method or getset descriptor, a subscript slot, all placed natively, or any
Python callable, which a `Detour` replaces. While an `Activation` is in force, a call of it gets an op id
(see `amanda.interceptor.opid`), and unless the activation's table keeps None under that id, goes to

    handler(state, plan, op_id, site, args, kwargs)

A plan that is a `CallCache` may learn, for each form of call, a `Program` with the routines that native code
is to run, or None for no routines. A `Reader` computes the key of a call's form. The handler of such an op
gets two arguments more: the key under which the cache may learn the form of this call (0: it may not), and
the `Resumption` with which Python continues an execution that native code has begun (else None).

`Moments` are statistics of numbers in memory, for observers: they belong to no call. A `FiniteCheck` is a
routine that native code calls only where an op's outputs are not finite. `Moments.add_all` and `nonfinite`
read many arrays at once, by the buffer protocol. A `Clock` measures executions, which nest on each thread; a
`StorageTracker` counts the bytes of live storages, and a `SavedTensorReader` reads what ops have saved for
their backward ops. `ExecutionRecords`, `LiveTensors` and `SentGradients` hold what a tool has recorded of the
dataflow between ops, for a `RepeatObserver`, which native code calls only for what is new. A
`DeferredRelease` lets deep graphs of backward ops be freed without recursion.

Without a C compiler at install time a pure-Python interceptor offers the same names, and replaces
callables as attributes; `NATIVE` tells which interceptor is in force and `REASON` why.
"""

# ruff: noqa: F403, F405

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from amanda.interceptor.boot import check_interpreter

__all__ = [
    "ACTIVATION",
    "CHECKS",
    "IMPLEMENTATION",
    "NATIVE",
    "OCCURRENCE_CAP",
    "ONE_PLACE",
    "REASON",
    "TRANSPARENT",
    "Activation",
    "CallCache",
    "Clock",
    "ClockObserver",
    "DeferredRelease",
    "Detour",
    "Enclosure",
    "ExecutionRecord",
    "ExecutionRecords",
    "Extent",
    "FiniteCheck",
    "Gate",
    "GatedRoutine",
    "Graphs",
    "Hook",
    "HookRegistrar",
    "LiveTensors",
    "Lock",
    "Mark",
    "Moments",
    "MomentsObserver",
    "PlanTable",
    "Program",
    "Reader",
    "RepeatObserver",
    "Resumption",
    "SavedTensorReader",
    "SentGradients",
    "ShapeCounter",
    "Site",
    "Snapshot",
    "StorageObserver",
    "StorageTracker",
    "Suspension",
    "active",
    "add_identity_type",
    "codes",
    "configure",
    "failure",
    "forget_code",
    "forget_failures",
    "forked",
    "keep_failure",
    "nonfinite",
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

NATIVE = False
"""True if native code intercepts."""
REASON: str | None = None
"""The reason why native code does not intercept; None if it does."""
CHECKS = 0
"""Number of checks by which native code was tried on this interpreter."""

if os.environ.get("AMANDA_NATIVE") == "0":
    REASON = "AMANDA_NATIVE=0 asks for the pure-Python interceptor"
else:
    try:
        from amanda.interceptor import _native  # type: ignore[attr-defined]

        _names: dict[str, object] = {"modules": sys.modules}
        # cffi passes no Python objects: native code gets the dict's address, and puts its objects into it.
        if _refusal := _native.lib.amanda_boot(_native.ffi.cast("void *", id(_names))):
            raise ImportError(
                "it serves the main interpreter alone" if _refusal > 0 else "the report is above"
            )
        CHECKS = check_interpreter(_names)
        NATIVE = True
    except ImportError as error:
        REASON = (
            f"the native interceptor cannot be loaded: {error}"
            if importlib.util.find_spec("amanda.interceptor._native")
            else "the native interceptor was not built; install a C compiler, then amanda-core again"
        )

if TYPE_CHECKING:
    from amanda.interceptor._fallback import *
else:
    # The names stand once, in `__all__`: whichever interceptor is in force gives their objects.
    _objects = _names if NATIVE else vars(importlib.import_module("amanda.interceptor._fallback"))
    globals().update({name: _objects[name] for name in __all__ if name in _objects})

from amanda.interceptor.interrupts import uninterrupted  # noqa: E402
from amanda.interceptor.opid import SKIPPED, CodeRegistry  # noqa: E402

TRANSPARENT = 1
"""Flag of a site: ops called inside it are ops of their own."""
IMPLEMENTATION = 2
"""Flag of a site: a call inside another op is a part of that op."""
ONE_PLACE = 4
"""Flag of a site: parameters among its arguments do not enter op ids."""

codes = CodeRegistry(forget_code)
"""The one registry of code: which frames of a program belong to Amanda, to frameworks, or to the user."""
_CORE = Path(__file__).parents[1]
codes.add_root(f"{_CORE}/", SKIPPED)
# The suite's programs are like the user's; its driver is Amanda's, as any driver.
codes.add_root(f"{_CORE / 'testing'}/", 0)
codes.add_root(f"{_CORE / 'testing' / '_fake_driver.py'}", SKIPPED)

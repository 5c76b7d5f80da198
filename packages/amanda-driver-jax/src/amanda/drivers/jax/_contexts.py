"""Keys of JAX's caches: each stack of tools has traced programs of its own, beside those without tools."""

import ctypes
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from amanda import interceptor
from amanda.backend import State
from jax._src import config, pjit

from ._variants import FunctionVariants

_CONFIG: Any = config.jax_jit_cpp_cache_obj._obj
"""A setting of JAX that is part of every key of its caches.

Its value is a cache for the executables of functions made in a scope, so these executables end with the
tools. A new setting would change the keys of programs that are compiled already."""
_UNSET: Any = config.config_ext.unset
_CAPACITY = 8192
BACKWARD = "backward"
"""Purpose of the key under which backward passes are traced, whose ops are not analysed."""


class ToolStackPrograms:
    """Records of the programs that were traced for a stack of tools; the `ToolStack` alone holds them.

    JAX's caches hold a program as long as its function lives, so a program holds nothing of the tools but
    tokens of routines and executions.

    findings: what tracing has noted of each program.  keys: of JAX's caches, by autodiff and purpose.
    """

    def __init__(self) -> None:
        self.findings: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.keys: dict[Hashable, Any] = defaultdict(partial(pjit.make_jit_cpp_cache, _CAPACITY))
        self._functions: weakref.WeakKeyDictionary[Any, FunctionVariants] = weakref.WeakKeyDictionary()
        # A set of its own for the finalizer, which must not refer to this object.
        self._user_functions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._value_by_token: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scopes: tuple[weakref.ref[Any], ...] = ()
        # Not at exit: the executables end with the process, and JAX may be gone already.
        weakref.finalize(self, _clear_executables_soon, self._user_functions).atexit = False

    @staticmethod
    def of(stack: Any) -> "ToolStackPrograms":
        """Return the programs of a stack of tools, created at the first call."""
        programs: ToolStackPrograms | None = stack.rewrites.get(ToolStackPrograms)
        return programs or stack.rewrites.setdefault(ToolStackPrograms, ToolStackPrograms())

    def add_scope(self, scope: Any) -> None:
        """Record a scope of these tools, in which all their programs run; forget closed scopes."""
        if not any(reference() is scope for reference in self._scopes):
            self._scopes = (*filter(_is_open, self._scopes), weakref.ref(scope))

    @property
    def is_open(self) -> bool:
        """Return True while a scope of these tools is open, so that programs call their routines."""
        return any(map(_is_open, self._scopes))

    def variants_of(self, function: Callable[..., Any]) -> FunctionVariants:
        """Return a user's function as JAX traces it for these tools, the same while the function lives."""
        if function not in self._functions:
            self._functions[function] = FunctionVariants(function)
            self._user_functions.add(function)
        return self._functions[function]

    def keep_with(self, token: Any, value: Any) -> Any:
        """Keep a value alive as long as its token and this object; return a weak reference to the value."""
        self._value_by_token[token] = value
        return weakref.ref(value)


def _is_open(reference: weakref.ref[Any]) -> bool:
    """Return True for a reference to a scope that lives and is open."""
    scope = reference()
    return scope is not None and not scope.closed


_ENDED: list[weakref.WeakSet[Any]] = []  # the user's functions of stacks of tools that have ended


def _clear_executables_soon(functions: weakref.WeakSet[Any]) -> None:
    """Make Python drop the executables between two of the program's instructions.

    A garbage collection may end the tools while JAX's native code makes a function: to clear its cache, which
    is not there yet, would end the process.
    """
    _ENDED.append(functions)
    ctypes.pythonapi.Py_AddPendingCall(_CLEAR_ENDED, None)


def _clear_ended(_: Any) -> int:
    """Drop the executables of all stacks of tools that have ended; return 0, for no error."""
    while _ENDED:
        _clear_executables(_ENDED.pop())
    return 0


_CLEAR_ENDED = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_clear_ended)


def _clear_executables(functions: weakref.WeakSet[Any]) -> None:
    """Drop the executables that JAX's native code keeps by the user's functions.

    Executables without tools are among them; JAX finds these again in its other caches at the next call.
    """
    # JAX has no list of the native functions made by `jit`, but each refers to the user's function.
    for referrer in gc.get_referrers(*functions) if functions else ():
        if type(referrer).__name__ == "PjitFunction":
            referrer._clear_cache()


def cache_key_of(state: State, purpose: Hashable = 0) -> Any:
    """Return the key under which JAX caches programs for the tools of a state; record the innermost scope.

    The same tools have the same key; where Amanda's cache is off, each call returns a new one.
    purpose: number of a function's variant, or BACKWARD.
    """
    if state.scopes:
        ToolStackPrograms.of(state.stack).add_scope(state.scopes[-1])
    if not state.cache:
        # A new object is a key that no cache has, so that everything is traced again.
        return pjit.make_jit_cpp_cache(_CAPACITY)
    return ToolStackPrograms.of(state.stack).keys[state.autodiff, purpose]


def set_cache_key() -> None:
    """Set this thread's cache key to that of the tools in force, or to JAX's own where none is."""
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and activation.active:
        _CONFIG.set_local(cache_key_of(activation.state))
    else:
        unset_cache_key()


@contextmanager
def with_cache_key(key: Any = None) -> Iterator[None]:
    """Trace under a cache key within the context; under None what JAX traces is as without the tools."""
    # Native calls, and so cheap enough for each op.
    outer_key = _CONFIG.swap_local(key)
    try:
        yield
    finally:
        _CONFIG.set_local(outer_key)


@contextmanager
def without_tools() -> Iterator[None]:
    """Enter a context in which tools see no ops, and nothing is traced for them."""
    with interceptor.Suspension(), with_cache_key():
        yield


def unset_cache_key() -> None:
    """Trace on this thread as without Amanda."""
    _CONFIG.set_local(_UNSET)

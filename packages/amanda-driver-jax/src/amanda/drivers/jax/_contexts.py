"""Keys of JAX's caches: code is traced anew for tools, and programs that were compiled without them stay."""

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
    """The programs that were traced for a stack of tools; the `ToolStack` alone holds this object.

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
        self._values: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scopes: tuple[weakref.ref[Any], ...] = ()
        # Not at exit: the executables end with the process, and JAX may be gone already.
        weakref.finalize(self, _clear_executables, self._user_functions).atexit = False

    @staticmethod
    def of(stack: Any) -> "ToolStackPrograms":
        """Return the programs of a stack of tools."""
        programs: ToolStackPrograms | None = stack.rewrites.get(ToolStackPrograms)
        return programs or stack.rewrites.setdefault(ToolStackPrograms, ToolStackPrograms())

    def add_scope(self, scope: Any) -> None:
        """Note a scope of these tools, and forget closed ones; programs of an earlier scope run in it too."""
        if not any(reference() is scope for reference in self._scopes):
            open_scopes = (
                reference
                for reference in self._scopes
                if (other_scope := reference()) is not None and not other_scope.closed
            )
            self._scopes = (*open_scopes, weakref.ref(scope))

    @property
    def is_open(self) -> bool:
        """Return True while a scope of these tools is open, so that programs call their routines."""
        return any(
            scope is not None and not scope.closed for scope in (reference() for reference in self._scopes)
        )

    def variants_of(self, function: Callable[..., Any]) -> FunctionVariants:
        """Return the function that stands for a user's function in JAX's caches, with its variants."""
        if function not in self._functions:
            self._functions[function] = FunctionVariants(function)
            self._user_functions.add(function)
        return self._functions[function]

    def keep_with(self, token: Any, value: Any) -> Any:
        """Keep a value while there is its token; return a weak reference to the value."""
        self._values[token] = value
        return weakref.ref(value)


def _clear_executables(functions: weakref.WeakSet[Any]) -> None:
    """Drop the executables that JAX's native code keeps by the user's functions.

    Executables without tools are among them; JAX finds these again in its other caches at the next call.
    """
    # JAX has no list of the native functions made by `jit`, but each refers to the user's function.
    for referrer in gc.get_referrers(*functions) if functions else ():
        if type(referrer).__name__ == "PjitFunction":
            referrer._clear_cache()


def cache_key_of(state: State, purpose: Hashable = 0) -> Any:
    """Return the key for a state: the same for the same tools, another each time without the cache.

    purpose: number of the variant, or BACKWARD.
    """
    if state.scopes:
        ToolStackPrograms.of(state.stack).add_scope(state.scopes[-1])
    if not state.cache:  # a key that no cache has, so that everything is traced again
        return pjit.make_jit_cpp_cache(_CAPACITY)
    return ToolStackPrograms.of(state.stack).keys[state.autodiff, purpose]


def set_cache_key() -> None:
    """Set this thread's cache key to that of the tools in force."""
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and activation.active:
        _CONFIG.set_local(cache_key_of(activation.state))
    else:
        unset_cache_key()


@contextmanager
def with_cache_key(key: Any = None) -> Iterator[None]:
    """Trace under a cache key within the context; under None without anything of the tools."""
    # Native calls, and so cheap enough for each op.
    before = _CONFIG.swap_local(key)
    try:
        yield
    finally:
        _CONFIG.set_local(before)


@contextmanager
def without_tools() -> Iterator[None]:
    """Enter a context in which tools see no ops, and nothing is traced for them."""
    with interceptor.Suspension(), with_cache_key():
        yield


def unset_cache_key() -> None:
    """Trace on this thread as without Amanda."""
    _CONFIG.set_local(_UNSET)

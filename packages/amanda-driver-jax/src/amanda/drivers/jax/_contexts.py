"""Cache keys: code that is traced under tools is traced for them, and what was compiled before stays."""

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

from ._variants import Function

_CONFIG: Any = config.jax_jit_cpp_cache_obj._obj
"""A setting of JAX that is part of every key of its caches.

Its value is where functions that are made in a scope keep their executables, so these go with the tools. A
setting of our own would change the keys of what is compiled already."""
_UNSET: Any = config.config_ext.unset
_CAPACITY = 8192
BACKWARD = "backward"
"""Purpose of the key under which backward passes are traced, whose ops are not analysed."""


class Programs:
    """The programs that were traced for a stack of tools, and what belongs to them; the stack alone holds it.

    JAX's caches hold programs for as long as the functions under other names live, so a program holds
    nothing of the tools: of routines and executions it has tokens.

    found: what tracing has found of each program.  keys: of JAX's caches, by what is traced otherwise.
    """

    def __init__(self) -> None:
        self.found: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.keys: dict[Hashable, Any] = defaultdict(partial(pjit.make_jit_cpp_cache, _CAPACITY))
        self._functions: weakref.WeakKeyDictionary[Any, Function] = weakref.WeakKeyDictionary()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._scopes: tuple[weakref.ref[Any], ...] = ()
        weakref.finalize(self, _forget, self._users).atexit = False

    @staticmethod
    def of(stack: Any) -> "Programs":
        """Return those of a stack."""
        programs: Programs | None = stack.rewrites.get(Programs)
        return programs or stack.rewrites.setdefault(Programs, Programs())

    def entered(self, scope: Any) -> None:
        """Note a scope of these tools, which may be another one than that in which a program was traced."""
        if not any(one() is scope for one in self._scopes):
            still = (one for one in self._scopes if (known := one()) is not None and not known.closed)
            self._scopes = (*still, weakref.ref(scope))

    @property
    def is_open(self) -> bool:
        """True while a scope of these tools is open: programs call their routines."""
        return any(scope is not None and not scope.closed for scope in (one() for one in self._scopes))

    def function(self, function: Callable[..., Any]) -> Function:
        """Return the function by which JAX knows a user's function for these tools."""
        if function not in self._functions:
            self._functions[function] = Function(function)
            self._users.add(function)
        return self._functions[function]

    def keep(self, token: Any, value: Any) -> Any:
        """Keep a value while there is its token; return a weak reference to the value."""
        self._kept[token] = value
        return weakref.ref(value)


def _forget(functions: weakref.WeakSet[Any]) -> None:
    """Drop the executables that JAX's native code keeps by the user's functions.

    Those of the user among them are found again in JAX's other caches, at the next call.
    """
    for one in gc.get_referrers(*functions) if functions else ():
        if type(one).__name__ == "PjitFunction":
            one._clear_cache()


def key_of(state: State, purpose: Hashable = 0) -> Any:
    """Return the key for a state: the same for the same tools, another each time without the cache.

    purpose: number of the variant, or BACKWARD.
    """
    if state.scopes:
        Programs.of(state.stack).entered(state.scopes[-1])
    if not state.cache:
        return pjit.make_jit_cpp_cache(_CAPACITY)
    return Programs.of(state.stack).keys[state.autodiff, purpose]


def follow() -> None:
    """Trace on this thread for the tools that are in force on it."""
    activation = interceptor.ACTIVATION.get(None)
    if activation is not None and activation.active:
        _CONFIG.set_local(key_of(activation.state))
    else:
        leave()


@contextmanager
def under(key: Any = None) -> Iterator[None]:
    """Context in which what is traced is traced under a key; under None with nothing of the tools in it."""
    before = _CONFIG.swap_local(key)
    try:
        yield
    finally:
        _CONFIG.set_local(before)


@contextmanager
def unseen() -> Iterator[None]:
    """Context in which tools see no ops, and nothing is traced for them."""
    with interceptor.Suspension(), under():
        yield


def leave() -> None:
    """Trace on this thread as without Amanda."""
    _CONFIG.set_local(_UNSET)

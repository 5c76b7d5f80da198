"""Cache keys: code that is traced under tools is traced for them, and what was compiled before stays."""

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from amanda import interceptor
from amanda.backend import State
from jax._src import config, pjit

from ._reads import Variants, traced

_CONFIG: Any = config.jax_jit_cpp_cache_obj._obj
"""A setting of JAX that is part of every key of its caches.

Its value is where functions that are made in a scope keep their executables, so these go with the tools. A
setting of our own would change the keys of what is compiled already."""
_UNSET: Any = config.config_ext.unset
_CAPACITY = 8192
BACKWARD = "backward"
"""Purpose of the key under which backward passes are traced, whose ops are not analysed."""


class Function(NamedTuple):
    """A function of the user under another name.  variants: of its programs."""

    call: Callable[..., Any]
    variants: Variants


class Renewed:
    """Functions of the user under other names, by which JAX's caches keep what is traced for some tools.

    JAX forgets an entry with the function that it is for, so the entries die with the tools.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakKeyDictionary[Any, Function] = weakref.WeakKeyDictionary()

    def of(self, function: Callable[..., Any]) -> Function:
        """Return the function by which a user's function is known."""
        if function not in self._all:
            self._all[function] = Function(_renewed(weakref.ref(function), function), Variants())
        return self._all[function]

    def forget(self) -> None:
        """Drop the executables that JAX's native code keeps by the user's functions.

        Those of the user among them are found again in JAX's other caches, at the next call.
        """
        functions = list(self._all)
        self._all.clear()
        for one in gc.get_referrers(*functions) if functions else ():
            if type(one).__name__ == "PjitFunction":
                one._clear_cache()


def _renewed(reference: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def renewed(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)

    renewed = wraps(function)(traced(renewed))
    del renewed.__wrapped__
    return renewed


class Contexts:
    """The key under which each thread traces: one for each layer of tools and setting of the switches."""

    def __init__(self) -> None:
        self._keys: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
        self._renewed: weakref.WeakKeyDictionary[Any, Renewed] = weakref.WeakKeyDictionary()

    def follow(self) -> None:
        """Put the key of what is in force on this thread into JAX's setting."""
        activation = interceptor.ACTIVATION.get(None)
        if activation is not None and activation.active:
            _CONFIG.set_local(self.key(activation.state))
        else:
            _CONFIG.set_local(_UNSET)

    def key(self, state: State, purpose: Hashable = 0) -> Any:
        """Return the key for a state: the same for the same tools, another each time without the cache.

        purpose: number of the variant, or BACKWARD.
        """
        if not state.cache:
            return pjit.make_jit_cpp_cache(_CAPACITY)
        keys = self._keys.setdefault(state.layer, {})
        switches = state.autodiff, purpose
        if switches not in keys:
            keys[switches] = pjit.make_jit_cpp_cache(_CAPACITY)
        return keys[switches]

    def renewed(self, state: State) -> Renewed:
        """Return the functions by which JAX keeps what is traced for the tools of a state."""
        if state.layer not in self._renewed:
            self._renewed[state.layer] = made = Renewed()
            weakref.finalize(state.layer, made.forget).atexit = False
        return self._renewed[state.layer]


@contextmanager
def under(key: Any = None) -> Iterator[None]:
    """Context in which what is traced is traced under a key; under None with nothing of the tools in it."""
    before = _CONFIG.swap_local(key)
    try:
        yield
    finally:
        _CONFIG.set_local(before)


def leave() -> None:
    """Trace on this thread as without Amanda."""
    _CONFIG.set_local(_UNSET)

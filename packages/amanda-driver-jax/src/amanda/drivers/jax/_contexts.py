"""Cache keys: code that is traced under tools is traced for them, and what was compiled before stays."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from amanda import interceptor
from amanda.backend import State
from jax._src import config, pjit

_CONFIG: Any = config.jax_jit_cpp_cache_obj._obj
"""A setting of JAX that is part of every key of its caches.

Its value is where functions that are made in a scope keep their executables, so these go with the tools. A
setting of our own would change the keys of what is compiled already."""
_UNSET: Any = config.config_ext.unset
_CAPACITY = 8192


class Contexts:
    """The key under which each thread traces: one for each layer of tools and setting of the switches."""

    def follow(self) -> None:
        """Put the key of what is in force on this thread into JAX's setting."""
        activation = interceptor.ACTIVATION.get(None)
        if activation is not None and activation.active:
            _CONFIG.set_local(self.key(activation.state))
        else:
            _CONFIG.set_local(_UNSET)

    def key(self, state: State, values: Hashable = None) -> Any:
        """Return the key for a state: the same for the same tools, another each time without the cache.

        values: which of the values that traceable routines have read.
        """
        if not state.cache:
            return pjit.make_jit_cpp_cache(_CAPACITY)
        assert state.layer is not None
        keys = state.layer.rewrites.setdefault(self, {})  # which `Tool.analyse_again` clears
        switches = state.autodiff, values
        if switches not in keys:
            keys[switches] = pjit.make_jit_cpp_cache(_CAPACITY)
        return keys[switches]

    @property
    def current(self) -> Any:
        """The key that is in force on this thread."""
        return _CONFIG.value


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

"""JAX: every primitive that a program binds, eagerly and under jit, and its backward op."""

from ._driver import JaxDriver

__all__ = ["JaxDriver"]

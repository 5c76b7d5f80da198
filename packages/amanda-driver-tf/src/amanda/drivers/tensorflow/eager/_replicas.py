"""Threads in which TensorFlow runs replicas: they are in the scope of the one that makes them."""

import functools
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from amanda import interceptor
from amanda.backend import Attributes, in_force
from tensorflow.python.distribute import mirrored_run

_activations: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def follow_replicas(attributes: Attributes) -> None:
    """Let the threads of a mirrored strategy be in a scope, until the attributes are restored."""
    kind = getattr(mirrored_run, "_MirroredReplicaThread", None)
    if kind is None:
        return
    make, run = kind.__init__, kind.run

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        activation = interceptor.ACTIVATION.get(None)
        if activation is not None:
            _activations[self] = activation

    @functools.wraps(run)
    def running(self: Any) -> None:
        activation = _activations.get(self)
        with nullcontext() if activation is None else in_force(activation):
            run(self)

    attributes.set(kind, "__init__", made)
    attributes.set(kind, "run", running)

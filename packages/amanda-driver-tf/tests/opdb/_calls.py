"""Calls of TensorFlow's and Keras' public functions, and how they differ under tools."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import isfunction
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow import without_fusion
from amanda.testing import EqualCopies, Silent, Unchanged

NAMESPACES = {
    "tf": tf, "tf.bitwise": tf.bitwise, "tf.image": tf.image, "tf.linalg": tf.linalg, "tf.math": tf.math,
    "tf.nn": tf.nn, "tf.random": tf.random, "tf.signal": tf.signal, "tf.sparse": tf.sparse,
    "tf.strings": tf.strings, "keras.ops": keras.ops, "keras.activations": keras.activations,
    "keras.losses": keras.losses,
}  # fmt: skip
LEFT = frozenset(
    """
    tf.Assert tf.custom_gradient tf.device tf.executing_eagerly tf.function tf.get_logger tf.grad_pass_through
    tf.init_scope tf.inside_function tf.load_library tf.load_op_library tf.no_gradient tf.py_function
    tf.numpy_function tf.print tf.recompute_grad tf.register_tensor_conversion_function tf.timestamp
    tf.random.set_seed tf.random.set_global_generator tf.random.get_global_generator tf.is_symbolic_tensor
    keras.ops.irfft
    """.split()
)
"""Functions that compute no tensor, change what is global, or take the time.

Keras' irfft ends the process where a length is 0, without any tool too.
"""
SAMPLES = 2
"""Calls of each function, of those that it takes."""

_random = np.random.default_rng(0)


def _floats(*shape: int) -> Any:
    return _random.uniform(0.1, 0.9, shape).astype(np.float32)


_SYMMETRIC = np.float32([[2, 0.5, 0.1], [0.5, 3, 0.2], [0.1, 0.2, 4]])
_IMAGES, _KERNEL = _floats(1, 6, 6, 3), _floats(3, 3, 3, 2)
ARGUMENTS: Sequence[tuple[Any, ...]] = (
    (_floats(3, 4),), (_SYMMETRIC,), (_IMAGES,), (_floats(4),), (np.int32([[1, 2], [3, 0]]),),
    (np.array([True, False]),), (np.complex64([1 + 2j, 3j]),), (np.array(["a b", "c"]),),
    (_floats(3, 4), _floats(3, 4)), (_SYMMETRIC, _SYMMETRIC), (_SYMMETRIC, _floats(3, 1)),
    (np.int32([6, 3]), np.int32([2, 1])), (np.array([True, False]), np.array([True, True])),
    (_floats(3, 4), 1), (_floats(3, 4), -1), (_floats(4, 4), [2, 8]), (_floats(3, 4), [1, 0]),
    (_floats(3, 4), np.int32([0, 2, 1])), (np.int32([0, 2, 1]), _floats(3, 4)), (np.int32([0, 2]), 4),
    ([_floats(2, 3), _floats(2, 3)],), ([_floats(2, 3), _floats(2, 3)], 0), (_IMAGES, [4, 5]),
    (_IMAGES, 0.3), (_IMAGES, 0.3, 0.9), (_IMAGES, _KERNEL, 1, "SAME"), (_IMAGES, 2, 2, "VALID"),
    (_IMAGES, _KERNEL, [1, 1, 1, 1], "SAME"), (_floats(3, 4), 0.2, 0.8),
    (_floats(3, 4), np.int32([0, 1, 1]), 2),
    (_floats(3, 4), [[1, 1], [0, 2]]), (_floats(3, 4), [0, 1], [2, 2]), ([2, 3],), ([2, 3], [1, 2]),
    (np.array([True, False, True]), _floats(3), _floats(3)), (np.array(["a b", "c"]), " "),
    (3,), (2, 5), (0.0, 1.0, 5),
)  # fmt: skip


def functions() -> dict[str, Callable[..., Any]]:
    """Return functions by their names, each once."""
    functions_by_id: dict[int, tuple[str, Callable[..., Any]]] = {}
    for namespace, module in NAMESPACES.items():
        for name, function in sorted(vars(module).items()):
            full = f"{namespace}.{name}"
            if callable(function) and not isinstance(function, type) and full not in LEFT and name[0] != "_":
                functions_by_id[id(function)] = full, function
    return {
        name: candidate
        for name, candidate in sorted(functions_by_id.values())
        if isfunction(candidate) or hasattr(candidate, "__wrapped__")
    }


class Traced(Unchanged):
    """Traceable routines at every point of every op, which give equal new values."""

    @staticmethod
    @amanda.traceable
    def routine(*values: Any) -> Any:
        """Return each tensor through an op that computes nothing."""
        return [copied(value) for value in values]


def copied(value: Any) -> Any:
    """Return an equal new tensor; handles, and what is no tensor, as they are."""
    if isinstance(value, list):
        return [copied(element) for element in value]
    if not isinstance(value, tf.Tensor) or value.dtype in (tf.resource, tf.variant):
        return value
    return tf.identity(value)


TOOLS: Mapping[str, Callable[[], Unchanged]] = {
    "look": Silent, "echo": Unchanged, "equal new values": lambda: EqualCopies(copied), "traceable": Traced,
}  # fmt: skip
Record = list[Any]


class Count:
    """Numbers of functions, of calls in both modes, and of calls with gradients."""

    def __init__(self) -> None:
        self.functions = self.calls = self.gradients = 0


def differences(function: Callable[..., Any], count: Count) -> Iterator[str]:
    """Yield each call, mode and tool with which a function gives other bits than without, or an exception."""
    accepted = list(islice(_accepted(function), SAMPLES))
    count.functions += bool(accepted)
    for number, arguments in enumerate(accepted):
        for mode, run in (("eager", _eager), ("function", _traced)):
            try:
                bare, again = run(function, arguments), run(function, arguments)
            except Exception:  # of a function that cannot be traced
                continue
            if not _is_same(bare, again):  # TensorFlow itself does not determine the bits
                continue
            count.calls += 1
            count.gradients += bare[-1]
            for name, make in TOOLS.items():
                try:
                    with amanda.apply(make()):
                        results = run(function, arguments)
                except Exception as error:
                    yield f"call {number}, {mode}, {name}: {type(error).__name__}: {error}"
                    continue
                if not _is_same(results, bare):
                    yield f"call {number}, {mode}, {name}: bits"


def _accepted(function: Callable[..., Any]) -> Iterator[tuple[Any, ...]]:
    for arguments in ARGUMENTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if any(isinstance(output, tf.Tensor) for output in _flat(function(*arguments))):
                    yield arguments
        except Exception:  # of arguments that it does not take
            continue


def _flat(value: Any) -> list[Any]:
    return tf.nest.flatten(value, expand_composites=True)


def _eager(function: Callable[..., Any], arguments: Sequence[Any]) -> Record:
    tf.random.set_seed(0)
    keras.utils.set_random_seed(0)
    values = tf.nest.map_structure(_tensor, list(arguments))
    sources = [value for value in _flat(values) if isinstance(value, tf.Tensor) and value.dtype.is_floating]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(sources)
        outputs = [output for output in _flat(function(*values)) if isinstance(output, tf.Tensor)]
        floats = [output for output in outputs if output.dtype.is_floating]
    try:
        gradients = tape.gradient(floats, sources) if floats and sources else []
    except LookupError:  # TensorFlow has no gradient of the op
        gradients = []
    present = [gradient for gradient in gradients if gradient is not None]
    return [
        *map(_array, outputs),
        *(_array(tf.convert_to_tensor(gradient)) for gradient in present),
        bool(present),
    ]


def _traced(function: Callable[..., Any], arguments: Sequence[Any]) -> Record:
    tf.random.set_seed(0)
    keras.utils.set_random_seed(0)
    values = tf.nest.map_structure(_tensor, list(arguments))
    flat = [value for value in _flat(values) if isinstance(value, tf.Tensor)]

    @tf.function
    def program(tensors: Any) -> Any:
        remaining = iter(tensors)
        symbols = tf.nest.map_structure(
            lambda value: next(remaining) if isinstance(value, tf.Tensor) else value, values
        )
        sources = [tensor for tensor in tensors if tensor.dtype.is_floating]
        outputs = [output for output in _flat(function(*symbols)) if isinstance(output, tf.Tensor)]
        floats = [output for output in outputs if output.dtype.is_floating]
        try:
            gradients = tf.gradients(floats, sources) if floats and sources else []
        except LookupError:
            gradients = []
        return outputs, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

    with without_fusion():
        outputs, gradients = program(flat)
    return [*map(_array, outputs), *map(_array, gradients), bool(gradients)]


def _tensor(value: Any) -> Any:
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def _array(tensor: Any) -> Any:
    return None if tensor.dtype in (tf.resource, tf.variant) else np.asarray(tensor.numpy())


def _is_same(record: Record, expected: Record) -> bool:
    def bits(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return value.dtype, value.shape, value.tolist() if value.dtype.kind == "O" else value.tobytes()

    return [*map(bits, record)] == [*map(bits, expected)]

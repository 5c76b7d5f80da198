"""Cases of ONNX' own suite, operator by operator, and how their sessions differ under tools."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx.backend.test.case.node as suite
import onnxruntime
from onnx import ModelProto, TensorProto
from onnx_models import session_of

import amanda
from amanda.testing import EqualCopies, Silent, Unchanged

NEWEST_IR, NEWEST_OPSET = 13, 26
"""The newest versions that this ONNX Runtime reads; ONNX may be ahead."""

HALF_ROUNDINGS = 16 * float(np.finfo(np.float16).eps)
"""How far a chain of float16 ops may part, of the largest element.

On a CPU ONNX Runtime computes neighbours in float32, with fewer roundings than one by one where a tool looks.
"""


class Traced(Unchanged):
    """Traceable routines at every point of every op, which give equal new values of numbers."""

    @staticmethod
    @amanda.traceable
    def routine(*values: Any) -> Any:
        """Return each array of numbers with an axis added and taken away again."""
        return [value[None][0] if _is_array(value) else value for value in values]


def _is_array(value: Any) -> bool:
    return not isinstance(value, (list, tuple)) and getattr(value, "dtype", np.dtype("O")).kind in "fiub"


def copied(value: Any) -> Any:
    """Return an equal array in other memory; what is no array as it is."""
    return value.copy() if isinstance(value, np.ndarray) else value


TOOLS: Mapping[str, Callable[[], Unchanged]] = {
    "look": Silent, "echo": Unchanged, "equal new values": lambda: EqualCopies(copied), "traceable": Traced,
}  # fmt: skip


def operators() -> list[str]:
    """Names of the modules of the suite, each of which has the cases of one operator or more."""
    learning = pkgutil.iter_modules([f"{suite.__path__[0]}/ai_onnx_ml"])
    inner = [f"ai_onnx_ml.{module.name}" for module in learning]
    outer = [module.name for module in pkgutil.iter_modules(suite.__path__) if not module.ispkg]
    return [name for name in [*outer, *inner] if not name.startswith("_")]


@cache
def cases(operator: str) -> list[Any]:
    """Return the cases of a module of the suite, which adds them to a list as it is imported."""
    before = len(suite._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what NumPy says of the values that the suite computes
        importlib.import_module(f"{suite.__name__}.{operator}")
    return list(suite._NodeTestCases[before:])


class Count:
    """Numbers of cases that ran, that ONNX Runtime refuses without a tool as well, and with reports.

    rounded: chains of float16 ops whose results are equal under tools but for roundings.
    """

    def __init__(self) -> None:
        self.ran = self.refused = self.reported = self.rounded = 0


def differences(operator: str, count: Count) -> Iterator[str]:
    """Yield each case and tool with which a session gives other bits than without, or an exception."""
    for case in cases(operator):
        try:
            session, feed = _session(case)
            bare = session.run(None, feed)
        except Exception:  # an operator or a type that ONNX Runtime has no kernel for
            count.refused += 1
            continue
        count.ran += 1
        rounded = False
        for name, make in TOOLS.items():
            try:
                with amanda.apply(make()) as scope:
                    instrumented = session.run(None, feed)
            except Exception as error:
                yield f"{case.name}, {name}: {type(error).__name__}: {error}"
                continue
            if not is_same(instrumented, bare):
                if _is_chain_in_half(case.model) and differs_in_rounding(instrumented, bare):
                    rounded = True
                else:
                    yield f"{case.name}, {name}: bits"
            count.reported += name == "look" and bool(scope.report)
        count.rounded += rounded


def _session(case: Any) -> tuple[Any, dict[str, Any]]:
    """Return a session of a case and its feed; a model of newer versions says the newest that can be read."""
    model = ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = min(model.ir_version, NEWEST_IR)
    for entry in model.opset_import:
        entry.version = min(entry.version, NEWEST_OPSET) if entry.domain == "" else entry.version
    session = session_of(model)
    return session, dict(
        zip([entry.name for entry in session.get_inputs()], case.data_sets[0][0], strict=False)
    )


def _is_chain_in_half(model: ModelProto) -> bool:
    """Return True for a model of several ops that reads float16."""
    types = (entry.type.tensor_type.elem_type for entry in model.graph.input)
    return len(model.graph.node) > 1 and TensorProto.FLOAT16 in types


def differs_in_rounding(values: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return True if floating-point arrays differ by float16's roundings alone, and others not at all."""
    return all(
        is_same(value, other) or (
            getattr(value, "dtype", np.dtype("O")).kind == "f"
            and np.allclose(value, other, 0, HALF_ROUNDINGS * np.abs(other).max(), equal_nan=True)
        )
        for value, other in zip(values, expected, strict=True)
    )  # fmt: skip


def is_same(value: Any, expected: Any) -> bool:
    """Return True for values that are equal to the last bit, those of sequences too."""
    if isinstance(value, (list, tuple)):
        return (
            isinstance(expected, (list, tuple))
            and len(value) == len(expected)
            and all(map(is_same, value, expected))
        )
    if isinstance(value, onnxruntime.OrtValue):
        return isinstance(expected, onnxruntime.OrtValue) and value.shape() == expected.shape()
    if not isinstance(value, np.ndarray):
        return value is expected or bool(value == expected)
    if not isinstance(expected, np.ndarray) or (value.dtype, value.shape) != (expected.dtype, expected.shape):
        return False
    return (
        value.tolist() == expected.tolist()
        if value.dtype.kind == "O"
        else value.tobytes() == expected.tobytes()
    )

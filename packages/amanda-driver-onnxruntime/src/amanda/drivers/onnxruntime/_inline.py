"""Traceable routines as nodes of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto

from amanda.errors import RoutineError

from ._places import Place
from ._symbols import Symbol
from ._tracing import NotTraceable, Recorder, TracedArray

if TYPE_CHECKING:
    from ._rewrite import Rewriting


@dataclass
class Inlined:
    """What routines were traced to.

    constants: arrays that the nodes read, by name.  symbols: of all values.  outputs: of what they give.
    """

    nodes: list[NodeProto]
    constants: dict[str, Any]
    symbols: dict[str, Symbol]
    outputs: list[Symbol]


def inlined(
    place: Place, refs: Sequence[str], symbols: Sequence[Symbol | None], rewriting: Rewriting
) -> Inlined:
    """Trace the routines of a place, which is given these values.

    Raises NotTraceable, and what is a mistake in the routine itself as that.
    """
    recorder = Recorder(rewriting.fresh("traced"), rewriting.model.opsets.get("", 1))
    given = [_traced(recorder, ref, symbol) for ref, symbol in zip(refs, symbols, strict=True)]
    try:
        results = place.evaluate(given, rewriting.ops, rewriting.state)
    except (NotTraceable, RoutineError):
        raise
    except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
        raise NotTraceable(f"{type(error).__name__}: {error}") from error
    outputs = []
    for value, dtype in zip(results, place.dtypes, strict=True):
        made = value if isinstance(value, TracedArray) else recorder.constant(np.asarray(value, dtype))
        typed = made.astype(dtype)
        outputs.append(Symbol(typed.name, typed.type, recorder.constants.get(typed.name)))
    known = {
        one.name: Symbol(one.name, one.type, recorder.constants.get(one.name)) for one in recorder.values
    }
    return Inlined(recorder.nodes, recorder.constants, known, outputs)


def _traced(recorder: Recorder, ref: str, symbol: Symbol | None) -> TracedArray:
    if symbol is None or symbol.type is None or not symbol.is_tensor:
        raise NotTraceable(f"{ref} is no tensor, or of a type that is not known before it runs")
    return recorder.value(ref, symbol.type)

"""A tape for the conformance suite, whose programs run op by op: what `jax.vjp` does, left open.

Arrays that gradients are wanted of are symbols of one linearization inside the suite's ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, source_info_util
from jax._src.interpreters import ad
from jax._src.interpreters import partial_eval as pe


class Tape:
    """One linearization that ops are added to, and that backward passes run through."""

    def __init__(self) -> None:
        self._info = core.DebugInfo("tape", "tape", None, None)
        self._gradients: dict[int, Any] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._start()

    def _start(self) -> None:
        self._program = pe.DynamicJaxprTrace(self._info)
        self._program.tag = core.TraceTag()
        self.trace = ad.LinearizeTrace(core.eval_trace, self._program, True)
        self._leaves: dict[int, tuple[Any, Any]] = {}
        self.trace.leaves = self._leaves
        weakref.finalize(self.trace, self._program.invalidate)  # it refers to itself

    def watch(self, array: Any) -> Any:
        """Want the gradients of an array."""
        self._watched[id(array)] = weakref.ref(array)
        self._gradients.pop(id(array), None)
        return array

    def _leaf(self, array: Any) -> Any:
        if id(array) not in self._leaves:
            aval, source = core.typeof(array).to_tangent_aval(), source_info_util.current()
            tangent = self._program.new_arg(aval, source)
            self._leaves[id(array)] = array, ad.LinearizeTracer(self.trace, array, tangent)
        return self._leaves[id(array)][1]

    def symbol_of(self, value: Any) -> Any:
        """Return the symbol of an array that gradients are wanted of; other values as they are."""
        if isinstance(value, (list, tuple)):
            return [self.symbol_of(element) for element in value]
        watched = self._watched.get(id(value))
        return value if watched is None or watched() is not value else self._leaf(value)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which ops are added."""
        before = core.trace_ctx.trace
        core.trace_ctx.set_trace(self.trace)
        try:
            yield
        finally:
            core.trace_ctx.set_trace(before)

    def backward(self, value: Any) -> None:
        """Run the backward pass of the sum of a value's elements."""
        if not isinstance(value, ad.LinearizeTracer):
            return
        with core.set_current_trace(core.eval_trace):
            trace = value._trace
            program, consts = trace.tangent_trace.to_jaxpr(
                [value.tangent], self._info, source_info_util.current()
            )
            # Since JAX 0.12 the constants are the first of these.
            variables = program.invars[len(program.invars) - len(trace.leaves) :]
            accums = [ad.ValAccum(variable.aval) for variable in variables]
            ad.backward_pass3(program, True, consts, accums, [jnp.ones_like(value.primal)])
        for (array, _), accum in zip(trace.leaves.values(), accums, strict=True):
            gradient = accum.freeze()
            if type(gradient) is not ad.Zero:
                before = self._gradients.get(id(array))
                self._gradients[id(array)] = gradient if before is None else before + gradient
        self._start()
        core.trace_ctx.set_trace(self.trace)

    def gradient(self, array: Any) -> Any:
        """Return the gradient that an array has got; None where there is none."""
        return self._gradients.get(id(array))


def concrete(value: Any) -> jax.Array:
    """Return the array of a symbol."""
    while isinstance(value, core.Tracer):
        value = value.primal
    return value

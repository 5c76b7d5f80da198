"""Measure compiled steps of JAX: under an idle tool, with masks in the program, and traced anew.

python benchmarks/jax_steps.py, where JAX and amanda-driver-jax are installed, prints medians of processor
time.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import amanda

SIZE, LAYERS, ROUNDS, CALLS = 64, 8, 15, 300
Step = Callable[[], Any]


class Idle(amanda.Tool):
    """Looks at every op, and inserts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.add_inst_for_op(lambda context: None)


@amanda.traceable
def masked(weight: Any, mask: Any) -> Any:
    """Return a weight of which half the elements are zero."""
    return weight * mask


class Masks(amanda.Tool):
    """Masks the weight of each product, in the compiled program."""

    def __init__(self, mask: jax.Array) -> None:
        super().__init__()
        self.mask = mask
        self.add_inst_for_op(self.insert)

    def insert(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "dot_general":
            context.insert_before_op(masked, inputs=[1], mask=self.mask)


class MasksOfTheTool(Masks):
    """Does the same by a routine that reads the mask of its tool, for which each call looks in Python."""

    def insert(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "dot_general":
            context.insert_before_op(self.masked, inputs=[1])

    @amanda.traceable
    def masked(self, weight: Any) -> Any:
        """Return a weight of which half the elements are zero."""
        return weight * self.mask


def step(layers: int, mask: jax.Array | None = None) -> Step:
    """Return a call of the compiled loss and gradients of a perceptron; mask: by hand, on each weight."""
    weights = [jax.random.normal(jax.random.key(i), (SIZE, SIZE)) / 8 for i in range(layers)]
    x = jnp.ones((16, SIZE))

    def loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for one in weights:
            x = jnp.tanh(x @ (one if mask is None else one * mask))
        return x.sum()

    compiled = jax.jit(jax.value_and_grad(loss))
    return lambda: jax.block_until_ready(compiled(weights, x))


def seconds(call: Step, number: int = CALLS) -> float:
    """Return the processor time of a call."""
    begin = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - begin) / number


def main() -> None:
    """Print a line for each figure."""
    mask = (jax.random.uniform(jax.random.key(1), (SIZE, SIZE)) < 0.5).astype(jnp.float32)
    bare, by_hand = step(LAYERS), step(LAYERS, mask)
    tools = {"idle tool": Idle(), "masks": Masks(mask), "masks read": MasksOfTheTool(mask)}
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for name, call in {"bare": bare, "bare again": bare, "by hand": by_hand}.items():
            call()
            times[name].append(seconds(call))
        for name, tool in tools.items():
            with amanda.apply(tool):
                bare()
                times[name].append(seconds(bare))
    medians = {name: statistics.median(found) for name, found in times.items()}
    peers = {"bare again": "bare", "idle tool": "bare", "masks": "by hand", "masks read": "masks"}
    for name, peer in peers.items():
        ratio, found = medians[name] / medians[peer], 1e6 * medians[name]
        print(f"{name:10} {found:6.1f} us a step, {ratio:.2f} of {peer}")
    for layers in (4, 16, 64):
        fresh = step(layers)
        alone = seconds(fresh, 1)
        with amanda.apply(Idle()):
            anew = seconds(fresh, 1)
        print(f"first call, {layers:2} layers: {alone:.3f} s; traced anew in a scope: {anew:.3f} s")


if __name__ == "__main__":
    main()

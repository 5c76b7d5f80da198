"""Programs under function transforms of torch.func: per-sample gradients, an ensemble, a gradient."""

from collections.abc import Callable
from typing import Any

import torch
from _measure import QUICK, controls, interleaved, pin_to_one_core, progress, seconds_of
from _tools import chosen, scopes
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.flop_counter import FlopCounterMode

from amanda.tools.flops import FlopsTool

LAYERS, WIDTH, SAMPLES, MEMBERS = (2 if QUICK else 20), 64, 32, 4
TOOLS = {
    **chosen("empty tool", "empty tool, backward too", "before + after", "backward before + after"),
    "flops": FlopsTool,
}


def network() -> nn.Module:
    """Return an MLP with random weights."""
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def programs() -> dict[str, Callable[[], Any]]:
    """Return programs by the transforms that they call."""
    samples, model = torch.randn(SAMPLES, WIDTH), network()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    stacked, _ = stack_module_state([network() for _ in range(MEMBERS)])  # type: ignore[arg-type]
    stacked = {name: value.detach() for name, value in stacked.items()}

    def predictions(parameters: dict[str, Tensor]) -> Any:
        return functional_call(model, parameters, (samples,))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return functional_call(model, parameters, (x,)).square().mean()

    ensemble, gradient = vmap(predictions), grad(loss)
    per_sample = vmap(gradient, in_dims=(None, 0))
    return {
        f"vmap: an ensemble of {MEMBERS}": lambda: ensemble(stacked),
        "grad": lambda: gradient(parameters, samples),
        f"vmap of grad: gradients of {SAMPLES} samples": lambda: per_sample(parameters, samples),
    }


def benchmark() -> dict[str, Any]:
    """Return seconds of programs by variant, one value a round."""
    pin_to_one_core()
    torch.manual_seed(0)
    found = {}
    for title, program in programs().items():
        progress(f"  {title}")

        def measure(_: str, program: Callable[[], Any] = program) -> float:
            # The fastest of a few runs: what disturbs a run makes it longer alone.
            return min(seconds_of(program) for _ in range(3 if QUICK else 7))

        under = {**controls(), **scopes(TOOLS), "FlopCounterMode": lambda: FlopCounterMode(display=False)}
        found[title] = interleaved(under, measure, 7, most=40)
    return {"programs": found}

"""Methods of pruning and quantisation in PyTorch, each by a tool and by hand.

Each takes a study, a dense model and a seed, and gives what it scores and the model as it then is.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from baselines.magnitude_torch import MagnitudePruning
from baselines.quantize_torch import lsq, ptq

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

Study, Outcome = Any, tuple[dict[str, float], nn.Module]
LAYERS = ["conv2d", "linear"]


def dense(study: Study, model: nn.Module, seed: int) -> Outcome:
    """The model as it is."""
    return study.score(model), model


def pruned(study: Study, model: nn.Module, seed: int, tune: bool = False) -> Outcome:
    """Half of each weight dropped."""
    model, tool = copy.deepcopy(model), PruneTool(sparsity=0.5, type=LAYERS)
    with amanda.apply(tool):
        study.calibrate(model)
        if tune:
            study.tune(model, seed)
        scores = study.score(model)
    tool.finalize(model)
    return scores, model


def static(study: Study, model: nn.Module, seed: int, bits: int) -> Outcome:
    """Quantised after training."""
    tool = QuantizeTool(weight_bits=bits, activation_bits=bits, type=LAYERS)
    with amanda.apply(tool):
        with tool.calibrating():
            study.calibrate(model)
        return study.score(model), model


def learned(study: Study, model: nn.Module, seed: int, bits: int) -> Outcome:
    """Trained on with quantisation, scales too."""
    model, tool = copy.deepcopy(model), QuantizeTool("lsq", bits, bits, type=LAYERS)
    with amanda.apply(tool):
        with tool.calibrating():
            study.calibrate(model)
        study.tune(model, seed, tool.parameters())
        return study.score(model), model


def pruned_by_hand(study: Study, model: nn.Module, seed: int, tune: bool = False) -> Outcome:
    """The same with hooks of gradients."""
    model = copy.deepcopy(model)
    MagnitudePruning(model, 0.5)
    if tune:
        study.tune(model, seed)
    return study.score(model), model


def static_by_hand(study: Study, model: nn.Module, seed: int, bits: int) -> Outcome:
    """The same with other modules."""
    quantized = ptq(model, study.calibrate, bits)
    return study.score(quantized), model


def learned_by_hand(study: Study, model: nn.Module, seed: int, bits: int) -> Outcome:
    """The same with other modules."""
    quantized = lsq(model, study.calibrate, bits)
    study.tune(quantized, seed)
    return study.score(quantized), quantized


Method = Callable[..., Outcome]
METHODS: dict[str, tuple[Method, Method, dict[str, Any]]] = {
    "dense": (dense, dense, {}),
    "pruned 50 %": (pruned, pruned_by_hand, {}),
    "pruned 50 %, fine-tuned": (pruned, pruned_by_hand, {"tune": True}),
    "PTQ, 8 bits": (static, static_by_hand, {"bits": 8}),
    "PTQ, 4 bits": (static, static_by_hand, {"bits": 4}),
    "QAT (LSQ), 4 bits": (learned, learned_by_hand, {"bits": 4}),
}
"""By name: with a tool, by hand, options."""


def weights(model: nn.Module) -> dict[str, Any]:
    """The model's own parameters as arrays, under the names that they have in the dense model."""
    return {
        name.replace(".layer.", "."): parameter.detach().numpy().copy()
        for name, parameter in model.named_parameters()
        if not name.endswith(("activation.scale", "weight.scale"))
    }

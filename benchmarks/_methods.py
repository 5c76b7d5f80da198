"""Methods of pruning and quantisation, by a tool; a study of a framework does them by hand too."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

Model, Scores = Any, dict[str, float]


class Method(NamedTuple):
    """A method: "prune" half of each weight, or quantise after training ("ptq") or in it ("qat").

    bits: of weights and activations.  tune: train on.
    """

    kind: str = ""
    bits: int = 0
    tune: bool = False


METHODS = {
    "dense": Method(),
    "pruned 50 %": Method("prune"),
    "pruned 50 %, fine-tuned": Method("prune", tune=True),
    "PTQ, 8 bits": Method("ptq", 8),
    "PTQ, 4 bits": Method("ptq", 4),
    "QAT, 4 bits": Method("qat", 4, tune=True),
}


def by_tool(study: Any, model: Model, method: Method, seed: int) -> tuple[Scores, Model]:
    """Return the scores of a method with a tool, and the model as it then is.

    study: how models of a framework are trained and how well they do, with `layers`, types of ops that are
    pruned or quantised, and `qat`, the quantize tool's method in training.
    """
    type, learned = list(study.layers), method.kind == "qat" and study.qat == "lsq"
    if not method.kind:
        return study.score(model), model
    if method.kind == "prune":
        tool: Any = PruneTool(sparsity=0.5, type=type)
    else:
        chosen = {"method": study.qat} if method.kind == "qat" else {}
        tool = QuantizeTool(weight_bits=method.bits, activation_bits=method.bits, type=type, **chosen)
    with amanda.apply(tool):
        with nullcontext() if method.kind == "prune" else tool.calibrating():
            study.calibrate(model)
        if method.tune:
            study.tune(model, seed, tool.parameters() if learned else ())
        if method.kind == "qat" and not learned:
            tool.freeze()
        scores = study.score(model)
    if method.kind == "prune":
        tool.finalize(model)
    return scores, model

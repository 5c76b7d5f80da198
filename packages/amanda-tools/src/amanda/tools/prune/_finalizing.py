"""Masks are written into the weights of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import amanda
from amanda.tools.prune._errors import PruneError
from amanda.tools.prune._weight import Weight


def finalize(model: Any, weights: Sequence[Weight], passed: str) -> None:
    """Write what ops read of these weights into the parameters or variables of a model.

    passed: what is said where there is none of them.
    Raises PruneError where a weight is computed, and where the model has none of them.
    """
    computed = [one.module or one.source for one in weights if one.holder is None]
    if computed:
        raise PruneError(
            f"the weights of {', '.join(computed)} are computed at each call: make them parameters first "
            "(torch.nn.utils.parametrize.remove_parametrizations) and let their masks go with them, by "
            "tool.load_state_dict(tool.state_dict()) and tool.prepare(model, example); or exclude them"
        )
    written = 0
    with amanda.disabled():
        for framework in {one.framework for one in weights}:
            for holder, change in framework.variables(model):
                for one in weights:
                    if one.framework is framework and one.holder == holder:
                        change(one.part, one.finalized)
                        written += 1
    if not written:
        passed = f"; {passed}" if passed and not weights else ""
        raise PruneError(
            f"none of the {len(weights)} weights that the tool has pruned is of this {type(model).__name__}"
            f"{passed}; call it in a scope of the tool, or tool.prepare(model, example)"
        )

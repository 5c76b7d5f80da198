"""The table of quantised weights, of a GPT that has hardly been trained."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.slow
def test_a_row_for_each_method(example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    script = example("quantized_weights")
    chosen = {name: script.METHODS[name] for name in ("nearest, 8 bits", "GPTQ, 4 bits")}
    monkeypatch.setattr(script, "METHODS", chosen)
    model, tested, seen = script.trained_gpt(2)
    few = tested[:4]
    rows = script.table(
        model, lambda one: script.perplexity(one, few), lambda one: one(seen[0][:, :-1]),
        lambda one: one(few[:1, :-1]), "head", rounds=1,
    )  # fmt: skip
    assert [row[0] for row in rows] == ["float32", "bfloat16", *chosen]
    size = {row[0]: row[3] for row in rows}
    assert size["GPTQ, 4 bits"] < 0.75 * size["nearest, 8 bits"] < 0.5 * size["float32"]
    for _, simulated, found, *_ in rows:
        assert found == pytest.approx(simulated, rel=0.01)

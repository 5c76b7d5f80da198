"""Models of timm, whose configuration has the size of their images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from amanda.tools.models._inputs import Input, ModelError, reshaped
from amanda.tools.models._subject import Subject, library
from amanda.tools.models._torch import on_device, with_values


def made(
    word: str, name: str, options: Mapping[str, Any], shapes: Sequence[str], backward: bool, device: str
) -> Subject:
    """Return a model of timm with random weights."""
    timm = library("timm", word)
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has their names"
        raise ModelError(f"timm has no model {name!r}; {hint}")
    try:
        model = on_device(word, device, lambda: timm.create_model(name, pretrained=False, **options))
    except (TypeError, ValueError) as error:
        raise ModelError(f"{word} cannot be made: {error}") from error
    size = tuple(model.pretrained_cfg.get("input_size") or (3, 224, 224))
    return with_values(
        word, model, reshaped([Input("images", (1, *size))], shapes), backward, device, by_name=False
    )

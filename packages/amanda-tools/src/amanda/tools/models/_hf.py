"""Models of transformers, made of a configuration, with the inputs that it asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amanda.errors import did_you_mean
from amanda.tools.models._inputs import Input, ModelError, reshaped
from amanda.tools.models._subject import Subject, library
from amanda.tools.models._torch import on_device, with_values

TOKENS = 128
"""Length of texts, if the model takes as many."""


def made(
    word: str, name: str, options: Mapping[str, Any], shapes: Sequence[str], backward: bool, device: str
) -> Subject:
    """Return a model with random weights, of the class that its configuration names, or of AutoModel's."""
    library("torch", word)
    transformers = library("transformers", word)
    try:
        config = _config(transformers, name, options)
        kind = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        build = transformers.AutoModel.from_config if kind is None else kind
        model = on_device(word, device, lambda: build(config))
    except (ImportError, ValueError, TypeError, OSError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{word} cannot be made: {str(error).strip().splitlines()[0]}") from error
    inputs = list(_inputs(model, config))
    return with_values(word, model, reshaped(inputs, shapes), backward, device)


def _config(transformers: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of a file, of a folder with one, or the default one of a type of model."""
    if Path(name).exists():
        create = transformers.AutoConfig.from_pretrained
    elif name in transformers.CONFIG_MAPPING:
        create = transformers.AutoConfig.for_model
    else:
        near = did_you_mean(name, transformers.CONFIG_MAPPING)
        hint = near if near.startswith("did") else "give a type such as llama, or the path of a config.json"
        raise ModelError(f"transformers has no type of model {name!r}, and there is no such file; {hint}")
    defaults = create(name)
    for option in options:
        if option not in defaults.to_dict():
            near = did_you_mean(option, defaults.to_dict())
            raise ModelError(f"the configuration of {name} has no {option!r}; {near}")
    return create(name, **options)


def _inputs(model: Any, config: Any) -> Iterator[Input]:
    """Yield what the model's forward function takes, its main input first."""
    main, text = model.main_input_name, config.get_text_config()
    vision = getattr(config, "vision_config", config)
    if main == "pixel_values":
        yield _images(vision)
    elif main == "input_features":
        yield _spectrum(config)
    elif main == "input_values":
        yield _sound(config)
    else:
        yield _tokens(main, text)
        if hasattr(config, "vision_config") and hasattr(config, "text_config"):
            yield _images(vision)
    if getattr(config, "is_encoder_decoder", False):
        yield _tokens("decoder_input_ids", text)


def _tokens(name: str, config: Any) -> Input:
    most = [
        getattr(config, field, None)
        for field in ("max_position_embeddings", "n_positions", "max_target_positions")
    ]
    length = min([TOKENS, *(limit for limit in most if isinstance(limit, int) and limit > 0)])
    return Input(name, (1, length), config.vocab_size, "int64")


def _images(config: Any) -> Input:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return Input("pixel_values", (1, getattr(config, "num_channels", 3), height, width))


def _spectrum(config: Any) -> Input:
    length = 2 * getattr(config, "max_source_positions", 1500)
    return Input("input_features", (1, getattr(config, "num_mel_bins", 80), length))


def _sound(config: Any) -> Input:
    """Return a spectrum of the length that the configuration has, or a second of sound."""
    if hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return Input("input_values", (1, config.max_length, config.num_mel_bins))
    return Input("input_values", (1, 16_000))

"""Models of transformers: of a type, a configuration, or a checkpoint in a folder or in the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amanda
from amanda.errors import did_you_mean
from amanda.tools.models._loaders import (
    RANDOM,
    build_on_device,
    check_parameters_fit,
    import_model_library,
    subject_on_random_inputs,
)
from amanda.tools.models._subject import Input, ModelError, Request, Subject, import_failure

TOKENS = 128
"""Length of texts, if the model takes as many."""


def transformers_model(request: Request) -> Subject:
    """Return a checkpoint's model, or one with random weights; raise ModelError where that cannot be."""
    transformers = import_model_library("transformers", request.word)
    try:
        config = _load_configuration(transformers, request)
        model_class = _model_class(transformers, config, request)
        model_and_weights = _load_checkpoint(request, model_class, config)
        if model_and_weights is None:
            model_and_weights = build_on_device(request, lambda: _untrained(model_class, config)), RANDOM
        model, weights = model_and_weights
    except ModelError:
        raise
    except (ImportError, RuntimeError, ValueError, TypeError, OSError) as error:
        raise ModelError(f"{request.word} cannot be made: {import_failure(error)}") from error
    return subject_on_random_inputs(request, model, list(_model_inputs(model, config)), weights=weights)


def _load_configuration(transformers: Any, request: Request) -> Any:
    """Return the configuration of a file, a folder or a name in the hub's cache, or of a type, with options.

    Raises ModelError for an unknown type or name, and for an option that the configuration lacks.
    """
    # Nothing is downloaded: a run that counts a model should not begin with gigabytes of weights.
    name, load, options = request.name, transformers.AutoConfig.from_pretrained, {"local_files_only": True}
    if name in transformers.CONFIG_MAPPING and not Path(name).exists():
        load, options = transformers.AutoConfig.for_model, {}
    elif not Path(name).exists() and "/" not in name:
        hint = did_you_mean(name, transformers.CONFIG_MAPPING)
        if not hint.startswith("did"):
            hint = "give a type such as llama, or the path of a config.json"
        raise ModelError(f"transformers has no type of model {name!r}, and there is no such file; {hint}")
    try:
        default_config = load(name, **options)
    except OSError as error:
        if Path(name).exists():
            raise
        command = f"hf download {name}"
        raise ModelError(
            f"{name} is neither a file nor in the cache of the Hugging Face hub: `{command}` brings it "
            f"there, `{command} config.json` its configuration alone, for random weights"
        ) from error
    # transformers keeps an unknown option as an attribute, without a word.
    for option in request.options:
        if option not in default_config.to_dict():
            suggestion = did_you_mean(option, default_config.to_dict())
            raise ModelError(f"the configuration of {name} has no {option!r}; {suggestion}")
    return load(name, **options, **request.options)


def _model_class(transformers: Any, config: Any, request: Request) -> Any:
    """Return the class of model that a configuration names, or else transformers' automatic class for it.

    A type that generates text has the class that does, which includes the head over the vocabulary.
    Raises ModelError if the option `architectures` names no class, or one of another type of model.
    """
    architectures = config.architectures or ()
    name = architectures if isinstance(architectures, str) else next(iter(architectures), "")
    model_class = getattr(transformers, name, None) if name else None
    if "architectures" in request.options:
        config_class = getattr(model_class, "config_class", None)
        if config_class is None or not isinstance(config, config_class):
            prefix = type(config).__name__.removesuffix("Config")
            classes = [key for key in dir(transformers) if key.startswith(f"{prefix}For")]
            raise ModelError(
                f"{request.word}: architectures is {name!r}, no model of {config.model_type}; "
                f"{did_you_mean(name, [*classes, f'{prefix}Model'])}"
            )
    if model_class is not None:
        return model_class
    if getattr(config, "is_encoder_decoder", False):
        mapping_name_by_class = {
            "AutoModelForSeq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
        }  # fmt: skip
    # A type such as BERT has a class for generating text too, but is not what it is for.
    elif type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        mapping_name_by_class = {}
    else:
        mapping_name_by_class = {"AutoModelForCausalLM": "CAUSAL_LM"}
    for class_name, mapping_name in mapping_name_by_class.items():
        if type(config) in getattr(transformers, f"MODEL_FOR_{mapping_name}_MAPPING"):
            return getattr(transformers, class_name)
    return transformers.AutoModel


def _untrained(kind: Any, config: Any) -> Any:
    return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)


def _load_checkpoint(request: Request, model_class: Any, config: Any) -> tuple[Any, str] | None:
    """Load the model of a checkpoint; return it, and where its weights come from, in words.

    None without weights, and with options or the device meta, for which a checkpoint's weights are not made.
    Raises ModelError for weights that are damaged, or exceed the free memory.
    """
    # A folder, or a name of the hub.
    is_named = Path(request.name).is_dir() or ("/" in request.name and not Path(request.name).exists())
    if not is_named or request.options or request.device == "meta":
        return None
    check_parameters_fit(request, lambda: _untrained(model_class, config))
    try:
        with amanda.disabled():
            model, report = model_class.from_pretrained(
                request.name, config=config, local_files_only=True, output_loading_info=True
            )
    except OSError:  # there are no weights, but a configuration alone
        return None
    except Exception as error:  # safetensors has an error of its own for a damaged file
        reason = import_failure(error)
        raise ModelError(f"the weights of {request.name} cannot be loaded: {reason}") from error
    missing_keys = sorted(report["missing_keys"])
    weights = f"weights of {request.name}"
    if missing_keys:
        weights += f" (random: {', '.join(missing_keys[:3])}{', ...' * (len(missing_keys) > 3)})"
    return model.to(request.device), weights


def _model_inputs(model: Any, config: Any) -> Iterator[Input]:
    """Yield what the model's forward function takes, its main input first."""
    main_name, text_config = model.main_input_name, config.get_text_config()
    vision_config = getattr(config, "vision_config", config)
    if main_name == "pixel_values":
        yield _image_input(vision_config)
    elif main_name == "input_features":
        # A spectrum of sound, whose length the encoder halves.
        length = 2 * getattr(config, "max_source_positions", 1500)
        yield Input("input_features", (1, getattr(config, "num_mel_bins", 80), length))
    elif main_name == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        yield Input("input_values", (1, config.max_length, config.num_mel_bins))
    elif main_name == "input_values":
        yield Input("input_values", (1, 16_000))  # a second of sound
    else:
        yield _token_input(main_name, text_config)
        if hasattr(config, "vision_config") and hasattr(config, "text_config"):
            yield _image_input(vision_config)
    if getattr(config, "is_encoder_decoder", False):
        yield _token_input("decoder_input_ids", text_config)


def _token_input(name: str, config: Any) -> Input:
    """Return an input of token numbers, as long as the model takes, and at most `TOKENS`."""
    fields = ("max_position_embeddings", "n_positions", "max_target_positions")
    length_limits = [getattr(config, field, None) for field in fields]
    length = min([TOKENS, *(limit for limit in length_limits if isinstance(limit, int) and limit > 0)])
    return Input(name, (1, length), config.vocab_size, "int64")


def _image_input(config: Any) -> Input:
    size = getattr(config, "image_size", None) or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return Input("pixel_values", (1, getattr(config, "num_channels", 3), height, width))

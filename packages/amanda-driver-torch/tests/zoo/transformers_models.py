"""Architectures of transformers, each with random weights and a configuration of a few small layers."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .configured_language import LANGUAGE_MODELS, MIXTURES, SERIES_MODELS, STATE_SPACES
from .configured_multimodal import MULTIMODAL
from .configured_perception import FILM_MODELS, IMAGE_MODELS, SOUND_MODELS
from .subject import Subject, image, tokens

SIZES = {
    1: "n_group topk_group first_k_dense_replace decoder_num_hidden_layers",
    2: "num_hidden_layers num_layers n_layer n_layers depth encoder_layers decoder_layers num_decoder_layers "
    "num_key_value_heads num_experts_per_tok num_conv_pos_embedding_groups",
    3: "num_channels",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "decoder_num_attention_heads time_step_rank num_experts num_local_experts n_routed_experts "
    "qk_rope_head_dim window_size",
    8: "head_dim d_kv state_size kv_lora_rank q_lora_rank qk_nope_head_dim v_head_dim mamba_d_state "
    "mamba_d_head mamba_n_heads mamba_num_heads patch_size num_conv_pos_embeddings",
    16: "embed_dim embedding_size projection_dim feature_size num_mel_bins",
    20: "entity_vocab_size",
    24: "max_source_positions max_target_positions",
    32: "hidden_size d_model n_embd dim emb_dim encoder_hidden_size decoder_hidden_size out_hidden_size "
    "word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size mlp_dim image_size",
    48: "intermediate_size encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_dim hidden_dim ffn_hidden_size "
    "decoder_intermediate_size",
    64: "vocab_size max_position_embeddings n_positions n_ctx",
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in SIZES.items() for name in names.split()},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "vision_feature_layer": -1,
    "depths": [1, 1],
    "conv_dim": (16, 16),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 4),
}
"""What a configuration gets for each of these names that it has, where its default is of the same kind."""

TEXT = """
afmoe albert apertus arcee aria_text beam bert bert-generation big_bird biogpt bitnet bloom camembert canine
clip_text_model cohere cohere2 cohere2_moe convbert cpmant ctrl cwm data2vec-text deberta deberta-v2
deepseek_v4 diffllama distilbert doge dpr electra embedding_gemma2_text ernie ernie4_5 ernie4_5_moe esm
eurobert exaone4 exaone_moe falcon flaubert flex_olmo flint fnet gemma gemma2 gemma3_text gemma4_unified_text
glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss granite granite_docling_text granite_swa
granitemoe granitemoe_swa granitemoeshared gte helium higgs_audio_v2 hrm_text hy_v3 hy_v4 hyperclovax ibert
imagegpt inkling2_text inkling_text jais2 jetmoe jina_embeddings_v3 kolibri1 laguna layoutlm lfm2 llama
llama4_text longformer luke markuplm megatron-bert mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
ministral3 mistral mixtral mobilebert modernbert modernbert-decoder molmo2_text mpnet mpt mra
muse_glimmer_text nanochat nemotron nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt
openai_privacy_filter opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_vl_moe_text
qwen3_vl_text rembert roberta roberta-prelayernorm roformer rwkv seed_oss smollm3 solar_open splinter stablelm
starcoder2 tapas tipsv2_text_model ultrabert vaultgemma visual_bert xglm xlm xlm-roberta xlm-roberta-xl xlnet
yoso
"""
TEXT_TO_TEXT = """
bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus
pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5
"""
IMAGES = """
aimv2_vision_model beit chinese_clip_vision_model clip_vision_model data2vec-vision deit dinov2
dinov2_with_registers dinov3_vit dpt focalnet idefics3_vision ijepa internvl_vision mlcd_vision_model
mobilenet_v2 pixio pixtral qianfan_ocr_vision radio regnet resnet sam3_vit_model sam_hq_vision_model
sam_vision_model sapiens2 siglip_vision_model smolvlm_vision swiftformer tipsv2_vision_model vit vit_mae
vit_msn vitdet
"""
TEXT_AND_IMAGES = "aimv2 altclip blip chinese_clip clip clipseg flava git groupvit metaclip_2 owlvit siglip"
WAVES = "data2vec-audio hubert sew sew-d unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm"
SPECTRA = """
glmasr_encoder moss_transcribe_diarize_audio qwen2_audio_encoder voxtral_encoder voxtral_realtime_encoder
"""

GIVEN = {
    TEXT: lambda: {"input_ids": tokens()},
    TEXT_TO_TEXT: lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(2, 6)},
    IMAGES: lambda: {"pixel_values": image()},
    TEXT_AND_IMAGES: lambda: {"input_ids": tokens(), "pixel_values": image()},
    WAVES: lambda: {"input_values": torch.randn(2, 800)},
    SPECTRA: lambda: {"input_features": torch.randn(2, 16, 48)},
    "whisper": lambda: {"input_features": torch.randn(2, 16, 48), "decoder_input_ids": tokens(2, 6)},
}
CONFIGURED = {
    **STATE_SPACES,
    **MIXTURES,
    **LANGUAGE_MODELS,
    **SERIES_MODELS,
    **IMAGE_MODELS,
    **FILM_MODELS,
    **SOUND_MODELS,
    **MULTIMODAL,
}
SETTLES = {"ibert": 2}  # the first step measures the ranges of activations, others move them
SAMPLE = frozenset({"mamba2", "mixtral", "qwen2_5_vl", "t5", "swin", "wav2vec2"})


def subjects() -> Iterator[Subject]:
    """Every architecture, under its name in transformers."""
    for names, make_inputs in GIVEN.items():
        for name in names.split():
            yield Subject(
                name,
                lambda name=name, make_inputs=make_inputs: _make_model(name, {}, make_inputs()),
                SETTLES.get(name, 1),
            )
    for name, (config, make_inputs) in CONFIGURED.items():
        yield Subject(
            name,
            lambda name=name, config=config, make_inputs=make_inputs: _make_model(
                name, config, make_inputs()
            ),
        )


def _make_model(
    name: str, config: dict[str, Any], inputs: dict[str, Tensor]
) -> tuple[nn.Module, dict[str, Tensor]]:
    auto = importlib.import_module("transformers.models.auto")
    transformers = importlib.import_module("transformers")
    config_class = auto.configuration_auto.CONFIG_MAPPING[name]
    model_class = auto.modeling_auto.MODEL_MAPPING_NAMES[name]
    if not isinstance(model_class, str):
        model_class = model_class[0]
    settings = {**_small(config_class), **config}
    return getattr(transformers, model_class)(config_class(**settings)).train(), inputs


def _small(config_class: type) -> dict[str, Any]:
    """The settings of SMALL that a configuration has, and those of the configurations within it."""
    names = {name for base in config_class.__mro__ for name in vars(base).get("__annotations__", ())}
    settings: dict[str, Any] = {}
    for name in SMALL.keys() & names:
        default = getattr(config_class, name, None)
        listed = isinstance(default, (list, tuple)), isinstance(SMALL[name], (list, tuple))
        if listed[0] == listed[1] and not (default is None and name in ("head_dim", "q_lora_rank")):
            settings[name] = SMALL[name]
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in names and isinstance(part, type) and "Auto" not in part.__name__:
            settings[name] = _small(part)
    return settings

"""Architectures for text, actions and series that need settings or inputs of their own."""

# ruff: noqa: C408 (settings read best as they are written in calls)

from typing import Any

import torch
from torch import randn

from .subject import Table, full_mask, tokens

FORECAST = dict(prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=1)
PATCHES = dict(num_input_channels=2, context_length=16, patch_length=4, patch_stride=4)
LINEAR_HEADS = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)


def text() -> dict[str, Any]:
    """Token ids."""
    return dict(input_ids=tokens())


def text_in_boxes() -> dict[str, Any]:
    """Token ids and where they stand on a page."""
    return dict(input_ids=tokens(), bbox=torch.tensor([1, 2, 5, 8]).expand(2, 12, 4))


def time_series() -> dict[str, Any]:
    """Ten values and the four after them."""
    past = dict(past_values=randn(2, 10), past_time_features=randn(2, 10, 1))
    future = dict(future_values=randn(2, 4), future_time_features=randn(2, 4, 1))
    return dict(**past, **future, past_observed_mask=torch.ones(2, 10))


STATE_SPACES: Table = {
    "mamba": (dict(conv_kernel=4), text),
    "mamba2": (dict(conv_kernel=4, num_heads=8, head_dim=8, n_groups=2, chunk_size=4), text),
    "falcon_mamba": (dict(conv_kernel=4), text),
    "jamba": (
        dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, use_mamba_kernels=False),
        text,
    ),
    "bamba": (dict(attn_layer_indices=[1], mamba_n_groups=2, mamba_chunk_size=4), text),
    "zamba": (dict(num_hidden_layers=4, layer_types=["mamba", "hybrid"] * 2, n_mamba_heads=2), text),
    "zamba2": (
        dict(
            num_hidden_layers=4,
            layer_types=["mamba", "hybrid"] * 2,
            hybrid_layer_ids=[1, 3],
            mamba_ngroups=1,
            n_mamba_heads=8,
            mamba_headdim=8,
        ),
        text,
    ),
    "falcon_h1": (dict(mamba_d_ssm=64, mamba_n_groups=2), text),
    "granitemoehybrid": (dict(layer_types=["mamba", "attention"]), text),
    "nemotron_h": (dict(conv_kernel=4, hybrid_override_pattern="M*"), text),
    "recurrent_gemma": (dict(num_hidden_layers=3, lru_width=32, attention_window_size=8), text),
    "qwen3_next": (LINEAR_HEADS, text),
    "qwen3_5_text": (LINEAR_HEADS, text),
    "lfm2_moe": (dict(layer_types=["conv", "full_attention"]), text),
}
MIXTURES: Table = {
    "deepseek_v2": (dict(num_key_value_heads=4), text),
    "deepseek_v3": (dict(num_key_value_heads=4), text),
    "deepseek_v32": (dict(num_key_value_heads=4), text),
    "minicpm3": (dict(num_key_value_heads=4), text),
    "glm4_moe_lite": (dict(num_key_value_heads=4), text),
    "mistral4": (dict(num_key_value_heads=4), text),
    "dbrx": (
        dict(
            n_layers=2,
            max_seq_len=64,
            attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8),
            ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, hidden_size=32),
        ),
        text,
    ),
}
LANGUAGE_MODELS: Table = {
    "gptj": (dict(rotary_dim=4), text),
    "codegen": (dict(rotary_dim=4), text),
    "gpt_neo": (dict(attention_types=[[["global", "local"], 1]]), text),
    "funnel": (dict(block_sizes=[1, 1], d_head=8, d_inner=48), text),
    "squeezebert": (
        dict(embedding_size=32, q_groups=2, k_groups=2, v_groups=2, output_groups=2, intermediate_groups=2),
        text,
    ),
    "lilt": (dict(hidden_size=48, max_2d_position_embeddings=64), text_in_boxes),
    "xmod": (dict(default_language="en_XX"), text),
    "roc_bert": (
        dict(pronunciation_embed_dim=8, shape_embed_dim=8, pronunciation_vocab_size=64, shape_vocab_size=64),
        lambda: dict(input_ids=tokens(), input_shape_ids=tokens(), input_pronunciation_ids=tokens()),
    ),
    "fsmt": (
        dict(src_vocab_size=64, tgt_vocab_size=64),
        lambda: dict(input_ids=tokens(), decoder_input_ids=tokens(2, 6)),
    ),
    "esmc": (dict(num_key_value_heads=4), text),
    "perceiver": (
        dict(
            num_latents=8,
            d_latents=32,
            d_model=16,
            num_blocks=1,
            num_self_attends_per_block=1,
            num_self_attention_heads=2,
            num_cross_attention_heads=2,
        ),
        lambda: dict(inputs=randn(2, 12, 16)),
    ),
    "decision_transformer": (
        dict(state_dim=3, act_dim=2, max_ep_len=20),
        lambda: dict(
            states=randn(2, 4, 3),
            actions=randn(2, 4, 2),
            rewards=randn(2, 4, 1),
            returns_to_go=randn(2, 4, 1),
            timesteps=torch.arange(4).repeat(2, 1),
            attention_mask=full_mask(2, 4),
        ),
    ),
}
SERIES_MODELS: Table = {
    "informer": (FORECAST, time_series),
    "autoformer": (FORECAST | dict(label_length=4, moving_average=3), time_series),
    "time_series_transformer": (FORECAST, time_series),
    "patchtst": (PATCHES, lambda: dict(past_values=randn(2, 16, 2))),
    "patchtsmixer": (PATCHES, lambda: dict(past_values=randn(2, 16, 2))),
    "timesfm": (
        dict(patch_length=8, horizon_length=8, context_length=32),
        lambda: dict(
            past_values=randn(2, 32), past_values_padding=0 * full_mask(2, 32), freq=0 * full_mask(2, 1)
        ),
    ),
}

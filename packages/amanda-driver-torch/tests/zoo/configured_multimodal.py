"""Architectures for text with images, films or sound."""

# ruff: noqa: C408 (settings read best as they are written in calls)

from typing import Any

import torch
from torch import rand, randn

from .configured_language import text_in_boxes
from .configured_perception import VISION
from .subject import Table, full_mask, image, tokens, with_placeholders

LANGUAGE = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ROTARY_3D = LANGUAGE | dict(
    rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=10000.0)
)
OPT = dict(
    model_type="opt",
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=48,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
    pad_token_id=0,
)
QWEN_VISION = dict(
    depth=2,
    hidden_size=32,
    num_heads=4,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
    in_channels=3,
)
PLACEHOLDER = dict(image_token_id=63, image_token_index=63)


def text_with_images(count: int, *shape: int, **more: Any) -> dict[str, Any]:
    """Token ids, `count` of them standing for each image."""
    return dict(input_ids=with_placeholders(count), pixel_values=image(*shape), **more)


def text_with_patches() -> dict[str, Any]:
    """Token ids and images cut into patches, as Qwen's models take them."""
    ids = with_placeholders(4)
    patches = dict(pixel_values=randn(32, 3 * 2 * 16), image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    return dict(input_ids=ids, **patches, mm_token_type_ids=(ids == 63).int())


MULTIMODAL: Table = {
    "clap": (
        dict(
            audio_config=dict(
                patch_embeds_hidden_size=16,
                num_mel_bins=16,
                spec_size=64,
                hidden_size=32,
                num_attention_heads=[2, 4],
                depths=[1, 1],
                patch_size=4,
                patch_stride=[4, 4],
                window_size=4,
                projection_dim=16,
            ),
            text_config=LANGUAGE | dict(projection_dim=16),
        ),
        lambda: dict(input_ids=tokens(), input_features=randn(2, 1, 64, 16)),
    ),
    "lxmert": (
        dict(visual_feat_dim=16, l_layers=1, x_layers=1, r_layers=1),
        lambda: dict(input_ids=tokens(), visual_feats=randn(2, 5, 16), visual_pos=rand(2, 5, 4)),
    ),
    "vilt": ({}, lambda: dict(input_ids=tokens(), pixel_values=image(), pixel_mask=full_mask(2, 32, 32))),
    "layoutlmv3": (
        dict(input_size=32, max_2d_position_embeddings=64, coordinate_size=6, shape_size=4),
        text_in_boxes,
    ),
    "udop": (
        {},
        lambda: dict(
            input_ids=tokens(), bbox=rand(2, 12, 4), pixel_values=image(), decoder_input_ids=tokens(2, 6)
        ),
    ),
    "blip_2_qformer": ({}, lambda: dict(query_embeds=randn(2, 4, 32), encoder_hidden_states=randn(2, 5, 32))),
    "blip-2": (
        dict(
            vision_config=VISION,
            qformer_config=LANGUAGE | dict(encoder_hidden_size=32),
            text_config=OPT,
            num_query_tokens=4,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4),
    ),
    "instructblip": (
        dict(
            vision_config=VISION,
            qformer_config=LANGUAGE | dict(encoder_hidden_size=32),
            text_config=OPT,
            num_query_tokens=4,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4, qformer_input_ids=tokens(2, 6)),
    ),
    "siglip2_vision_model": (
        dict(num_patches=16),
        lambda: dict(
            pixel_values=randn(2, 16, 192),
            pixel_attention_mask=full_mask(2, 16),
            spatial_shapes=4 * full_mask(2, 2),
        ),
    ),
    "xclip": (
        dict(
            text_config=LANGUAGE | dict(projection_dim=16),
            vision_config=VISION
            | dict(
                mit_hidden_size=16,
                mit_intermediate_size=32,
                mit_num_hidden_layers=1,
                mit_num_attention_heads=2,
                num_frames=2,
            ),
            projection_dim=16,
            prompt_layers=1,
            prompt_num_attention_heads=2,
        ),
        lambda: dict(input_ids=tokens(), pixel_values=image(2, 2, 3, 32, 32)),
    ),
    "llava": (
        dict(
            vision_config=VISION | dict(model_type="clip_vision_model"),
            text_config=LANGUAGE | dict(model_type="llama"),
            **PLACEHOLDER,
        ),
        lambda: text_with_images(16),
    ),
    "vipllava": (
        dict(
            vision_config=VISION | dict(model_type="clip_vision_model"),
            text_config=LANGUAGE | dict(model_type="llama"),
            vision_feature_layers=[0, 1],
            **PLACEHOLDER,
        ),
        lambda: text_with_images(16),
    ),
    "paligemma": (
        dict(
            vision_config=VISION | dict(model_type="siglip_vision_model"),
            text_config=LANGUAGE | dict(model_type="gemma"),
            projection_dim=32,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(16, token_type_ids=0 * full_mask(2, 24)),
    ),
    "gemma3": (
        dict(
            vision_config=VISION | dict(model_type="siglip_vision_model"),
            text_config=LANGUAGE | dict(model_type="gemma3_text"),
            mm_tokens_per_image=4,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4, token_type_ids=0 * full_mask(2, 24)),
    ),
    "idefics3": (
        dict(
            vision_config=VISION | dict(model_type="idefics3_vision"),
            text_config=LANGUAGE | dict(model_type="llama"),
            scale_factor=2,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4, 2, 1, 3, 32, 32),
    ),
    "smolvlm": (
        dict(
            vision_config=VISION | dict(model_type="smolvlm_vision"),
            text_config=LANGUAGE | dict(model_type="llama"),
            scale_factor=2,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4, 2, 1, 3, 32, 32),
    ),
    "internvl": (
        dict(
            vision_config=VISION | dict(model_type="internvl_vision", image_size=[32, 32], patch_size=[8, 8]),
            text_config=LANGUAGE | dict(model_type="qwen2"),
            downsample_ratio=0.5,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4),
    ),
    "mistral3": (
        dict(
            vision_config=VISION | dict(model_type="pixtral", head_dim=8),
            text_config=LANGUAGE | dict(model_type="mistral"),
            spatial_merge_size=2,
            **PLACEHOLDER,
        ),
        lambda: text_with_images(4, image_sizes=32 * full_mask(2, 2)),
    ),
    "qwen2_vl": (
        dict(
            vision_config=QWEN_VISION | dict(embed_dim=32, mlp_ratio=2), text_config=ROTARY_3D, **PLACEHOLDER
        ),
        text_with_patches,
    ),
    "qwen2_5_vl": (
        dict(
            vision_config=QWEN_VISION
            | dict(out_hidden_size=32, intermediate_size=48, window_size=16, fullatt_block_indexes=[1]),
            text_config=ROTARY_3D,
            **PLACEHOLDER,
        ),
        text_with_patches,
    ),
    "qwen3_vl": (
        dict(
            vision_config=QWEN_VISION
            | dict(
                out_hidden_size=32,
                intermediate_size=48,
                num_position_embeddings=16,
                deepstack_visual_indexes=[0],
            ),
            text_config=ROTARY_3D,
            **PLACEHOLDER,
        ),
        text_with_patches,
    ),
    "mllama": (
        dict(
            vision_config=dict(
                hidden_size=32,
                num_hidden_layers=2,
                num_global_layers=1,
                attention_heads=4,
                intermediate_size=48,
                image_size=32,
                patch_size=8,
                vision_output_dim=64,
                intermediate_layers_indices=[0],
                max_num_tiles=1,
                supported_aspect_ratios=[[1, 1]],
            ),
            text_config=LANGUAGE | dict(cross_attention_layers=[1]),
        ),
        lambda: dict(
            input_ids=tokens(),
            pixel_values=image(2, 1, 1, 3, 32, 32),
            aspect_ratio_ids=full_mask(2, 1),
            aspect_ratio_mask=full_mask(2, 1, 1),
        ),
    ),
    "qwen2_audio": (
        dict(
            audio_config=dict(
                d_model=32,
                encoder_layers=2,
                encoder_attention_heads=4,
                encoder_ffn_dim=48,
                num_mel_bins=16,
                max_source_positions=24,
            ),
            text_config=LANGUAGE | dict(model_type="qwen2"),
            audio_token_id=63,
            audio_token_index=63,
        ),
        lambda: dict(
            input_ids=with_placeholders(12),
            input_features=randn(2, 16, 48),
            feature_attention_mask=full_mask(2, 48),
        ),
    ),
}

"""Architectures for images, films and sound that need settings or inputs of their own."""

# ruff: noqa: C408 (settings read best as they are written in calls)

from typing import Any

from torch import rand, randn

from .subject import Table, image, tokens

VISION = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    image_size=32,
    patch_size=8,
    projection_dim=16,
)
STAGES = dict(hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
PYRAMID = STAGES | dict(num_attention_heads=[1, 2, 2, 4])
WINDOWS = dict(patch_size=4, num_heads=[2, 4])
RESNET = STAGES | dict(model_type="resnet", embedding_size=8, out_features=["stage2", "stage3", "stage4"])
DETECTOR = dict(backbone_config=RESNET, num_queries=4)


def images() -> dict[str, Any]:
    """Images of 32 x 32."""
    return dict(pixel_values=image())


def large_images() -> dict[str, Any]:
    """Images of 64 x 64, for models that halve them often."""
    return dict(pixel_values=image(2, 3, 64, 64))


IMAGE_MODELS: Table = {
    "convnext": (STAGES, large_images),
    "convnextv2": (STAGES, large_images),
    "dinov3_convnext": (STAGES, images),
    "swin": (WINDOWS, images),
    "swinv2": (WINDOWS, images),
    "swin2sr": (WINDOWS | dict(patch_size=1), images),
    "maskformer-swin": (WINDOWS, images),
    "donut-swin": (WINDOWS, images),
    "segformer": (PYRAMID, large_images),
    "glpn": (PYRAMID, large_images),
    "pvt": (PYRAMID, images),
    "pvt_v2": (PYRAMID, images),
    "hiera": (
        dict(
            image_size=[64, 64],
            patch_stride=[4, 4],
            embed_dim=8,
            depths=[1, 1, 1],
            num_heads=[1, 2, 4],
            num_query_pool=2,
        ),
        large_images,
    ),
    "levit": (
        dict(
            hidden_sizes=[16, 32, 32],
            num_attention_heads=[2, 4, 4],
            depths=[1, 1, 1],
            key_dim=[8, 8, 8],
            image_size=64,
            patch_size=16,
        ),
        large_images,
    ),
    "bit": (
        dict(embedding_size=32, hidden_sizes=[32, 32, 64, 64], depths=[1, 1, 1, 1], num_groups=4),
        images,
    ),
    "poolformer": (STAGES, images),
    "mobilenet_v1": (dict(depth_multiplier=0.25), images),
    "mobilevit": (
        dict(hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64], image_size=64),
        large_images,
    ),
    "mobilevitv2": (dict(width_multiplier=0.25), lambda: dict(pixel_values=image(2, 3, 256, 256))),
    "efficientnet": (dict(width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320), images),
    "textnet": (dict(stem_out_channels=8, hidden_sizes=[8, 8, 16, 16, 32]), large_images),
    "yolos": (dict(image_size=[32, 32], num_detection_tokens=4), images),
    "detr": (DETECTOR, large_images),
    "conditional_detr": (DETECTOR, large_images),
    "dab-detr": (DETECTOR, large_images),
    "deformable_detr": (DETECTOR, large_images),
    "table-transformer": (DETECTOR, large_images),
    "rt_detr": (
        dict(
            backbone_config=RESNET | dict(model_type="rt_detr_resnet"),
            encoder_in_channels=[16, 16, 32],
            encoder_hidden_dim=32,
            num_queries=5,
            decoder_in_channels=[32, 32, 32],
        ),
        large_images,
    ),
    "mask2former": (
        dict(
            backbone_config=dict(
                model_type="swin",
                image_size=32,
                embed_dim=8,
                depths=[1, 1, 1, 1],
                num_heads=[1, 1, 2, 2],
                window_size=2,
                patch_size=4,
                out_features=["stage1", "stage2", "stage3", "stage4"],
            ),
            feature_size=32,
            mask_feature_size=32,
            hidden_dim=32,
            num_queries=4,
            encoder_layers=1,
            dim_feedforward=32,
            encoder_feedforward_dim=32,
        ),
        large_images,
    ),
    "sam": (
        dict(
            vision_config=VISION
            | dict(output_channels=16, mlp_dim=48, num_pos_feats=8, global_attn_indexes=[1], window_size=2),
            prompt_encoder_config=dict(hidden_size=16, image_size=32, patch_size=8, mask_input_channels=8),
            mask_decoder_config=dict(
                hidden_size=16, num_attention_heads=2, num_hidden_layers=2, mlp_dim=32, iou_head_hidden_dim=16
            ),
        ),
        lambda: dict(pixel_values=image(), input_points=rand(2, 1, 1, 2) * 30),
    ),
    "seggpt": (
        dict(image_size=[32, 16], intermediate_hidden_state_indices=[0, 1], merge_index=0),
        lambda: {
            name: image(2, 3, 16, 16) for name in ("pixel_values", "prompt_pixel_values", "prompt_masks")
        },
    ),
}
FILM_MODELS: Table = {
    "timesformer": (dict(num_frames=2), lambda: dict(pixel_values=image(2, 2, 3, 32, 32))),
    "videomae": (dict(num_frames=4), lambda: dict(pixel_values=image(2, 4, 3, 32, 32))),
    "vivit": (dict(num_frames=4, tubelet_size=[2, 8, 8]), lambda: dict(pixel_values=image(2, 4, 3, 32, 32))),
    "vjepa2": (
        dict(
            crop_size=32,
            frames_per_clip=4,
            pred_hidden_size=32,
            pred_num_attention_heads=4,
            pred_num_hidden_layers=1,
            num_pooler_layers=1,
        ),
        lambda: dict(pixel_values_videos=image(2, 4, 3, 32, 32)),
    ),
}
SOUND_MODELS: Table = {
    "audio-spectrogram-transformer": (
        dict(max_length=24, frequency_stride=8, time_stride=8),
        lambda: dict(input_values=randn(2, 24, 16)),
    ),
    "speech_to_text": (
        dict(input_feat_per_channel=16, conv_channels=32, max_source_positions=48),
        lambda: dict(input_features=randn(2, 48, 16), decoder_input_ids=tokens(2, 6)),
    ),
    "speecht5": ({}, lambda: dict(input_values=randn(2, 10, 32), decoder_input_values=randn(2, 6, 32))),
    "wav2vec2-bert": (dict(feature_projection_input_dim=16), lambda: dict(input_features=randn(2, 24, 16))),
    "parakeet_encoder": (dict(num_mel_bins=80), lambda: dict(input_features=randn(2, 48, 80))),
    "moonshine": (
        dict(encoder_num_hidden_layers=1, encoder_num_attention_heads=4),
        lambda: dict(input_values=randn(2, 1600), decoder_input_ids=tokens(2, 6)),
    ),
    "encodec": (
        dict(
            num_filters=4,
            hidden_size=16,
            codebook_dim=16,
            codebook_size=32,
            upsampling_ratios=[4, 2],
            num_lstm_layers=1,
        ),
        lambda: dict(input_values=randn(2, 1, 160)),
    ),
    "dac": (
        dict(
            encoder_hidden_size=8, downsampling_ratios=[2, 4], n_codebooks=2, codebook_size=16, codebook_dim=4
        ),
        lambda: dict(input_values=randn(2, 1, 160)),
    ),
    "univnet": (
        dict(
            model_hidden_channels=8,
            model_in_channels=8,
            resblock_kernel_sizes=[3],
            resblock_stride_sizes=[4],
            resblock_dilation_sizes=[[1, 3]],
            kernel_predictor_hidden_channels=8,
            num_mel_bins=8,
        ),
        lambda: dict(input_features=randn(2, 16, 8)),
    ),
    "vits": (
        dict(
            flow_size=32,
            spectrogram_bins=9,
            upsample_initial_channel=16,
            duration_predictor_filter_channels=32,
            upsample_rates=[4, 2],
            upsample_kernel_sizes=[8, 4],
            resblock_kernel_sizes=[3],
            resblock_dilation_sizes=[[1, 3]],
            posterior_encoder_num_wavenet_layers=2,
            prior_encoder_num_wavenet_layers=1,
            prior_encoder_num_flows=2,
            duration_predictor_num_flows=2,
        ),
        lambda: dict(input_ids=tokens()),
    ),
}

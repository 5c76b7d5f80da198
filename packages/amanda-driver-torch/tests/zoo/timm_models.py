"""Models of timm, of every family that it has, with random weights and images as small as they take."""

import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .subject import Subject

SMALLEST = """
convmixer_768_32 convnext_zepto_rms cpubone_nano cpubone_s0 cpubone_t0 crossvit_tiny_240 cs3darknet_focus_m
cs3darknet_focus_s cs3darknet_s cspnext_m cspnext_s cspnext_tiny davit_tiny densenet121 densenet169
densenetblur121d dla46x_c dla60x_c dpn48b dpn68 edgenext_small edgenext_x_small edgenext_xx_small
efficientvim_m1 efficientvim_m2 efficientvit_b0 efficientvit_b1 efficientvit_m0 efficientvit_m1
efficientvit_m2 ese_vovnet19b_dw ese_vovnet19b_slim ese_vovnet19b_slim_dw fasternet_t0 fasternet_t1
fastvit_s12 fastvit_t12 fastvit_t8 focalnet_tiny_srf ghostnet_050 ghostnet_100 hardcorenas_a hardcorenas_b
hgnetv2_b0 hgnetv2_b1 hgnetv2_b2 hrnet_w18_small iformer_m iformer_s iformer_t inception_next_atto
lambda_resnet26t lcnet_035 lcnet_050 lcnetv2_base lcnetv2_large lcnetv2_small legacy_seresnet18
legacy_xception lowformer_b0 mambaout_femto mambaout_kobe mobilenetv3_small_050 mobileone_s1 mobilevit_xs
mobilevit_xxs mobilevitv2_050 mvitv2_tiny nextvit_small nf_regnet_b0 nf_regnet_b1 poolformer_s12
poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 regnety_002 regnety_004 repghostnet_050 repghostnet_058
repghostnet_080 repvit_m0_9 repvit_m1 repvit_m1_0 res2next50 resnest14d resnet10t resnet14t resnetv2_18
resnetv2_18d rexnet_100 rexnet_130 rexnetr_100 sam2_hiera_tiny selecsls42 sequencer2d_s shvit_s1 shvit_s2
skresnet18 starnet_s050 starnet_s100 swiftformer_l1 swiftformer_s swiftformer_xs test_byobnet test_convnext
test_efficientnet test_efficientnet_gn test_efficientnet_ln test_mambaout test_nfnet test_resnet test_vit
tiny_vit_11m_224 tiny_vit_5m_224 tresnet_m twins_svt_small vit_tiny_patch16_dinov3_qkvb xception41p
xcit_nano_12_p16_224 xcit_nano_12_p8_224
"""
TOLD_THE_SIZE = """
cait_xxs24_224 coat_lite_tiny coat_mini coat_tiny convit_tiny deit_tiny_distilled_patch16_224
deit_tiny_patch16_224 eca_botnext26ts_256 efficientformerv2_s0 efficientformerv2_s1 efficientformerv2_s2
eva02_tiny_patch14_224 gcvit_xxtiny gmixer_12_224 gmlp_ti16_224 hiera_tiny_224 levit_128 levit_128s
levit_conv_128s maxvit_pico_rw_256 maxvit_rmlp_pico_rw_256 nest_tiny pit_ti_224 pit_ti_distilled_224
pit_xs_224 swinv2_cr_tiny_224 test_coatnet test_vit_relpos tnt_s_legacy_patch16_224 visformer_tiny
vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224
"""
"""Models that are made for one size of images."""
LARGER = {
    "ghostnetv3_050": 48,
    "csatv2": 64,
    "inception_v3": 96,
    "inception_v4": 96,
    "efficientformer_l1": 224,
}
SHORTENED: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "mobilenetv5_base": (64, {"channel_multiplier": 0.25}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2}),
    "qwen3_vit_88m": (64, {"depth": 2}),
    "samvit_base_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "swin_tiny_patch4_window7_224": (32, {"img_size": 32, "embed_dim": 24, "depths": (1, 1, 2, 1)}),
    "swinv2_tiny_window16_256": (32, {"img_size": 32, "embed_dim": 24, "depths": (1, 1, 2, 1)}),
}
"""Models whose smallest is large: the size of images, and what is cut down."""
SAMPLE = frozenset(
    {
        "convnext_zepto_rms",
        "deit_tiny_patch16_224",
        "efficientvit_m0",
        "mobilenetv3_small_050",
        "resnet10t",
        "swin_tiny_patch4_window7_224",
    }
)


def subjects() -> Iterator[Subject]:
    """Every model, under its name in timm."""
    for name in SMALLEST.split():
        yield _subject(name, 32, {})
    for name in TOLD_THE_SIZE.split():
        yield _subject(name, 32, {"img_size": 32})
    for name, size in LARGER.items():
        yield _subject(name, size, {})
    for name, (size, settings) in SHORTENED.items():
        yield _subject(name, size, settings)


def _subject(name: str, size: int, settings: dict[str, Any]) -> Subject:
    return Subject(name, lambda: _make_model(name, size, settings))


def _make_model(name: str, size: int, settings: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor]]:
    timm = importlib.import_module("timm")
    model = timm.create_model(name, pretrained=False, num_classes=10, **settings).train()
    return model, {"x": torch.randn(2, 3, size, size)}

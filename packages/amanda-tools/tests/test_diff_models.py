"""Planted differences in small transformers and timm models are named at their op, and nothing else is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amanda.tools.diff import DiffResult, diff

pytestmark = pytest.mark.slow

TOKENS = torch.arange(20).reshape(2, 10) * 7 % 50
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def bert(transformers: Any) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, intermediate_size=48))


def distilbert(transformers: Any) -> nn.Module:
    config = transformers.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=48)
    return transformers.DistilBertModel(config)


def gpt2(transformers: Any) -> nn.Module:
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))


def llama(transformers: Any) -> nn.Module:
    return transformers.LlamaModel(transformers.LlamaConfig(**SMALL, intermediate_size=48))


def t5(transformers: Any) -> nn.Module:
    config = transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel(config)


def vit(transformers: Any) -> nn.Module:
    known = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    config = transformers.ViTConfig(**known, intermediate_size=48, image_size=32, patch_size=8)
    return transformers.ViTModel(config)


def timm_model(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    def made(transformers: Any) -> nn.Module:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, num_classes=10, **options)

    return made


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "bert": bert, "distilbert": distilbert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit,
    "resnet": timm_model("resnet10t"), "mobilenet": timm_model("mobilenetv3_small_050"),
    "convnext": timm_model("convnext_atto"), "deit": timm_model("deit_tiny_patch16_224", img_size=32),
}  # fmt: skip
QUICK = ("bert", "resnet")
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in MODELS]


def change(module: Any, chance: random.Random) -> None:
    """Change one op: its epsilon, its function, or one row of its weight by a thousandth."""
    if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
        module.eps += 1e-5
    elif isinstance(module, (nn.GELU, nn.SiLU, nn.ReLU)):
        module.__dict__["forward"] = lambda x: F.elu(x, 0.9)
    else:
        module.weight.data[chance.randrange(len(module.weight))] *= 1.001


def leaves(model: nn.Module) -> list[str]:
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.GELU, nn.SiLU, nn.ReLU)
    return [name for name, one in model.named_modules() if isinstance(one, kinds) and "pooler" not in name]


def made(name: str, transformers: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = MODELS[name](transformers).eval()
    images = torch.randn(2, 3, 32, 32)
    return model, TOKENS if name in ("bert", "distilbert", "gpt2", "llama", "t5") else images


def compared(model: nn.Module, other: nn.Module, given: Tensor) -> DiffResult:
    with torch.no_grad():
        return diff(lambda: model(given), lambda: other(given), control="float64")


@pytest.mark.long
def test_planted_differences_are_named_at_their_op(transformers: Any) -> None:
    named, wrong = 0, []
    for seed, name in enumerate([*MODELS, *MODELS]):
        model, given = made(name, transformers)
        other = copy.deepcopy(model)
        chosen = random.Random(seed).choice(leaves(other))
        change(other.get_submodule(chosen), random.Random(seed))
        first = compared(model, other, given).first
        if first is not None and first.module == chosen and first.inputs is not False:
            named += 1
        else:
            wrong.append((name, chosen, str(first)))
    assert named >= 19, wrong


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_unchanged_pairs(name: str, transformers: Any) -> None:
    model, given = made(name, transformers)
    assert compared(model, copy.deepcopy(model), given).first_difference is None
    other = copy.deepcopy(model)
    if given.is_floating_point():
        other.to(memory_format=torch.channels_last)
    else:
        other.set_attn_implementation("eager")
    result = compared(model, other, given)
    assert result.first is None, result.sentence


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")  # of the exporter
@pytest.mark.parametrize("name", NAMES)
def test_planted_differences_from_an_exported_model_are_named(name: str, transformers: Any) -> None:
    """The session of ONNX Runtime is of the unchanged model, which agrees; two changes do not."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, given = made(name, transformers)
    if given.dtype == torch.int64 or name == "vit":
        model.config.return_dict, model.config.use_cache = False, False
    with torch.no_grad():
        exported = torch.onnx.export(model, (given,), dynamo=True, verbose=False)
    assert exported is not None
    session = onnxruntime.InferenceSession(exported.model_proto.SerializeToString())
    feed = {session.get_inputs()[0].name: given.numpy()}

    def against(one: nn.Module) -> DiffResult:
        with torch.no_grad():
            return diff(lambda: one(given), lambda: session.run(None, feed), control="float64")

    unchanged = against(model)
    assert not unchanged, unchanged.sentence
    seed = list(MODELS).index(name)
    for chance in (random.Random(seed), random.Random(seed + len(MODELS))):
        other = copy.deepcopy(model)
        places = leaves(other)
        chosen = chance.choice(places)
        change(other.get_submodule(chosen), chance)
        result = against(other)
        # the exporter folds a convolution into the normalisation behind it
        expected = next(one for one in places[places.index(chosen) :] if one in result.modules)
        assert result.first is not None, chosen
        assert result.first.module == expected, result.sentence


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_training_forward_agrees_with_generation_from_a_cache(transformers: Any, name: str) -> None:
    torch.manual_seed(0)
    if name == "llama":
        config = transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(config).eval()
        projection = model.model.layers[1].mlp.down_proj
    else:
        known = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = transformers.GPT2Config(**known, bos_token_id=1, eos_token_id=None)
        model = transformers.GPT2LMHeadModel(config).eval()
        projection = model.transformer.h[1].mlp.c_proj
    tokens = torch.arange(10)[None] * 7 % 49 + 1

    def generated() -> Tensor:
        found: Tensor = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
        return found

    with torch.no_grad():
        whole = generated()[:, :-1].clone()
        agree = diff(lambda: model(whole).logits, generated)
        assert not agree, agree.sentence
        assert any("ran once in one run and in pieces" in one for one in agree.told)
        plain = projection.forward
        projection.forward = lambda x: plain(x + 0.1 * (x.shape[1] == 1))  # decoding alone is wrong
        whole = generated()[:, :-1].clone()
        found = diff(lambda: model(whole).logits, generated)
    assert found.first is not None
    assert found.first.module.endswith(("mlp.down_proj", "mlp.c_proj"))

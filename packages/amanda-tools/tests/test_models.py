"""Models by name: what is made, the inputs that they get, and what the errors say."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import children
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.models import Input, ModelError, Subject, is_model, made
from amanda.tools.models._subject import import_failure
from amanda.tools.nan import NanTool

FACTORIES = """
import torch
from torch import nn

def net(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

def given():
    return net(), torch.rand(3, 4)

def image():
    return nn.Conv2d(3, 8, 3)

def nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of factories and an ONNX model, where the test is."""
    monkeypatch.chdir(tmp_path)
    Path("made_nets.py").write_text(FACTORIES)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "weight")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", [x], [y], [weight])
    imports = [helper.make_opsetid("", 18)]
    onnx.save_model(helper.make_model(graph, opset_imports=imports, ir_version=9), "model.onnx")
    return tmp_path


def macs(subject: Subject) -> int:
    flops = FlopsTool()
    with amanda.apply(flops):
        subject.run()
    return flops.result.total("macs")


SMALL = "hidden_size=64,num_hidden_layers=2,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2"


@pytest.mark.parametrize(
    ("word", "inputs"),
    [
        (f"hf:llama:{SMALL}", "input_ids (1, 128)"),
        ("hf:bert:hidden_size=64,num_hidden_layers=1,num_attention_heads=4", "input_ids (1, 128)"),
        ("hf:vit:hidden_size=48,num_hidden_layers=1,num_attention_heads=4", "pixel_values (1, 3, 224, 224)"),
        ("hf:t5:d_model=64,num_layers=1,d_ff=64", "input_ids (1, 128), decoder_input_ids (1, 128)"),
        (
            "hf:whisper:d_model=64,encoder_layers=1,decoder_layers=1,encoder_attention_heads=4,decoder_attention_heads=4",
            "input_features (1, 80, 3000), decoder_input_ids (1, 128)",
        ),
        ("hf:wav2vec2:hidden_size=64,num_hidden_layers=1,num_attention_heads=4", "input_values (1, 16000)"),
        ("hf:clip", "input_ids (1, 77), pixel_values (1, 3, 224, 224)"),
    ],
)  # fmt: skip
def test_models_of_transformers_run_on_inputs_of_their_configuration(
    transformers: Any, word: str, inputs: str
) -> None:
    subject = made(word)
    assert ", ".join(map(str, subject.inputs)) == inputs
    assert macs(subject) > 0


def test_options_are_of_the_configuration(transformers: Any) -> None:
    subject = made(f"hf:llama:{SMALL}", ["2,16"])
    assert subject.kind == "LlamaForCausalLM"
    assert subject.model.config.num_hidden_layers == 2
    assert subject.inputs == [Input("input_ids", (2, 16), 32000, "int64")]
    counted = "LlamaForCausalLM, 4,170,048 parameters, random weights, input_ids (2, 16)"
    assert str(subject) == f"hf:llama:{SMALL}: {counted}"


def test_a_file_of_a_configuration_names_the_class(transformers: Any, folder: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(folder)
    for word in ("hf:config.json", f"hf:{folder}"):
        assert made(word).kind == "GPT2LMHeadModel"
        assert made(word).weights == "random weights"


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("hf:gpt2:n_embd=16,n_layer=1,n_head=2", "GPT2LMHeadModel"),
        ("hf:t5:d_model=16,num_layers=1,d_ff=16", "T5ForConditionalGeneration"),
        ("hf:bert:hidden_size=16,num_hidden_layers=1,num_attention_heads=2", "BertModel"),
        (f"hf:llama:{SMALL},architectures=LlamaModel", "LlamaModel"),
        (f"hf:llama:{SMALL},architectures=LlamaForTokenClassification", "LlamaForTokenClassification"),
    ],
)
def test_what_generates_text_has_its_head_unless_a_class_is_given(
    transformers: Any, word: str, kind: str
) -> None:
    assert made(word, ["1,4"]).kind == kind


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_runs_with_its_weights(transformers: Any, folder: Path, dtype: str) -> None:
    """NaN in a weight of it is found; options, and the device meta, leave the weights."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))
    torch.nn.init.constant_(model.transformer.ln_f.weight, float("nan"))
    model.save_pretrained(folder / "checkpoint")
    subject = made("hf:checkpoint")
    assert "float32" in dtype or next(subject.model.parameters()).dtype == torch.bfloat16
    assert str(subject).endswith("parameters, weights of checkpoint, input_ids (1, 16)")
    nan = NanTool()
    with amanda.apply(nan):
        subject.run()
    assert len(nan.result.entered) == 1
    assert made("hf:checkpoint:n_layer=2").weights == made("hf:checkpoint", device="meta").weights
    assert made("hf:checkpoint:architectures=GPT2ForSequenceClassification").weights == "random weights"


def test_weights_that_a_checkpoint_lacks_are_named(transformers: Any, folder: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder / "base")
    text = (folder / "base" / "config.json").read_text().replace("BertModel", "BertForMaskedLM")
    (folder / "base" / "config.json").write_text(text)
    assert made("hf:base").weights.startswith("weights of base (random: cls.predictions.bias, ")
    for file in (folder / "base").glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(ModelError, match="the weights of base cannot be loaded: "):
        made("hf:base")


@pytest.mark.slow
def test_a_name_of_the_hub_runs_from_its_cache(transformers: Any, folder: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    cached = folder / "hub" / "models--some--name"
    transformers.GPT2LMHeadModel(config).save_pretrained(cached / "snapshots" / "a1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a1")
    code = (
        "import torch\nfor name in 'nms', 'qnms':\n"
        "  torch.library.define(f'torchvision::{name}', '(Tensor a, Tensor b, float c) -> Tensor')\n"
        "from amanda.tools.models import made\nprint(made('hf:some/name'))"
    )
    environment = {**os.environ, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}
    done = children.run([sys.executable, "-c", code], env=environment, check=True)
    assert done.stdout.startswith("hf:some/name: GPT2LMHeadModel, 15,328 parameters, weights of some/name, ")


@pytest.mark.parametrize(
    ("word", "backward"),
    [  # the backward pass of Llama's attention is of other kernels there
        (f"hf:llama:{SMALL}", False),
        ("hf:bert:hidden_size=64,num_hidden_layers=1,num_attention_heads=4", True),
    ],
)
def test_a_model_on_meta_counts_as_one_with_values(transformers: Any, word: str, backward: bool) -> None:
    """The kernels of the device are Python, and call ops that are none of the model's."""
    totals = []
    for device in ("cpu", "meta"):
        flops = FlopsTool()
        subject = made(word, ["2,16"], backward=backward, device=device)
        with amanda.apply(flops):
            subject.run()
        totals.append({row[:3]: row[4:7] for row in flops.result.rows() if row[5]})
    assert totals[0] == totals[1]
    assert len(totals[0]) > 10


@pytest.mark.slow
def test_counts_are_those_of_the_literature(transformers: Any) -> None:
    assert macs(made("timm:resnet50")) == 4_089_184_256
    assert macs(made("hf:bert", device="meta")) / 1e9 == pytest.approx(11.174, abs=5e-4)


def test_a_model_too_large_for_the_memory_is_told_before_it_is_made(
    transformers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("amanda.tools.models._loaders._MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 20 kB\nMemAvailable:   8 kB\n")
    with pytest.raises(ModelError, match=r"take 0\.0 GB.*--device meta.*options that make it smaller"):
        made(f"hf:llama:{SMALL}")


def test_a_function_may_bring_inputs(folder: Path) -> None:
    assert [str(entry) for entry in made("torch:made_nets.py:given").inputs] == ["input 0 (3, 4)"]
    assert macs(made("torch:made_nets.py:given")) == 3 * (4 * 8 + 8 * 2)
    assert macs(made("torch:made_nets.py:net:width=16", ["2,4"])) == 2 * (4 * 16 + 16 * 2)


def test_the_backward_pass_runs_if_it_is_asked_for(folder: Path) -> None:
    flops = FlopsTool()
    with amanda.apply(flops):
        made("torch:made_nets.py:given", backward=True).run()
    assert flops.result.total("macs", "backward") == 3 * (4 * 8 + 2 * 8 * 2)  # no gradient of the input


def test_inputs_are_not_ops_of_the_model(folder: Path) -> None:
    flops = FlopsTool()
    with amanda.apply(flops):
        made("torch:made_nets.py:net", ["2,4"]).run()
    assert {row[1] for row in flops.result.rows() if row[0] != "construction"} == {"linear", "relu"}


def test_onnx_models_run_on_inputs_of_their_graph(folder: Path) -> None:
    assert str(made("model.onnx")) == "model.onnx: g, x (1, 8)"
    assert macs(made("onnx:model.onnx", ["x=5,8"])) == 5 * 8 * 4


@pytest.mark.long
def test_models_of_keras_run_on_inputs_of_their_own() -> None:
    pytest.importorskip("keras")
    subject = made("keras:MobileNetV2:alpha=0.35", ["2,224,224,3"])
    assert str(subject).endswith("(2, 224, 224, 3)")
    assert macs(subject) > 0
    flops = FlopsTool()
    with amanda.apply(flops):
        made("keras:MobileNetV2:alpha=0.35", backward=True).run()
    assert flops.result.total("macs", "backward") > 0


@pytest.mark.parametrize(
    ("word", "shapes", "part"),
    [
        ("hf:lama", [], "has no type of model 'lama', and there is no such file; did you mean llama?"),
        ("hf:unknown", [], "give a type such as llama, or the path of a config.json"),
        ("hf:some/model", [], "nor in the cache of the Hugging Face hub: `hf download some/model`"),
        ("hf:llama:architectures=LlamaForCausalLn", [], "LlamaForCausalLn', no model of llama; did you mean"),
        ("hf:llama:architectures=BertModel", [], "is 'BertModel', no model of llama; there are LlamaFor"),
        ("hf:llama:hiden_size=8", [], "of llama has no 'hiden_size'; did you mean hidden_size?"),
        (f"hf:llama:{SMALL}", ["ids=2"], "has no input 'ids'; there are input_ids"),
        (f"hf:llama:{SMALL}", ["2x"], "2x is no shape; give sizes, as in 2,3,224,224 or NAME=2,64"),
        ("timm:resnet5O", [], "timm has no model 'resnet5O'; did you mean resnet50"),
        ("torch:made_nets.py:net", [], "--input-shape 1,4, or have made_nets.py:net return (module, inputs)"),
        ("torch:made_nets.py:image", [], "give --input-shape 1,3,224,224"),
        ("torch:made_nets.py:nothing", [], "returns int; it is to return a module, or (module, inputs)"),
        ("torch:made_nets.py:nett", [], "has no function 'nett'; did you mean net?"),
        ("torch:net", [], "'net' names no function; give FILE:FUNCTION"),
        ("torch:torch.nn:Linear", [], "a colon: torch:torch.nn:Linear:in_features=...,out_features=..."),
        ("torch:made_nets.py:net:wide=8", [], "'wide'; arguments follow behind a colon: torch:made_nets.py:"),
        ("onnx:none.onnx", [], "there is no file none.onnx"),
        ("keras:none.keras", [], "there is no file none.keras"),
        ("onnx:made_nets.py", [], "ONNX Runtime cannot load made_nets.py"),
        ("tf:resnet", [], "'tf:resnet' names no model; give hf:NAME, timm:NAME"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_says_what_to_do(
    transformers: Any, folder: Path, word: str, shapes: list[str], part: str
) -> None:
    with pytest.raises(amanda.AmandaError) as raised:
        made(word, shapes)
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_shapes_that_do_not_fit_are_told_with_the_reason(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"does not run on input \(2, 5\): .*2x5 and 4x8.*--input-shape"):
        made("torch:made_nets.py:net", ["2,5"]).run()
    with pytest.raises(ModelError, match=r"does not run on x \(2, 5\): .*Expected: 8.*--input-shape"):
        made("model.onnx", ["2,5"]).run()


def test_errors_of_tools_stay_as_they_are(folder: Path) -> None:
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *inputs: 1 / 0))
    with pytest.raises(ZeroDivisionError), amanda.apply(tool):
        made("torch:made_nets.py:given").run()


@pytest.mark.parametrize("word", ["hf:llama", "timm:resnet50", "keras:MobileNetV2"])
def test_a_package_that_is_absent_is_named(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"hf": "transformers"}.get(word.partition(":")[0], word.partition(":")[0])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        ModelError, match=f"{word} needs {package}, which is not installed: pip install {package}"
    ):
        made(word)


def test_a_torchvision_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers hides the error under one of its own."""
    error = RuntimeError("operator torchvision::nms does not exist")
    outer = ModuleNotFoundError("Could not import module 'BertModel'")
    outer.__cause__ = error
    assert import_failure(outer) == (
        "operator torchvision::nms does not exist; torchvision does not fit this torch: install both from "
        "one index, or uninstall torchvision"
    )


def test_what_an_import_computes_is_not_counted(folder: Path) -> None:
    Path("importing.py").write_text(f"{FACTORIES}\nnumber = torch.ones(3).sum()\n")
    flops = FlopsTool()
    with amanda.apply(flops):
        subject = made("torch:importing.py:net", ["2,4"])
    assert {row[0] for row in flops.result.rows()} == {"construction"}
    with amanda.apply(flops):
        subject.run()
    assert flops.result.total("macs", "forward") == 2 * (4 * 8 + 8 * 2)


def test_some_models_cannot_do_all(folder: Path) -> None:
    with pytest.raises(ModelError, match="has no backward pass: leave --backward"):
        made("model.onnx", backward=True)
    with pytest.raises(ModelError, match="--device meta is for models of PyTorch"):
        made("model.onnx", device="meta")


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_absent_is_told_before_the_model_is_made(device: str) -> None:
    with pytest.raises(ModelError, match=rf"^--device {device}: .*; there are cpu, .*meta$"):
        made("torch:no_such_file.py:make", device=device)
    with pytest.raises(ModelError, match="an ONNX model has no options, was given a"):
        made("onnx:model.onnx:a=1")


def test_words_of_models_are_told_from_programs(folder: Path) -> None:
    words = ("hf:llama", "model.onnx", "none.onnx", "hf", "train.py", "C:x")
    assert [word for word in words if is_model(word)] == ["hf:llama", "model.onnx"]

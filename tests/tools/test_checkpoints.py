"""Pruned and quantised models in files: what is loaded computes what was saved, bit for bit."""

from __future__ import annotations

import copy
import json
import os
import stat
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import amanda
from amanda.errors import ArtefactError, FileError
from amanda.tools.checkpoints import load_compressed, save_compressed
from amanda.tools.prune import ChannelPruneTool, PruneTool
from amanda.tools.quantize import convert
from amanda.tools.quantize.weights import AWQTool, GPTQTool, NearestTool

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _torchao_is_loaded(example: Any) -> None:
    example("models").let_torchvision_load()
    import torchao  # noqa: F401


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 32))


class Tied(nn.Module):
    """Two layers with one weight, and an embedding with the weight of the head."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32, bias=False)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head.weight = self.embed.weight
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.second(self.first(x)) + self.embed(torch.tensor(5)))
        return out


class Residual(nn.Module):
    """Convolutions and a classifier whose channels can be removed."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.block, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.stem(x)).relu()
        out: torch.Tensor = self.head((x + self.block(x)).mean((2, 3)))
        return out


def outputs(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(x)
    return found


def quantised(model: nn.Module, tool: Any) -> nn.Module:
    """Return the model after a call in the scope of a tool, with a calibration if the tool has one."""
    x = X.to(next(model.parameters()).dtype)
    with amanda.apply(tool), torch.no_grad():
        if hasattr(tool, "calibrating"):
            with tool.calibrating():
                model(x)
        model(x)
    return model


def test_pruned_model(tmp_path: Path) -> None:
    model, tool = network(), PruneTool(0.5)
    with amanda.apply(tool):
        model(X)
    save_compressed(model, tmp_path / "model", tool.finalize(model))
    loaded = network()
    checkpoint = load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded), outputs(model))
    (result,) = checkpoint.results
    assert result["schema"] == "amanda.prune"
    assert result == json.loads(json.dumps(tool.result.to_dict()))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


def test_others_may_read_the_files_of_a_model_as_the_umask_lets_them(tmp_path: Path) -> None:
    model = network()
    tool = GPTQTool(bits=4, group_size=32)
    quantised(model, tool)
    before = os.umask(0o022)
    try:
        convert(model, tool, tmp_path / "converted")
        save_compressed(model, tmp_path / "saved", tool.finalize(model))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/*")}
    assert modes == dict.fromkeys(["config.json", "model.safetensors", "compressed.json"], 0o644)


def test_finalised_quantised_model(tmp_path: Path) -> None:
    model, tool = network(), GPTQTool(bits=4, group_size=32)
    save_compressed(model, tmp_path / "model", tool.finalize(quantised(model, tool)))
    loaded = network()
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make_tool",
    [
        partial(NearestTool, 8, None), partial(GPTQTool, 4, 32), partial(AWQTool, 4, 32),
        partial(NearestTool, 4, 32, symmetric=False),
    ],
    ids=["nearest8", "gptq4", "awq4", "asymmetric"],
)  # fmt: skip
def test_converted_model(tmp_path: Path, make_tool: Callable[[], Any], dtype: torch.dtype) -> None:
    tool, model = make_tool(), network().to(dtype)
    result = convert(quantised(model, tool), tool)
    save_compressed(model, tmp_path / "model", result)
    loaded = network().to(dtype)
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded, X.to(dtype)), outputs(model, X.to(dtype)))
    assert [type(value.data) for value in loaded.parameters()] == [type(v.data) for v in model.parameters()]
    assert {row[0] for row in result.rows()} == {
        name.removesuffix(".weight") for name, value in loaded.named_parameters()
        if not value.requires_grad
    }  # fmt: skip


@pytest.mark.parametrize("finish", ["finalize", "convert"])
def test_tied_weights_stay_tied(tmp_path: Path, finish: str) -> None:
    model, tool = Tied(), NearestTool(8, None)
    quantised(model, tool)
    result = tool.finalize(model) if finish == "finalize" else convert(model, tool)
    model.calls += 4
    save_compressed(model, tmp_path / "model", result)
    loaded = Tied()
    load_compressed(loaded, tmp_path / "model")
    assert loaded.head.weight is loaded.embed.weight
    assert loaded.second.weight is loaded.first.weight
    assert loaded.calls == 7
    assert torch.equal(outputs(loaded), outputs(model))
    assert (type(loaded.first.weight.data).__name__ == "Int8Tensor") == (finish == "convert")
    # A weight is in the file once.
    stored = sum(tensor.numel() for tensor in load_file(tmp_path / "model" / "model.safetensors").values())
    assert stored <= 32 * 64 + 64 * 64 + 4 * 64 + 32


def test_model_with_removed_channels(tmp_path: Path) -> None:
    images = torch.rand(2, 3, 8, 8)
    model, tool = Residual(), ChannelPruneTool(0.5)
    tool.prepare(model, images)
    save_compressed(model, tmp_path / "whole")
    save_compressed(tool.finalize(model, remove=True).model, tmp_path / "model", tool.result)
    loaded = Residual()
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded, images), outputs(model, images))
    assert loaded.stem.out_channels == loaded.norm.num_features == loaded.head.in_features == 8
    assert str(loaded) == str(model)
    # Nothing becomes smaller by itself.
    save_compressed(model, tmp_path / "without")
    with pytest.raises(ArtefactError, match=r"stem.weight is float32 8x3x3x3 in the folder and float32 16"):
        load_compressed(Residual(), tmp_path / "without")
    with pytest.raises(ArtefactError, match=r"stem.weight is float32 16x3x3x3 in the folder and float32 8"):
        load_compressed(loaded, tmp_path / "whole")


def _pruned(folder: Path, model: nn.Module | None = None) -> nn.Module:
    """Return a model of which channels were removed, after it was saved."""
    model, tool = model or Residual(), ChannelPruneTool(0.5)
    tool.prepare(model, torch.rand(2, 3, 8, 8))
    save_compressed(model, folder, tool.finalize(model, remove=True))
    return model


def test_removed_channels_are_for_the_same_model_alone(tmp_path: Path) -> None:
    pruned = _pruned(tmp_path / "model")
    for other in (Residual(classes=10), Residual(classes=3)):
        before, text = copy.deepcopy(other.state_dict()), str(other)
        with pytest.raises(ArtefactError, match=r"head.weight is float32 4x8 in the folder, 4x16 before"):
            load_compressed(other, tmp_path / "model")
        assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
        assert str(other) == text
    wider = Residual()
    wider.norm.num_features = 17
    with pytest.raises(ArtefactError, match=r"norm.num_features is 8 in the folder, 16 before .*, and 17 in"):
        load_compressed(wider, tmp_path / "model")
    # A model that has the saved shapes is one that was pruned before.
    load_compressed(copy.deepcopy(pruned), tmp_path / "model")


def test_channels_that_were_removed_twice(tmp_path: Path) -> None:
    images, model, results = torch.rand(2, 3, 8, 8), Residual(), []
    for _ in range(2):
        tool = ChannelPruneTool(0.5)
        tool.prepare(model, images)
        results.append(tool.finalize(model, remove=True))
    save_compressed(model, tmp_path / "model", *reversed(results))
    loaded = Residual()
    load_compressed(loaded, tmp_path / "model")
    assert loaded.stem.out_channels == 4
    assert torch.equal(outputs(loaded, images), outputs(model, images))
    with pytest.raises(ArtefactError, match="give the results of all"):
        save_compressed(model, tmp_path / "first", results[0])


def test_smaller_tensor_that_no_file_has(tmp_path: Path) -> None:
    model = Residual()
    for name in ("running_mean", "running_var"):
        model.norm.register_buffer(name, model.norm.get_buffer(name), persistent=False)
    with pytest.raises(ArtefactError, match=r"norm.running_mean of the model became smaller and is in no"):
        _pruned(tmp_path / "model", model)


def test_model_on_the_device_meta(tmp_path: Path) -> None:
    model, tool = network().bfloat16(), GPTQTool(4, 32)
    save_compressed(model, tmp_path / "model", convert(quantised(model, tool), tool))
    with torch.device("meta"):
        loaded = network()
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded, X.bfloat16()), outputs(model, X.bfloat16()))
    with torch.device("meta"):
        tied = Tied()
    save_compressed(Tied(), tmp_path / "tied")
    with pytest.raises(ArtefactError, match="scratch of the model is on the device meta"):
        load_compressed(tied, tmp_path / "tied")


def test_another_model_is_refused_and_stays(tmp_path: Path) -> None:
    save_compressed(network(), tmp_path / "model")
    other = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ArtefactError) as caught:
        load_compressed(other, tmp_path / "model")
    assert str(caught.value).startswith(
        f"{tmp_path / 'model'} is not of this Sequential: the folder has 2.bias, the model has not; "
    )
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    with pytest.raises(ArtefactError, match=r"give a torch\.nn\.Module"):
        load_compressed("model.onnx", tmp_path / "model")  # type: ignore[arg-type]


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 64
    path.write_bytes(raw)


def _replace(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors")


def _edit(change: Callable[[dict[str, Any]], Any], signed: bool = True) -> Callable[[Path], None]:
    """Return a function that changes a record; signed: with the checksum of the changed one."""

    def edit(folder: Path) -> None:
        record = json.loads((folder / "compressed.json").read_text())
        change(record)
        if signed:
            record.pop("record_checksum")
            record["record_checksum"] = zlib.crc32(json.dumps(record).encode())
        (folder / "compressed.json").write_text(json.dumps(record))

    return edit


def _set_block_size(size: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["packed"]["0.weight"].update(block_size=size)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_cut, r"model\.safetensors is no file of the tensors .*: it is not the file that compressed\.json"),
        (_flip, "damaged or replaced"),
        (_replace, "damaged or replaced"),
        (lambda folder: (folder / "compressed.json").write_text('{"schema"'), "it is no JSON"),
        (_edit(lambda record: record.pop("ties")), "it lacks 'ties'"),
        (_edit(lambda record: record.update(version=9)), "it is newer: update the distribution"),
        (
            _edit(lambda record: record["packed"]["0.weight"].update(type="os.system")),
            "are of type 'os.system'",
        ),
        (_edit(lambda record: record.update(packed=[])), "its packed is a list"),
        (_edit(lambda record: record["ties"].update({"2.weight": "gone"})), "it lacks 'gone'"),
        (_edit(lambda record: record["packed"].update(w={"type": "Int8Tensor"})), "it lacks 'w'"),
        (
            _edit(lambda record: record.update(sizes={"": None})),
            "sizes has None for '', which is not a size",
        ),
        (
            _edit(lambda record: record.update(sizes={"0.out_features": [96, -8]})),
            r"its sizes has \[96, -8\] for '0.out_features', which is not a size",
        ),
        (_edit(lambda record: record.update(sizes={"0.out_features": [96, 10**9]})), "which is not a size"),
        (
            _edit(lambda record: record.update(sizes={"0.out_features": [10**9, 10**8]})),
            "0.out_features is 100000000 in the folder, 1000000000 before channels were removed, and 96 in",
        ),
        (_edit(lambda record: record.update(sizes={"9.dim": [4, 2]})), "the model has no module 9"),
        (_edit(lambda record: record.update(shapes={"0.weight": [True]})), "which is not the extents"),
        (_edit(lambda record: record.update(ties={"2.weight": 3})), "which is not the name of a tensor"),
        (_edit(lambda record: record.update(results=[3])), "its results have 3, which is no result"),
        *(
            (
                _edit(_set_block_size(size)),
                "has the block_size .* does not fit",
            )
            for size in ([1, 32], [64], [1, 7], [1, -64], [0, 64], None, [1, 10**9])
        ),
        (_edit(lambda record: record["versions"].update(torch="0"), signed=False), "damaged or edited"),
    ],
)
def test_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], Any], why: str) -> None:
    model, tool = network(), NearestTool(8, None)
    save_compressed(model, tmp_path / "model", convert(quantised(model, tool), tool))
    damage(tmp_path / "model")
    loaded = network()
    before = copy.deepcopy(loaded.state_dict())
    with pytest.raises(ArtefactError, match=why):
        load_compressed(loaded, tmp_path / "model")
    assert all(torch.equal(value, before[name]) for name, value in loaded.state_dict().items())


def test_folders_are_missing_or_there_already(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"compressed\.json cannot be read"):
        load_compressed(network(), tmp_path / "model")
    save_compressed(network(), tmp_path / "model")
    with pytest.raises(ArtefactError, match="is there already; force=True replaces it"):
        save_compressed(network(), tmp_path / "model")
    model = network()
    save_compressed(model, tmp_path / "model", force=True)
    loaded = network()
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded), outputs(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_checkpoint_for_other_programs_is_named_as_such(tmp_path: Path) -> None:
    model, tool = network(), NearestTool(8, None)
    convert(quantised(model, tool), tool, tmp_path / "model")
    with pytest.raises(ArtefactError, match="it is a checkpoint for vLLM or transformers"):
        load_compressed(network(), tmp_path / "model")


def test_what_is_no_tensor_is_not_saved(tmp_path: Path) -> None:
    class Stateful(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 1}

    with pytest.raises(ArtefactError, match=r"the state_dict of this Stateful has _extra_state"):
        save_compressed(Stateful(2, 2), tmp_path / "model")
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.eye(2).to_sparse())
    with pytest.raises(ArtefactError, match=r"weight of the model is a Tensor \(torch.sparse_coo, cpu\)"):
        save_compressed(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("names", [["notes.txt"], ["model.safetensors"], ["compressed.json", "notes.txt"]])
def test_force_deletes_no_files_of_others(tmp_path: Path, names: list[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).write_text("text")
    with pytest.raises(ArtefactError, match="save_compressed has not written"):
        save_compressed(network(), folder, force=True)
    assert sorted(path.name for path in folder.iterdir()) == names
    (tmp_path / "file").write_text("text")
    with pytest.raises(ArtefactError, match="file is no folder"):
        save_compressed(network(), tmp_path / "file", force=True)


def test_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    save_compressed(network(), tmp_path / "model")
    (tmp_path / "latest").symlink_to("model")
    model = network()
    assert save_compressed(model, tmp_path / "latest", force=True) == tmp_path / "latest"
    assert (tmp_path / "latest").is_symlink()
    loaded = network()
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(outputs(loaded), outputs(model))


def _with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("values", buffer)
    return model


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.quint8], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_types_that_safetensors_lacks(tmp_path: Path, dtype: torch.dtype) -> None:
    if dtype is torch.quint8:
        buffer = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, dtype)
    else:
        buffer = torch.ones(2).to(dtype)
    with pytest.raises(ArtefactError, match=r"values of the model is \w+ 2, a type that safetensors"):
        save_compressed(_with_buffer(buffer), tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("saved", "present"),
    [
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.int64)),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2)),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)),
        (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)),
    ],
)
def test_elements_of_another_kind_are_refused(
    tmp_path: Path, saved: torch.Tensor, present: torch.Tensor
) -> None:
    save_compressed(_with_buffer(saved), tmp_path / "model")
    with pytest.raises(ArtefactError, match=r"values is \w+ 2 in the folder and \w+ 2 in the model"):
        load_compressed(_with_buffer(present), tmp_path / "model")
    same = _with_buffer(torch.zeros_like(saved))
    load_compressed(same, tmp_path / "model")
    assert torch.equal(same.get_buffer("values"), saved)


def test_conjugated_view_is_saved_as_numbers(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    save_compressed(_with_buffer(numbers.conj()), tmp_path / "model")
    loaded = _with_buffer(torch.zeros_like(numbers))
    load_compressed(loaded, tmp_path / "model")
    assert torch.equal(loaded.get_buffer("values"), numbers.conj())


def test_layer_without_a_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"weight of the model has no shape \(UninitializedParameter\)"):
        save_compressed(nn.LazyLinear(2), tmp_path / "lazy")
    save_compressed(nn.Linear(2, 2), tmp_path / "model")
    with pytest.raises(ArtefactError, match=r"weight of the model has no shape \(UninitializedParameter\)"):
        load_compressed(nn.LazyLinear(2), tmp_path / "model")

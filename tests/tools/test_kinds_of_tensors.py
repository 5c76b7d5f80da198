"""Every analysis tool on programs whose tensors are not plain, or that use autograd in rarer ways."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import amanda

TOOLS = ("trace", "flops", "profile", "stats", "dump", "nan", "coverage", "effective_path")
PROGRAMS: list[Callable[[], list[Tensor]]] = []
Program = Callable[[], list[Tensor]]


def program(made: Program) -> Program:
    """One to be run bare and under each tool."""
    PROGRAMS.append(made)
    return made


class Marked(torch.Tensor):
    """A subclass of tensors, of another module than torch's."""


@program
def sparse_product() -> list[Tensor]:
    left, right = torch.eye(4).to_sparse().requires_grad_(), torch.rand(4, 3, requires_grad=True)
    product = torch.sparse.mm(left, right)
    product.sum().backward()
    return [product, right.grad]  # type: ignore[list-item]


@program
def compressed_rows() -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the layout beta
        return [torch.eye(4).to_sparse_csr() @ torch.rand(4, 3)]


@program
def sparse_gradient_of_an_embedding() -> list[Tensor]:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    rows = table(torch.tensor([1, 2, 2]))
    rows.sum().backward()
    optimizer.step()
    return [rows, table.weight]


@program
def nested() -> list[Tensor]:
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        strided = torch.nested.nested_tensor(parts) * 2
    return [jagged.values(), torch.nested.to_padded_tensor(strided, 0.0)]


@program
def padded_sequences_on_the_fast_path() -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[False, False, False, True, True], [False] * 5])
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls nested tensors a prototype
        return [encoder(torch.rand(2, 5, 8), src_key_padding_mask=padding)]


@program
def without_memory() -> list[Tensor]:
    made = nn.Linear(8, 2, device="meta")(torch.rand(2, 8, device="meta"))
    return [torch.zeros(made.shape)]


@program
def freed_memory() -> list[Tensor]:
    # As FSDP frees parameters between their uses; large enough for memory that the allocator gives back.
    weight = torch.ones(1 << 20)
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    parameter, rows = nn.Parameter(weight.detach()), weight.view(1024, 1024)
    weight.untyped_storage().resize_(size)
    weight.fill_(2.0)
    return [parameter * 2, rows + 1]


@program
def eight_bits() -> list[Tensor]:
    values = torch.rand(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is to drop its quantized tensors
        quantized = torch.quantize_per_tensor(values, 0.1, 10, torch.quint8).dequantize()
    return [quantized, values.to(torch.float8_e4m3fn).float()]


@program
def a_subclass() -> list[Tensor]:
    x = torch.rand(3).as_subclass(Marked).requires_grad_()
    total = (x * 2).sum()
    total.backward()
    return [total.as_subclass(Tensor), x.grad.as_subclass(Tensor)]  # type: ignore[union-attr]


@program
def nothing() -> list[Tensor]:
    layer = nn.Linear(8, 2)
    rows = layer(torch.rand(0, 8))
    rows.sum().backward()
    return [rows, layer.weight.grad]  # type: ignore[list-item]


@program
def spectra() -> list[Tensor]:
    x = torch.randn(8, dtype=torch.complex64, requires_grad=True)
    spectrum = torch.fft.fft(x)
    spectrum.abs().sum().backward()
    return [spectrum, x.grad]  # type: ignore[list-item]


@program
def gradients_of_gradients() -> list[Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.rand(3, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.norm().backward()
    return [slope, *[one.grad for one in model.parameters() if one.grad is not None]]


@program
def packed_sequences() -> list[Tensor]:
    packed = nn.utils.rnn.pack_padded_sequence(torch.rand(5, 2, 4), [5, 3])
    made, state = nn.GRU(4, 8)(packed)
    made.data.sum().backward()
    return [made.data, state]


@program
def writes_through_views() -> list[Tensor]:
    x = torch.rand(4, 4, requires_grad=True)
    y = x * 2
    y[0] += 1
    y[:, 1].mul_(3)
    y.view(-1)[3] = 0.0
    y.sum().backward()
    return [y, x.grad]  # type: ignore[list-item]


@program
def autocast() -> list[Tensor]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = model(x)
    made.float().sum().backward()
    return [made, *[one.grad for one in model.parameters()]]  # type: ignore[list-item]


def run(what: Program) -> list[Tensor]:
    torch.manual_seed(0)
    return [one.detach().clone() for one in what()] + [torch.get_rng_state()]


@pytest.mark.parametrize("what", PROGRAMS, ids=lambda one: one.__name__)
def test_all_tools_together_change_nothing_and_tell(what: Program, tmp_path: Path) -> None:
    bare = run(what)
    tools = [amanda.load_tool(name, **({"folder": tmp_path} if name == "dump" else {})) for name in TOOLS]
    with amanda.apply(*tools):
        seen = run(what)
    assert all(torch.equal(one, other) for one, other in zip(seen, bare, strict=True))
    for tool in tools:
        json.dumps(tool.result.to_dict(), allow_nan=False)
        assert str(tool.result)
        assert tool.result._repr_html_()


CHANGING: dict[str, dict[str, object]] = {
    "prune": {"sparsity": 0.5},
    "quantize": {"method": "dynamic"},
    "rewrite": {"rules": ["fold_batch_norm"]},
    "remat": {"budget": 1000},
}


@pytest.mark.parametrize("name", CHANGING)
def test_tools_that_change_values_leave_alone_what_they_cannot_change(name: str) -> None:
    for what in PROGRAMS:
        with amanda.apply(amanda.load_tool(name, **CHANGING[name])):
            run(what)


def test_a_layer_that_gets_its_memory_later_is_pruned_then() -> None:
    layer, tool = nn.Linear(8, 4, device="meta"), amanda.load_tool("prune", sparsity=0.5)
    with amanda.apply(tool):
        layer(torch.rand(2, 8, device="meta"))
        layer.to_empty(device="cpu")
        nn.init.normal_(layer.weight)
        layer(torch.rand(2, 8))
    assert [row["sparsity"] for row in tool.result.to_dict()["rows"]] == [0.5]


READERS = {
    "stats": {}, "dump": {"folder": "tensors"}, "quantize": {"method": "dynamic"}, "prune": {"sparsity": 0.5},
    "inject": {"count": 1}, "effective_path": {},
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_of_tensors_can_change_its_size_after_a_tool_has_read_it(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sharded training frees parameters; numpy takes that from a tensor whose memory it shares."""
    monkeypatch.chdir(tmp_path)
    model, x = nn.Linear(4, 2).to(dtype), torch.rand(3, 4, dtype=dtype)
    with amanda.apply(amanda.load_tool(name, **READERS[name])):
        model(x).sum().backward()
    for tensor in (x, *model.parameters()):
        assert tensor.untyped_storage().resizable()


class Own(nn.Parameter):
    """A subclass of parameters, as libraries have for weights of their own."""


@pytest.mark.parametrize("name", ["prune", "quantize", "dynamic_channel_prune"])
def test_subclasses_of_parameters_and_of_inputs_are_served_as_plain_ones(name: str) -> None:
    def outcome(parameter: Callable[[Tensor], Tensor], kind: type[Tensor]) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        for layer in (model[0], model[3]):
            layer.weight = parameter(layer.weight.data)
        tool = amanda.load_tool(name, **CHANGING.get(name, {}))
        with amanda.apply(tool):
            y = model(torch.rand(2, 3, 4, 4).as_subclass(kind))
            y.sum().backward()
        assert tool.result.rows()
        return y.detach().as_subclass(Tensor), model[0].weight.grad

    plain = outcome(nn.Parameter, Tensor)
    for parameter, kind in ((Own, Tensor), (nn.Parameter, Marked), (Own, Marked)):
        made = outcome(parameter, kind)
        assert torch.equal(made[0], plain[0])
        assert made[1] is not None
        assert plain[1] is not None
        assert torch.equal(made[1].as_subclass(Tensor), plain[1])

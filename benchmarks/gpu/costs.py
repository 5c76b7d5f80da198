"""Cost per op, and of whole tools on a language model that trains and generates."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from _cases import Cases
from _device import DEVICE, placed, timed
from _measure import QUICK, controls
from _others import FunctionMode, MonkeyPatch
from _tools import Inserting, chosen, scopes
from copies import copied
from torch import nn

import amanda
from amanda.testing import EqualCopies

PER_OP = ("a + b", "x.relu()", "F.linear(x, w, b)", "F.linear, w needs a gradient")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128_256,
         "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
"""The sizes of Llama 3.2 1B."""
TOKENS, NEW = (16, 4) if QUICK else (1024, 16)
TOOLS: dict[str, Callable[[], amanda.Tool]] = {
    **chosen("empty tool", "empty tool, backward too", "before + after"),
    "equal new values": lambda: EqualCopies(copied),
    **{name: functools.partial(amanda.load_tool, name) for name in ("flops", "profile", "nan", "stats")},
}


def stage(cases: Cases) -> None:
    """Measure ops, then the model."""
    for name in PER_OP[: 1 if QUICK else None]:
        cases(f"per op: {name}", per_op, name)
    cases(f"Llama, a training step of {TOKENS} tokens", trained)
    cases(f"Llama, {NEW} new tokens", generated)


def trained() -> dict[str, Any]:
    """Return seconds of a forward and backward pass."""
    model = placed(llama)
    ids = placed(lambda: torch.randint(10, model.config.vocab_size, (1, TOKENS)))

    def step() -> None:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    return under_tools(step, 15)


def generated() -> dict[str, Any]:
    """Return seconds of text that grows token by token."""
    model = placed(llama).eval()
    ids = placed(lambda: torch.randint(10, model.config.vocab_size, (1, 16)))
    told = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "use_cache": True}
    return under_tools(lambda: model.generate(ids, **told), 15)


def per_op(name: str) -> dict[str, Any]:
    """Return nanoseconds of the processor for one op: variant -> one value a round."""
    with DEVICE:
        ops = importlib.import_module("ops")
        program, _ = ops.programs()[name]
    tools = {one: make for one, make in ops.TOOLS.items() if not one.startswith("backward")}
    patch = MonkeyPatch()
    peers = {"TorchFunctionMode": FunctionMode, "monkey-patch": lambda: patch}
    return {"ns": ops.per_op(program, controls() | scopes(tools) | peers, 3)}


def llama() -> nn.Module:
    """Return a Llama in bfloat16, with random weights."""
    transformers = importlib.import_module("transformers")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        config = transformers.LlamaConfig(
            **(SMALL if QUICK else LARGE), tie_word_embeddings=True, pad_token_id=0, eos_token_id=None
        )
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    finally:
        torch.set_default_dtype(before)


def under_tools(step: Callable[[], object], seconds: float) -> dict[str, Any]:
    """Return seconds of a step bare and under each tool, and the ops that it executes."""
    calls: list[None] = []
    with amanda.apply(Inserting("before", routine=lambda *_: calls.append(None), select=[])):
        step()
    return {"ops": len(calls), **timed(step, controls() | scopes(TOOLS), seconds, 3)}

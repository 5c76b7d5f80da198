"""Programs whose shapes change: text that grows by a token a step, experts whose tokens the data choose."""

import time
from collections.abc import Callable
from typing import Any

import torch
from _measure import BARE, QUICK, Times, pin_to_one_core, progress, quiet, seconds_of
from _models import let_torchvision_load
from _tools import FORWARD, Inserting, Make

import amanda
from amanda.tools.flops import FlopsTool

TOOLS: dict[str, Make] = {
    "an empty routine": Inserting,
    "before + after": lambda: Inserting(*FORWARD),
    "flops": FlopsTool,
}
LAYERS, TOKENS, STEPS, ROUNDS = (1, 8, 2, 1) if QUICK else (4, 64, 12, 5)
SIZES = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def generating() -> Callable[[], None]:
    """Return a run of a small Llama, which generates text with a cache of keys and values."""
    let_torchvision_load()
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **SIZES)).eval()
    prompt = torch.randint(1, 1000, (1, 8))
    return lambda: model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)


def training() -> Callable[[], None]:
    """Return training steps of a small Mixtral, whose experts run one after the other."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(num_hidden_layers=2, num_local_experts=8, experts_implementation="eager", **SIZES)
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def run() -> None:
        for _ in range(STEPS):
            tokens = torch.randint(1, 1000, (2, 64))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def benchmark() -> dict[str, Any]:
    """Return seconds of programs by variant: bare, and the first three runs under each new tool."""
    pin_to_one_core()
    torch.manual_seed(0)
    return {
        "programs": {
            f"{TOKENS} tokens of a Llama of {LAYERS} layers": measured(generating()),
            f"{STEPS} steps of a Mixtral of 2 layers": measured(training()),
        }
    }


def measured(program: Callable[[], None]) -> Times:
    """Return seconds of processor time by variant; in each round a tool is new."""
    found: Times = {}
    for number in range(1 if QUICK else ROUNDS + 1):
        progress(f"  round {number}")
        taken = {BARE: seconds(program)}
        for name, make in TOOLS.items():
            tool = make()
            for run in ("first", "second", "third"):
                with quiet(), amanda.apply(tool):
                    taken[f"{name}, {run} run"] = seconds(program)
        for name, one in taken.items() if number or QUICK else ():  # the first round warms up
            found.setdefault(name, []).append(one)
    return found


def seconds(program: Callable[[], None]) -> float:
    """Return the processor time of one run in this thread."""
    return seconds_of(program, time.thread_time)

"""Calls of everything that users call with options, each option with values of wrong classes."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from wrong_values import TEXTS, WRONG, allows

import amanda
from amanda.errors import AmandaError
from amanda.options import REQUIRED, Option, options_of, shown
from amanda.plugins import tool_class
from amanda.tools.command import SpecError, ToolSpec
from amanda.tools.command import options_of as text_options_of
from amanda.tools.flops import FlopsResult
from amanda.tools.inject import InjectTool
from amanda.tools.results import Result
from amanda.tools.rewrite import Op
from amanda.tools.search import SearchTool
from amanda.tools.steps import Steps

TOOLS = {plugin.name: tool_class(plugin.name) for plugin in amanda.list_tools()}

NOT_OPTIONS = {
    # Made by the core.
    "amanda": "Action ActionType InstrumentationPoint OpContext Report Scope ShapeTally Tally",
    "amanda.tools.libraries": "*",
    "amanda.tools.command": "*",  # the command line itself, whose texts are below
    "amanda.tools.diff": "command", "amanda.tools.sweep": "command", "amanda.tools.view": "main",
    "amanda.tools.notebook": "*",
    # Called by routines and by authors of tools, at each execution of an op.
    "amanda.tools.axes": "*", "amanda.tools.dataflow": "*", "amanda.tools.kit": "*",
    "amanda.tools.onnx_graph": "*", "amanda.tools.rerun": "*", "amanda.tools.weights": "*",
    "amanda.tools.trials": "Outcome PerProcess Progress TrialFile check_number dominates run_trials",
    "amanda.tools.live": "log_tool scalars_of",
    "amanda.tools.inject": "MemorySnapshot bits_of from_bytes to_bytes",
    "amanda.tools.mapping": """InstalledEntries are_transposed backend_of distributed is_partial itemsize
        local product_of share spatial_axes torch_dtype torch_shape torch_word weight_gradient whole""",
    "amanda.tools.steps": "execution_number",
    "amanda.tools.stats": "Accumulator Sketch numbers",
    "amanda.tools.quantize": """choose_qparams extremes fake_quantize fake_quantize_gradient gradient_scale
        lsq_gradients lsq_plus_scale lsq_quantize lsq_scale quantized_states sqnr convert""",
    "amanda.tools.prune.channels": """concatenated convolution extents_of fresh linear same_channels
        shaped size_attributes""",
    "amanda.tools.quantize.weights": "dequantized model_bytes quantized save_compressed convert",
    # Readers and writers of results, for authors of tools.
    "amanda.tools.results": """Mergeable amount by_rank can_merge check_file check_schema check_size
        count_of field_values folded in_words is_lock locked made_of not_met parsing read_json read_npz
        read_text reading restored shortened to_json""",
    "amanda.tools.select": """ModulePaths Paths Patterns SelectOptions as_remarks leave_construction listed
        unmatched""",
    # What tools make of a program, not what they are asked for.
    "amanda.tools.effective_path": "EffectivePath", "amanda.tools.rewrite": "Match OpCall",
    "amanda.tools.search": "Controller Site", "amanda.tools.trace": "GraphSoFar",
    "amanda.tools.pytest": "Traced", "amanda.tools.models": "is_model",
}  # fmt: skip
"""Public names that are no options of users."""


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what users call, by name: tools by the names of their entry points."""
    yield from TOOLS.items()
    import amanda.tools

    modules = [
        one.name
        for one in pkgutil.walk_packages(amanda.tools.__path__, "amanda.tools.")
        if one.ispkg and "._" not in one.name
    ]
    for module in ["amanda", *modules]:
        left = NOT_OPTIONS.get(module, "").split()
        for name in [] if left == ["*"] else getattr(importlib.import_module(module), "__all__", []):
            target = getattr(importlib.import_module(module), name)
            is_made = isinstance(target, type) and (
                issubclass(target, (Exception, tuple, Result)) or dataclasses.is_dataclass(target)
            )
            is_called = isinstance(target, type) or inspect.isfunction(target)
            if is_called and name not in left and not is_made and target not in TOOLS.values():
                yield f"{module}.{name}", target


PUBLIC = dict(public())
WRONG["a tensor"] = lambda: torch.tensor(0.5)
WRONG["a tensor of several"] = lambda: torch.ones(2, 2)


class _Space(SearchTool):
    @property
    def space(self) -> dict[str, tuple[str, ...]]:
        return {"a": ("keep", "relu")}


REQUIRED_VALUES: Mapping[str, Callable[[str], Any]] = {
    "tool": lambda name: InjectTool() if "Campaign" in name else _Space(),
    "metric": lambda name: lambda: 1.0, "evaluate": lambda name: lambda: 1.0,
    "make": lambda name: lambda level: amanda.Tool(), "levels": lambda name: [1, 2],
    "module": lambda name: "a", "candidates": lambda name: ["keep", "skip"], "rules": lambda name: [],
    "steps": lambda name: Steps(), "pattern": lambda name: Op("relu"),
    "function": lambda name: lambda *inputs: None, "func": lambda name: lambda *inputs: None,
    "weight": lambda name: np.ones((4, 8)), "step": lambda name: 1, "begin": lambda name: 0,
    "end": lambda name: 9, "initial": lambda name: 0.1, "final": lambda name: 0.9,
    "successes": lambda name: 1,
    "trials": lambda name: 2, "axes": lambda name: [0], "grid": lambda name: None, "name": lambda name: "nan",
    "type": lambda name: "relu", "wanted": lambda name: {}, "flops": lambda name: FlopsResult([]),
    "model": lambda name: (lambda *inputs: None) if "summary" in name else "there-is-no.onnx",
    "out": lambda name: "copy.onnx", "word": lambda name: "hf:none",
    "theta": lambda name: 0.5, "contributions": lambda name: np.ones((2, 2)),
    "value": lambda name: np.ones(2),
}  # fmt: skip
"""Values of arguments without a default, by name."""


def with_required(name: str, target: Callable[..., Any], option: str) -> dict[str, Any]:
    """Return right values of the arguments that a call needs besides one."""
    given = {
        other.name: REQUIRED_VALUES.get(other.name, lambda name: None)(name)
        for other in options_of(target).values()
        if other.default is REQUIRED and other.name not in (option, "self")
    }
    if name in ("patch", "patch_sweep"):
        given.setdefault("module", "a")
    return {key: value for key, value in given.items() if key != option}


def call(target: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a target with arguments by name, those that are by position alone by position."""
    parameters = inspect.signature(target).parameters.values()
    alone = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
    return target(*(given.pop(name) for name in alone), **given)


def trouble(name: str, target: Callable[..., Any], option: Option, value: Any) -> str:
    """Return what is wrong with what a call does with a value; "" if nothing is."""
    is_allowed = allows(option.annotation, value)
    if is_allowed and inspect.isfunction(target):
        return ""  # what the function does with the value is for tests of its own
    # Arguments are compared in the order in which they are given.
    given, begun = {option.name: value, **with_required(name, target, option.name)}, time.perf_counter()
    try:
        call(target, given)
    except AmandaError as error:
        is_named = option.name in str(error) and shown(value)[:40] in str(error)
        return "" if is_allowed or is_named else f"is not named in: {error}"
    except Exception as error:
        return f"is a raw {type(error).__name__}: {error}"
    taken = time.perf_counter() - begun
    return "was accepted" if not is_allowed else f"took {taken} s" if taken > 10 else ""


def calls(name: str) -> Iterator[tuple[str, str]]:
    """Call a public name with each wrong value of each option; yield the call and its trouble, or ""."""
    for option in options_of(PUBLIC[name]).values():
        if option.name != "self" and option.annotation not in (Any, REQUIRED):
            for label, make in WRONG.items():
                yield f"{option.name}: {label}", trouble(name, PUBLIC[name], option, make())


def text_calls(name: str) -> Iterator[tuple[str, str]]:
    """Make a tool as the command line does with each text for each option; yield as `calls` does."""
    for option in text_options_of(TOOLS[name]).values():
        needed = {key: str(value) for key, value in NEEDS.get(name, {}).items() if key != option.name}
        for text in TEXTS:
            spec = ToolSpec(name, {option.name: [text], **({} if name == "search" else needed)})
            why = ""
            try:
                spec.make(Steps())
            except SpecError as error:
                is_named = f"tool {name}" in str(error) and option.name in str(error)
                why = "" if is_named else f"is not named in: {error}"
            except Exception as error:
                why = f"is a raw {type(error).__name__}: {error}"
            else:
                why = "" if allows(option.type, option.read([text])) else "was accepted"
            yield f"{option.name}={text}", why


NEEDS: Mapping[str, Mapping[str, Any]] = {
    "patch": {"module": "0", "scale": 2.0}, "mapping": {"rules": []}, "search": {"choices": "relu=keep|tanh"},
}  # fmt: skip
"""What a tool needs besides the option that is tried."""

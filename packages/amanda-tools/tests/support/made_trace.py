"""A trace of a transformer that never ran: as many ops as a test wants, in the schema of `amanda.trace`."""

from __future__ import annotations

from typing import Any

FILE = "model.py"


class Trace:
    """Ops and tensors in the order in which they would be recorded."""

    def __init__(self) -> None:
        self.ops: list[dict[str, Any]] = []
        self.tensors: list[dict[str, Any]] = []

    def tensor(
        self, shape: list[int], kind: str, producer: int | None = None, name: str | None = None
    ) -> int:
        size = 4
        for extent in shape:
            size *= extent
        self.tensors.append(
            {"index": len(self.tensors), "shape": shape, "dtype": "float32", "device": "cpu", "bytes": size,
             "kind": kind, "name": name, "producer": producer, "consumers": [], "alias_of": None}
        )  # fmt: skip
        return len(self.tensors) - 1

    def op(
        self, type_: str, module: str, line: int, inputs: list[int], shape: list[int], *,
        phase: str = "forward", forward: int | None = None,
    ) -> int:  # fmt: skip
        """Record an op; its output's index."""
        index = len(self.ops)
        for tensor in inputs:
            self.tensors[tensor]["consumers"].append(index)
        kind = "activation" if phase == "forward" else "gradient"
        made = self.tensor(shape, kind, producer=index)
        self.ops.append(
            {"index": index, "id": f"{index * 0x9E3779B97F4A7C15 % 2**64:016x}", "phase": phase,
             "type": type_, "name": type_, "framework": 0, "module": module, "source": f"{FILE}:{line}",
             "inputs": inputs, "outputs": [made], "writes": [], "forward": forward, "calls": 1,
             "in_place": False, "attributes": {}}
        )  # fmt: skip
        return made

    def content(self) -> dict[str, Any]:
        return {
            "schema": "amanda.trace", "version": 1, "frameworks": ["pytorch/2.13.0/eager"], "executions": 8,
            "dropped": 0, "ops": self.ops, "tensors": self.tensors, "rows": [],
        }  # fmt: skip


def transformer(layers: int, width: int = 64, backward: bool = True) -> dict[str, Any]:
    """A trace of so many layers, each of 17 forward ops, and as many backward ones."""
    trace = Trace()
    x = trace.tensor([8, 128, width], "input", name="x")
    for layer in range(layers):
        x = _layer(trace, f"encoder.layer.{layer}", x, width)
    x = _linear(trace, "head", 90, x, width, 2)
    x = trace.op("cross_entropy", "", 95, [x], [])
    if backward:
        gradient = trace.tensor([], "input", name=None)
        for op in reversed(trace.ops.copy()):
            shape = trace.tensors[op["inputs"][0]]["shape"]
            saved = op["inputs"][0]
            line = int(op["source"].split(":")[1])
            gradient = trace.op(
                f"{op['type']}_backward", op["module"], line, [gradient, saved], shape,
                phase="backward", forward=op["index"],
            )  # fmt: skip
    return trace.content()


def _layer(trace: Trace, module: str, x: int, width: int) -> int:
    shape = [8, 128, width]
    h = trace.op("layer_norm", f"{module}.norm1", 20, [x], shape)
    attention = f"{module}.attention"
    parts = []
    for name in ("query", "key", "value"):
        one = _linear(trace, f"{attention}.{name}", 31, h, width, width)
        one = trace.op("reshape", attention, 32, [one], [8, 128, 4, width // 4])
        parts.append(trace.op("transpose", attention, 32, [one], [8, 4, 128, width // 4]))
    h = trace.op("scaled_dot_product_attention", attention, 35, parts, [8, 4, 128, width // 4])
    h = trace.op("reshape", attention, 36, [h], shape)
    h = _linear(trace, f"{attention}.out", 37, h, width, width)
    x = trace.op("add", module, 41, [x, h], shape)
    h = trace.op("layer_norm", f"{module}.norm2", 20, [x], shape)
    h = _linear(trace, f"{module}.mlp.up", 51, h, width, 4 * width)
    h = trace.op("gelu", f"{module}.mlp", 52, [h], [8, 128, 4 * width])
    h = _linear(trace, f"{module}.mlp.down", 53, h, 4 * width, width)
    return trace.op("add", module, 42, [x, h], shape)


def _linear(trace: Trace, module: str, line: int, x: int, inner: int, outer: int) -> int:
    weight = trace.tensor([outer, inner], "parameter", name=f"{module}.weight")
    return trace.op("linear", module, line, [x, weight], [8, 128, outer])


def flops_of(trace: dict[str, Any]) -> dict[str, Any]:
    """A table of the schema `amanda.flops` for the ops of a trace."""
    rows = [
        {"phase": op["phase"], "type": op["type"], "module": op["module"], "source": op["source"], "calls": 1,
         "FLOPs": 1000 * (op["index"] % 97), "bytes": 64 * op["index"]}
        for op in trace["ops"]
    ]  # fmt: skip
    columns = [
        *({"name": name, "total": False, "unit": ""} for name in ("phase", "type", "module", "source")),
        {"name": "calls", "total": True, "unit": ""}, {"name": "FLOPs", "total": True, "unit": ""},
        {"name": "bytes", "total": True, "unit": "B"},
    ]  # fmt: skip
    return {
        "schema": "amanda.flops", "version": 1, "title": "FLOPs", "notes": ["Two FLOPs are a MAC."],
        "columns": columns, "rows": rows,
    }  # fmt: skip

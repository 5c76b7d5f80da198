"""Integers for handwritten digits, in an ONNX file that ONNX Runtime and OpenVINO run.

    python examples/quantized_digits.py

The script trains a PyTorch network, exports it, calibrates a QuantizeTool with 200 digits, writes a file with
integers and runs it in each runtime that is installed, on 597 digits that training did not see.
"""

import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from sklearn.datasets import load_digits
from torch import nn

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.quantize import QuantizeTool, convert

TYPES = ["conv*", "linear", "matmul", "softmax"]
DIGITS = load_digits()
IMAGES, TARGET = DIGITS.images[:, None].astype(np.float32) / 16, DIGITS.target
TRAINED, CALIBRATING, TESTED = slice(0, 1200), slice(0, 200), slice(1200, None)
Compute = Callable[[np.ndarray], np.ndarray]


class Row(NamedTuple):
    """A way to run a network.  size: bytes of its file."""

    name: str
    size: int
    compute: Compute


def calibrated(run: Compute) -> tuple[QuantizeTool, np.ndarray]:
    """Return a tool that was calibrated with a program, and outputs of the simulation."""
    tool = QuantizeTool(type=TYPES)
    with amanda.apply(tool):
        with tool.calibrating():
            run(IMAGES[CALIBRATING])
        return tool, run(IMAGES[TESTED])


def files_of_network(folder: Path, epochs: int) -> tuple[np.ndarray, list[Row]]:
    """Return outputs of the simulation, and the ONNX files."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64),
        nn.ReLU(), nn.Linear(64, 10), nn.Softmax(-1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    x, y = torch.from_numpy(IMAGES[TRAINED]), torch.from_numpy(TARGET[TRAINED])
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(30):
            optimizer.zero_grad()
            nn.functional.nll_loss(model(x[rows]).log(), y[rows]).backward()
            optimizer.step()
    path, example = folder / "float.onnx", (x[:2],)
    sizes = ({0: torch.export.Dim("n")},)
    torch.onnx.export(
        model.eval(), example, path, dynamo=True, external_data=False, dynamic_shapes=sizes, verbose=False
    )
    session = onnxruntime.InferenceSession(path, session_options())
    name = session.get_inputs()[0].name
    tool, simulated = calibrated(lambda x: session.run(None, {name: x})[0])
    result = convert(path, tool, folder / "integers.onnx")
    files = {"float32": path, "8 bits": result.model}
    runtimes = {"ONNX Runtime": onnx}
    if find_spec("openvino") is not None:
        runtimes["OpenVINO"] = openvino
    return simulated, [
        Row(f"{runtime}, {kind}", one.stat().st_size, load(one))
        for runtime, load in runtimes.items() for kind, one in files.items()
    ]  # fmt: skip


def onnx(path: Path) -> Compute:
    """Return an ONNX file as a function of one thread of ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name
    return lambda x: np.asarray(session.run(None, {name: x})[0])


def openvino(path: Path) -> Compute:
    """Return an ONNX file as a function of one thread of OpenVINO."""
    from openvino import Core

    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = Core().compile_model(path, "CPU", settings)
    return lambda x: np.asarray(compiled(x)[0])


def milliseconds(rows: list[Row], rounds: int) -> list[float]:
    """Return the median time of each for 64 digits; they run in turn."""
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds + 1):
        for row, found in zip(rows, times, strict=True):
            start = time.perf_counter()
            row.compute(IMAGES[:64])
            found.append(1e3 * (time.perf_counter() - start))
    return [median(found[1:]) for found in times]


def percent(outputs: np.ndarray) -> float:
    """Return the accuracy."""
    return float(100 * (outputs.argmax(1) == TARGET[TESTED]).mean())


def main(epochs: int = 10, rounds: int = 30) -> None:
    """Print the table."""
    print("| | accuracy % | simulated | kB | ms, 64 digits |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        simulated, rows = files_of_network(Path(name), epochs)
        for row, took in zip(rows, milliseconds(rows, rounds), strict=True):
            told = f"{percent(simulated):.2f}" if row.name.endswith("8 bits") else ""
            found = percent(row.compute(IMAGES[TESTED]))
            print(f"| {row.name} | {found:.2f} | {told} | {row.size / 1e3:.1f} | {took:.2f} |")


if __name__ == "__main__":
    main()

"""Write ONNX files with integers: bytes, time and distance from the simulation.

    python examples/quantized_onnx.py FILE.onnx NAME=SHAPE [NAME=SHAPE ...]

SHAPE is 1x3x48x192, of float32, and a number such as 16000 alone is a scalar of int64.  ONNX Runtime readies
the file, which folds normalisations into convolutions, and calibrated on uniform random numbers.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.quantization.shape_inference import quant_pre_process

import amanda
from amanda.drivers.onnxruntime import session_options
from amanda.tools.quantize import QuantizeTool, convert

PRODUCTS = ["conv*", "depthwise_conv*", "linear", "matmul"]
METHODS: dict[str, dict[str, Any]] = {
    "products, 8 bits": {"type": PRODUCTS},
    "products and elementwise, 8 bits": {"type": [*PRODUCTS, "add", "mul", "relu", "clip", "*pool*"]},
    "weights of products, 4 bits": {"type": PRODUCTS, "weight_bits": 4, "activation_bits": None},
}


def given(text: str) -> tuple[str, Any]:
    """Return name and value of an input."""
    name, _, shape = text.partition("=")
    extents = [int(one) for one in shape.split("x")]
    if len(extents) == 1:
        return name, np.array(extents[0], np.int64)
    return name, np.random.default_rng(0).random(extents, np.float32)


def session(path: Path) -> Any:
    """Return a session of one thread, whose products with 4 bits read what they are given."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    # Kernels of x86 processors without VNNI saturate sums of uint8 times int8.
    options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(path, options)


def milliseconds(sessions: dict[str, Any], feed: dict[str, Any], rounds: int) -> dict[str, float]:
    """Return the median time of a run of each session, which run in turn."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, one in sessions.items():
            start = time.perf_counter()
            one.run(None, feed)
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: median(found) for name, found in times.items()}


def distance(found: Any, wanted: Any) -> float:
    """Return the norm of the difference, relative to what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("inputs", nargs="+", type=given, metavar="NAME=SHAPE")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    feed = dict(arguments.inputs)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "readied.onnx"
        quant_pre_process(str(arguments.model), str(path), skip_symbolic_shape=True)
        float32 = session(path)
        exact = float32.run(None, feed)[0]
        sessions, rows = {"float32": float32}, {"float32": (path.stat().st_size, 0.0, 0.0)}
        for method, options in METHODS.items():
            tool = QuantizeTool(**options)
            calibrated = onnxruntime.InferenceSession(path, session_options())
            with amanda.apply(tool):
                with tool.calibrating():
                    calibrated.run(None, feed)
                simulated = calibrated.run(None, feed)[0]
            result = convert(path, tool, folder / f"{len(rows)}.onnx")
            sessions[method] = session(result.model)
            found = sessions[method].run(None, feed)[0]
            rows[method] = (result.after, distance(simulated, exact), distance(found, simulated))
        times = milliseconds(sessions, feed, arguments.rounds)
    print("| | MB | ms | simulated from float32 | file from simulated |\n|---|---|---|---|---|")
    for method, (size, noise, kernels) in rows.items():
        print(f"| {method} | {size / 1e6:.2f} | {times[method]:.2f} | {noise:.2g} | {kernels:.2g} |")


if __name__ == "__main__":
    main()

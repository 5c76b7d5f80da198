"""Facts of the machine: GPU, driver, versions, and which packages of Amanda's own are missing."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch
from _cases import Cases
from _device import ON_GPU
from _prepare import LACKING, installed

import amanda

BESIDE = (
    "torch triton torchvision transformers timm numpy scipy pytest hypothesis nvidia-cudnn-cu13 torchao "
    "bitsandbytes"
).split()


def stage(cases: Cases) -> None:
    """Write down the machine."""
    cases("gpu", gpu)
    cases("software", software)
    cases("amanda", of_amanda)


def gpu() -> dict[str, Any]:
    """Return what the driver and torch say of the GPU."""
    found: dict[str, Any] = {"devices": torch.cuda.device_count() if ON_GPU else 0}
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        names = ("name", "total_memory", "multi_processor_count", "L2_cache_size", "major", "minor")
        found |= {name: getattr(properties, name, None) for name in names}
        found["free"], _ = torch.cuda.mem_get_info()
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        done = subprocess.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv"], capture_output=True)
        found["nvidia-smi"] = done.stdout.decode().strip()
    return found


def software() -> dict[str, Any]:
    """Return versions."""
    return {
        "python": sys.version,
        "packages": {name: metadata.version(name) for name in BESIDE if installed(name)},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "compiler": shutil.which(os.environ.get("CC", "cc")),
        "missing": [name for name in LACKING if not installed(name)],
    }


def of_amanda() -> dict[str, Any]:
    """Return which interceptor is in force, and drivers and tools that were found."""
    x = torch.ones(2)
    with amanda.apply(amanda.Tool()) as scope:
        torch.relu(x)
    return {
        "interceptor": os.environ["AMANDA_GPU_INTERCEPTOR"],
        "native": amanda.interceptor.NATIVE,
        "drivers": {one.name: one.state for one in amanda.list_drivers()},
        "tools": len(list(amanda.list_tools())),
        "report": str(scope.report),
        "amiss": [] if amanda.interceptor.NATIVE else ["the pure-Python interceptor is in force"],
    }

"""Facts of the machine: GPU, driver, versions, and which packages are missing."""

import os
import shutil
import subprocess
import sys
from typing import Any

import torch
from _cases import Cases
from _device import ON_GPU
from _machine import installed
from _prepare import LACKING

import amanda

BESIDE = (
    "torch triton torchvision transformers timm numpy scipy pytest hypothesis nvidia-cudnn-cu13 torchao "
    "bitsandbytes"
).split()
OF_GPU = ("name", "total_memory", "multi_processor_count", "L2_cache_size", "major", "minor")


def stage(cases: Cases) -> None:
    """Write down the machine."""
    cases("gpu", gpu)
    cases("software", software)


def gpu() -> dict[str, Any]:
    """Return what torch and the driver say of the GPU."""
    if not ON_GPU:
        return {"devices": 0}
    properties = torch.cuda.get_device_properties(0)
    found = {name: getattr(properties, name, None) for name in OF_GPU}
    if shutil.which("nvidia-smi"):
        fields = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        found["nvidia-smi"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"devices": torch.cuda.device_count(), "free": torch.cuda.mem_get_info()[0], **found}


def software() -> dict[str, Any]:
    """Return versions, the interceptor in force, drivers and tools that were found."""
    with amanda.apply(amanda.Tool()):
        torch.relu(torch.ones(2))
    native = amanda.interceptor.NATIVE
    return {
        "python": sys.version,
        "packages": {name: installed(name) for name in BESIDE if installed(name)},
        "missing": [name for name in LACKING if not installed(name)],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if ON_GPU else None,
        "interceptor": os.environ["AMANDA_GPU_INTERCEPTOR"],
        "drivers": {one.name: one.state for one in amanda.list_drivers()},
        "tools": len(list(amanda.list_tools())),
        "amiss": [] if native else ["the pure-Python interceptor is in force"],
    }

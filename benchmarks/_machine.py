"""What figures were measured on."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import amanda


def machine() -> dict[str, str]:
    """Processor, cores, memory, system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }


def processor() -> str:
    """The processor's name, with what tells apart those of one name."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in file.read_text().split("\n\n")[0].splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    name = facts.get("model name", platform.machine())
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    flags = facts.get("flags", "").split()
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "")
    virtual = "virtual machine" if "hypervisor" in flags else ""
    return f"{name} ({', '.join(part for part in (*numbers, widest, virtual) if part)})"


def versions() -> dict[str, str]:
    """Versions of what takes part."""
    found = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in (
        "torch",
        "torchvision",
        "transformers",
        "amanda-core",
        "amanda-driver-torch",
        "amanda-tools",
        "tensorflow-cpu",
        "keras",
        "tf_keras",
        "amanda-driver-tf",
        "onnxruntime",
        "amanda-driver-onnxruntime",
    ):
        found[name] = metadata.version(name)
    found["torch"] = torch.__version__
    found["interceptor"] = "native" if amanda.interceptor.NATIVE else "pure Python"
    found["compiler"] = compiler()
    return found


def compiler() -> str:
    """The first line that the C compiler says of itself."""
    command = shutil.which(os.environ.get("CC", "cc"))
    if command is None:
        return "none"
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    return said.splitlines()[0] if said else "unknown"

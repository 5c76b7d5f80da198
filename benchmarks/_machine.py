"""Facts about the machine and the versions that figures were measured on."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import amanda

DISTRIBUTIONS = (
    "torch torchvision transformers amanda-core amanda-driver-torch amanda-tools amanda-compress amanda-labs "
    "tensorflow-cpu keras tf_keras amanda-driver-tf onnxruntime amanda-driver-onnxruntime"
).split()


def machine() -> dict[str, str]:
    """Return processor, cores, memory and system."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{pages / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }


def processor() -> str:
    """Return the processor's name, with what tells apart those of one name."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in file.read_text().split("\n\n")[0].splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    flags = facts.get("flags", "").split()
    widest = [flag for flag in ("avx512f", "avx2", "avx") if flag in flags][:1]
    virtual = ["virtual machine"] if "hypervisor" in flags else []
    return f"{facts.get('model name', platform.machine())} ({', '.join(numbers + widest + virtual)})"


def versions() -> dict[str, str]:
    """Return versions of everything that takes part."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        **{name: version for name in DISTRIBUTIONS if (version := installed(name))},
        "torch": torch.__version__,
        "interceptor": "native" if amanda.interceptor.NATIVE else "pure Python",
        "compiler": compiler(),
    }


def installed(distribution: str) -> str:
    """Return the version of a distribution; "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Return the commit that is checked out, with "+" where files differ from it; "unknown" without git.

    The pages that benchmarks write do not count.
    """
    git = ["git", "-C", str(Path(__file__).parent)]
    changed = [*git, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/docs"]
    try:
        head, differs = (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            for command in ([*git, "rev-parse", "--short=12", "HEAD"], changed)
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if differs else "")


def compiler() -> str:
    """Return the first line that the C compiler says of itself."""
    command = [os.environ.get("CC", "cc"), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return "none"
    return said.splitlines()[0] if said else "unknown"

"""Let a torch that was built for CUDA be imported where CUDA's libraries are not installed.

`python cuda_stand_ins.py FOLDER` looks at the installed torch and fills FOLDER with a library for each that
it lacks, whose functions all say that there is no device; LD_LIBRARY_PATH=FOLDER then runs torch on the CPU.
With a torch for the CPU, FOLDER stays empty. Linux, with gcc and binutils.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

OF_CUDA = re.compile(r"cu|__cuda|nccl|nvrtc|nvtx|nvJit|nvsh")
VERSIONED = re.compile(r"Version: 1  File: (?P<file>\S+)|Name: (?P<name>\S+)  Flags: .*Version: \d+")
NO_DEVICE = "int {}(void) {{ return 100; }}\n"
NO_TEXT = 'const char* {}(void) {{ return "no CUDA"; }}\n'


def main(folder: Path) -> None:
    """Make the stand-ins for the torch that is installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(spec.origin).parent
    libraries = [*package.glob("lib/*.so*"), *package.glob("_C*.so")]
    versions = versions_of(libraries)
    symbols = symbols_of(libraries, versions)
    for name in sorted(missing(libraries)):
        compile_stand_in(folder, name, versions[name], symbols)


def missing(libraries: list[Path]) -> set[str]:
    """Libraries that torch's own ask for, and nobody has."""
    needed = {
        name for one in libraries for name in re.findall(r"NEEDED.*\[(.+)\]", told("readelf", "-dW", one))
    }
    return {name for name in needed - {one.name for one in libraries} if not loads(name)}


def loads(name: str) -> bool:
    """Whether the system has a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def versions_of(libraries: list[Path]) -> dict[str, set[str]]:
    """The versions of symbols that each needed library has to define."""
    found: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        file = ""
        for match in VERSIONED.finditer(told("readelf", "-VW", library)):
            file = match["file"] or file
            if match["name"]:
                found[file].add(match["name"])
    return found


def symbols_of(libraries: list[Path], versions: dict[str, set[str]]) -> dict[str, set[str]]:
    """The functions of CUDA that torch calls, by version; those without one by ""."""
    undefined, defined = set(), set()
    for library in libraries:
        for line in told("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            (undefined if kind in "Uw" else defined).add(symbol)
    known = {version for each in versions.values() for version in each}
    own = {symbol.partition("@")[0] for symbol in defined}
    found: dict[str, set[str]] = defaultdict(set)
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if OF_CUDA.match(name) and name not in own:
            found[version.strip("@") if version.strip("@") in known else ""].add(name)
    return found


def compile_stand_in(folder: Path, name: str, versions: set[str], symbols: dict[str, set[str]]) -> None:
    """Compile one library; the first also has the functions that have no version."""
    plain = symbols.pop("", set())
    wanted = {version: sorted(symbols[version]) for version in sorted(versions)}
    functions = sorted(plain.union(*wanted.values()))
    source, script = folder / "source.c", folder / "versions.map"
    source.write_text("".join((NO_TEXT if "String" in one else NO_DEVICE).format(one) for one in functions))
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join([*names, ''])}}};\n" for version, names in wanted.items())
    )
    options = [f"-Wl,--version-script={script}"] if wanted else []
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", *options]
    subprocess.run([*command, "-o", folder / name, source], check=True)
    for scratch in (source, script):
        scratch.unlink()


def told(*command: str | Path) -> str:
    """What a program prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))

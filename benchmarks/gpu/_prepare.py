"""Run from the sources: the native interceptor, entry points, packages from wheels; the pages of docs/."""

import configparser
import json
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "packages" / f"amanda-{name}" for name in ("core", "driver-torch", "tools")]
INTERCEPTOR = ROOT / "packages/amanda-core/src/amanda/interceptor"
PLACE, WHEELS = ROOT / "build/gpu-path", ROOT / "build/gpu-wheels"
LACKING = ("cffi", "pycparser", "autoray", "expecttest", "pluggy", "pytest-timeout", "torchao")
"""Packages that a machine with PyTorch may lack; without torchao some cases are skipped."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def download(python: str = "3.12") -> int:
    """Download wheels of `LACKING` for a Python on Linux into build/gpu-wheels; return pip's exit status."""
    platforms = [part for one in PLATFORMS for part in ("--platform", one)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    of = ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(WHEELS)]
    return subprocess.run([*pip, *of, *LACKING]).returncode


def environment(device: str, quick: bool) -> dict[str, str]:
    """Return the environment of a stage, with everything that it imports made ready."""
    PLACE.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(WHEELS.glob("*.whl")):
        if not list(metadata.distributions(name=wheel.name.partition("-")[0])):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(PLACE)
    sys.path.insert(0, str(PLACE))
    for distribution in SOURCES:
        describe(distribution)
    interceptor = compiled()
    print(f"interceptor: {interceptor}", flush=True)
    path = [PLACE, *(one / "src" for one in SOURCES), ROOT / "packages/amanda-driver-torch/tests/support"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "AMANDA_TEST_DEVICE": device,
        "AMANDA_BENCH_QUICK": "1" if quick else "",
        "AMANDA_GPU_COMMAND": " ".join(["python", *sys.argv]),
        "AMANDA_GPU_INTERCEPTOR": interceptor,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "HF_HUB_OFFLINE": "1",
        "PYTEST_ADDOPTS": "-W default -p no:cacheprovider",
        "PYTHONUNBUFFERED": "1",
    }


def describe(distribution: Path) -> None:
    """Write the metadata and entry points of a distribution, by which its plugins are found."""
    project = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = PLACE / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = configparser.RawConfigParser(delimiters=("=",))
    points.read_dict(project.get("entry-points", {}))
    with (folder / "entry_points.txt").open("w") as file:
        points.write(file)


def compiled() -> str:
    """Compile the native interceptor unless it is newer than its sources; say which one is in force."""
    library = INTERCEPTOR / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    sources = [INTERCEPTOR / "_build.py", *INTERCEPTOR.glob("native/*.[ch]")]
    if library.exists() and library.stat().st_mtime >= max(one.stat().st_mtime for one in sources):
        return "native"
    try:
        builder = runpy.run_path(str(INTERCEPTOR / "_build.py"))["ffibuilder"]
        with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
            Path(builder.compile(tmpdir=scratch)).replace(library)
    except (Exception, SystemExit) as error:
        library.unlink(missing_ok=True)
        return f"pure Python, since the native one cannot be compiled: {type(error).__name__}: {error}"
    return "native"


def publish(folders: list[Path]) -> int:
    """Put the stages of each folder's gpu.json into docs/gpu.json, and make both pages anew; 1 if refused."""
    sys.path += map(str, [ROOT / "benchmarks", ROOT / "benchmarks/paper"])
    import _evaluation
    import _on_gpu
    import page

    stages = _on_gpu.stages()
    for folder in folders:
        stages |= _on_gpu.stages(folder / _on_gpu.FILE.name)
    if _on_gpu.is_rehearsal(stages):
        print("results of a rehearsal, on a processor or quick, do not belong into docs/", file=sys.stderr)
        return 1
    if stages:
        _on_gpu.FILE.write_text(json.dumps({"schema": _on_gpu.SCHEMA, "stages": stages}, indent=1) + "\n")
    for one in (page.PAGE, _evaluation.PAGE):
        results = _on_gpu.FILE.with_name(f"{one.name}.json")
        results.with_suffix(".md").write_text(one.text(one.read(results)))
    return 0

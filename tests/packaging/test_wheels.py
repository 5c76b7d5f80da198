"""What is in each wheel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
NAMESPACES = {PurePosixPath("amanda"), PurePosixPath("amanda/tools"), PurePosixPath("amanda/drivers")}


@pytest.fixture(params=DISTRIBUTIONS, ids=lambda path: path.name)
def wheel(request: pytest.FixtureRequest, wheels: Path) -> Iterator[ZipFile]:
    with ZipFile(find(wheels, request.param.name)) as opened:
        yield opened


def find(wheels: Path, distribution: str) -> Path:
    (found,) = wheels.glob(f"{distribution.replace('-', '_')}-*.whl")
    return found


def files(wheel: ZipFile) -> set[PurePosixPath]:
    """What the wheel puts into site-packages, without its metadata."""
    paths = {PurePosixPath(name) for name in wheel.namelist() if not name.endswith("/")}
    return {path for path in paths if not path.parts[0].endswith(".dist-info")}


def is_core(wheel: ZipFile) -> bool:
    return Path(str(wheel.filename)).name.startswith("amanda_core-")


def test_only_the_core_has_the_package_itself(wheel: ZipFile) -> None:
    assert (PurePosixPath("amanda/__init__.py") in files(wheel)) == is_core(wheel)


def test_nobody_has_the_namespaces_below_it(wheel: ZipFile) -> None:
    closed = {PurePosixPath(f"amanda/{name}/__init__.py") for name in ("tools", "drivers")}
    assert not closed & files(wheel)


def test_the_markers_for_editors_stay_out(wheel: ZipFile) -> None:
    assert not [path for path in files(wheel) if path.name == "__init__.pyi" and path.parent in NAMESPACES]


def test_every_package_is_typed(wheel: ZipFile) -> None:
    packages = {path.parent for path in files(wheel) if path.name == "__init__.py"}
    typed = {path.parent for path in files(wheel) if path.name == "py.typed"}
    assert packages
    assert [package for package in packages if not typed & {package, *package.parents}] == []


def test_there_is_code_and_nothing_besides(wheel: ZipFile) -> None:
    plugin = "pytest_amanda.py" if Path(str(wheel.filename)).name.startswith("amanda_tools-") else None
    assert {path.parts[0] for path in files(wheel)} - {plugin} == {"amanda"}
    assert not [path for path in files(wheel) if path.suffix in (".c", ".h", ".pyc") or "tests" in path.parts]


def test_a_compiled_core_has_its_interceptor_and_says_its_platform(wheels: Path) -> None:
    with ZipFile(find(wheels, "amanda-core")) as core:
        native = [path for path in files(core) if path.suffix in (".so", ".pyd")]
        tag = metadata(core, "WHEEL")["Tag"]
    if tag == "py3-none-any":
        assert os.environ.get("AMANDA_REQUIRE_NATIVE") != "1"
        assert not native
    else:
        assert [path.parent for path in native] == [PurePosixPath("amanda/interceptor")]


def test_files_beside_the_modules_are_in_the_wheel(wheel: ZipFile) -> None:
    name = Path(str(wheel.filename)).name.partition("-")[0].replace("_", "-")
    source = ROOT / "packages" / name / "src"
    wanted = {PurePosixPath(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    data = {".css", ".html", ".js", ".json", ".LICENSE", ".typed"}
    assert {path for path in wanted if path.suffix in data} <= files(wheel)


def test_other_wheels_fit_every_platform(wheel: ZipFile) -> None:
    assert is_core(wheel) or metadata(wheel, "WHEEL")["Tag"] == "py3-none-any"


def test_the_licence_is_inside(wheel: ZipFile) -> None:
    vendors = Path(str(wheel.filename)).name.startswith("amanda_tools-")
    expected = "Apache-2.0 AND MIT" if vendors else "Apache-2.0"
    assert metadata(wheel, "METADATA")["License-Expression"] == expected
    assert [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]


def test_vendored_files_have_their_licence_beside_them_and_in_the_metadata(wheel: ZipFile) -> None:
    vendored = [path for path in files(wheel) if path.name.endswith(".min.js")]
    names = {name.partition(".dist-info/licenses/")[2] for name in wheel.namelist()}
    for path in vendored:
        licence = path.with_name(path.name.replace(".min.js", ".LICENSE"))
        assert licence in files(wheel)
        assert [name for name in names if name.endswith(str(licence))]


def test_the_tools_that_look_stay_small(wheels: Path) -> None:
    # Whoever counts FLOPs installs these; what changes weights or programs is in other distributions.
    with ZipFile(find(wheels, "amanda-tools")) as wheel:
        sources = [name for name in wheel.namelist() if name.endswith(".py")]
        lines = [line for name in sources for line in wheel.read(name).splitlines()]
    assert sum(not line.lstrip().startswith(b"#") for line in lines) <= 22_000


def test_the_extras_name_the_other_distributions(wheels: Path) -> None:
    with ZipFile(find(wheels, "amanda-core")) as core:
        requires = metadata(core, "METADATA").get_all("Requires-Dist", [])
    for extra, distribution in (
        ("torch", "amanda-driver-torch"),
        ("tf", "amanda-driver-tf"),
        ("onnxruntime", "amanda-driver-onnxruntime"),
        ("mindspore", "amanda-driver-mindspore"),
        ("jax", "amanda-driver-jax"),
        ("tools", "amanda-tools"),
        ("compress", "amanda-compress"),
        ("labs", "amanda-labs"),
    ):
        (line,) = (line for line in requires if line.endswith(f"extra == '{extra}'"))
        assert line.startswith(distribution)
    assert [line for line in requires if line.endswith("extra == 'all'")]


NEEDS = {
    "amanda-core": {"cffi", "pluggy"},
    "amanda-driver-torch": {"amanda-core", "torch"},
    "amanda-driver-tf": {"amanda-core", "numpy"},
    "amanda-driver-onnxruntime": {"amanda-core", "numpy", "onnx", "onnxruntime"},
    "amanda-driver-mindspore": {"amanda-core"},
    "amanda-driver-jax": {"amanda-core"},
    "amanda-compress": {
        "amanda-core",
        "amanda-tools",
        "click",
        "cloudpickle",
        "joblib",
        "ml-dtypes",
        "numpy",
        "safetensors",
    },
    "amanda-labs": {"amanda-compress", "amanda-core", "amanda-tools", "networkx", "numpy"},
}


@pytest.mark.parametrize("distribution", NEEDS)
def test_a_distribution_brings_what_it_needs_alone(wheels: Path, distribution: str) -> None:
    with ZipFile(find(wheels, distribution)) as wheel:
        requires = metadata(wheel, "METADATA").get_all("Requires-Dist", [])
    needed = {Requirement(line).name for line in requires if "extra ==" not in line}
    assert needed == NEEDS[distribution]


def metadata(wheel: ZipFile, name: str) -> Message:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return message_from_string(wheel.read(path).decode())

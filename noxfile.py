"""Every check and the demo, each a session of nox: `python -m pip install nox && nox -s demo`.

What a session installs is a dependency group of pyproject.toml, at the versions of constraints.txt. Sessions
that require `dev` share its environment; every other session has one of its own. Sessions: dev, demo, tests,
tests_slow, tests_long, zoo, zoo_tf, opdb, opdb_onnx, opdb_tf, opdb_jax, opdb_mindspore, fuzz, soak,
reliability, mindspore, jax, newest, pythons, torch_versions, tf_versions, types, lint, dist, wheels, release,
templates, third_party, docs, recipes, suites, bench, paper, gpu.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import nox

nox.needs_version = ">=2025.11.12"
nox.options.sessions = ["tests", "types", "lint"]
nox.options.default_venv_backend = "venv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"

# Of the Pythons of pyenv those that are not activated are found as well.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *map(str, PYENV.glob("versions/*/bin"))])

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CORE, TORCH, TF, ONNXRUNTIME, MINDSPORE, JAX, TOOLS, COMPRESS, LABS = DISTRIBUTIONS = [
    ROOT / "packages" / f"amanda-{name}"
    for name in (
        "core",
        "driver-torch",
        "driver-tf",
        "driver-onnxruntime",
        "driver-mindspore",
        "driver-jax",
        "tools",
        "compress",
        "labs",
    )
]
ALL_TOOLS = (TOOLS, COMPRESS, LABS)
MIXES = {"wheels": DISTRIBUTIONS, "editable": [], "core-editable": DISTRIBUTIONS[1:], "core-wheel": [CORE]}
EXAMPLE = ROOT / "examples" / "low_rank"
EXAMPLE_DRIVER = ROOT / "examples" / "autograd_driver"
FAKE_ARRAYS = ROOT / "tests" / "plugins" / "fake-arrays"
WHEELS = ROOT / "build" / "wheels"
BIN = "Scripts" if os.name == "nt" else "bin"
DEV = ROOT / ".nox" / "dev" / BIN / "python"

ELSEWHERE = "(long or zoo or zoo_tf or opdb or soak or installs)"
WITH_SLOW = ("-m", f"not {ELSEWHERE}")
PARALLEL = ("--numprocesses=2", "--durations=10")
BY_MODULE = ("--numprocesses=auto", "--dist=loadscope")
"""In parallel, where tests of one module share what its fixtures set up."""
NO_TESTS = 5
"""Pytest's exit status where nothing was selected."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OF_PRIVATE_NAMES = (
    "test_driver", "test_recomputation", "test_requirements", "test_node_layout", "test_reader",
    "test_unhooked_passes",
)  # fmt: skip
"""Tests of the PyTorch driver whose subject hangs on what torch does not document."""
# All tests run on one version of each, the shared environment's.
TORCH_VERSIONS = ("2.4.1", "2.9.1", "2.14.1", "2.15.0")
TENSORFLOW_VERSIONS = ("2.16.2", "2.17.1", "2.18.1", "2.19.1", "2.20.0")
BOUND_BY_TENSORFLOW = ("tensorflow-cpu", "tf-keras", "numpy", "pandas", "protobuf", "ml-dtypes")
MINDSPORE_VERSION = "2.10.0"
JAX_VERSION = "0.10.2"
# Its wheel is built against NumPy 1, and wants a newer protobuf than TensorFlow does.
BOUND_BY_MINDSPORE = ("numpy", "protobuf", "ml-dtypes", "pandas", "scipy")
OLD_WARNINGS = {"PYTEST_ADDOPTS": "-W ignore::FutureWarning -W ignore::DeprecationWarning"}
FRAMEWORK_FREE = [
    f"{CORE}/tests",
    *(f"{TOOLS}/tests/test_{name}.py" for name in ("command_programs", "results")),
]
# The core, and the conformance suite on a mode of each driver.
SUITES = [
    f"{CORE}/tests", f"{TF}/tests/eager/test_driver.py",
    *(f"{driver}/tests/test_driver.py" for driver in (TORCH, ONNXRUNTIME)),
]  # fmt: skip

PARTS = {
    "core": f"{CORE}/tests",
    "torch": f"{TORCH}/tests",
    "tf": f"{TF}/tests",
    "onnxruntime": f"{ONNXRUNTIME}/tests",
    "tools": f"{TOOLS}/tests",
    "compress": f"{COMPRESS}/tests",
    "labs": f"{LABS}/tests",
    "together": f"{ROOT}/tests",
}
"""Folders of tests, which stand on those before them, but for drivers; those of several parts come last."""
SETTINGS = ("conftest.py", "constraints.txt", "noxfile.py", "pyproject.toml")
"""Files that every part depends on."""


def group(*names: str) -> list[str]:
    """Return the requirements of dependency groups."""
    return list(nox.project.dependency_groups(PROJECT, *names))


def editable(*distributions: Path) -> list[str]:
    """Return arguments with which pip installs distributions from where they are."""
    sources = [argument for path in distributions for argument in ("--editable", str(path))]
    return ["--no-build-isolation", *sources]


def install(session: nox.Session, *arguments: str, but: Iterable[str] = ()) -> None:
    """Install with pip, at the versions of constraints.txt but for some packages.

    Packages of the group `alone` lack, on purpose, some of what they want; pip would warn of that each time.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = Path(session.virtualenv.location, "constraints.txt")
    constraints.write_text("\n".join(line for line in lines if line.partition("==")[0] not in but))
    quiet = ("--quiet", "--no-warn-conflicts", "--disable-pip-version-check")
    session.install(*quiet, "--constraint", str(constraints), *arguments)


def python(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run Python of the shared environment; models come with packages, none from a hub."""
    session.run(str(DEV), *arguments, external=True, env={"HF_HUB_OFFLINE": "1", **env})


def is_made_from_the_same(session: nox.Session) -> bool:
    """Return True if the environment was made from what it would be made from now."""
    stamp = Path(session.virtualenv.location, "amanda-stamp")
    return stamp.exists() and stamp.read_text() == fingerprint()


def made(session: nox.Session) -> None:
    """Record what the environment was made from."""
    Path(session.virtualenv.location, "amanda-stamp").write_text(fingerprint())


def fingerprint() -> str:
    """Return a hash of the requirements, the metadata, the C sources and the switches of the native build."""
    interceptor = CORE / "src/amanda/interceptor"
    files = [ROOT / name for name in ("constraints.txt", "noxfile.py", "pyproject.toml")]
    files += [interceptor / "_build.py", CORE / "hatch_build.py"]
    files += sorted(interceptor.glob("native/**/*.[ch]"))
    files += [path / "pyproject.toml" for path in DISTRIBUTIONS]
    switches = [os.environ.get(name, "") for name in ("AMANDA_NATIVE", "AMANDA_REQUIRE_NATIVE", "CC")]
    return hashlib.sha256(
        b"\0".join([file.read_bytes() for file in files] + [*map(str.encode, switches)])
    ).hexdigest()


@nox.session
def dev(session: nox.Session) -> None:
    """Bring the shared environment up to date, if what it is made from has changed.

    `-- jax` and `-- mindspore` make `.nox/jax` and `.nox/mindspore` instead, which those sessions run in.
    """
    # Sessions that require this one hand on arguments of their own.
    if session.posargs and set(session.posargs) <= {"jax", "mindspore"}:
        for name in session.posargs:
            session.notify(name, posargs=["--version"])
        return
    if not is_made_from_the_same(session):
        install(session, *group("torch"))
        install(session, "--no-deps", *group("alone"))
        install(session, *group("dev"))
        install(session, *editable(*DISTRIBUTIONS))
        made(session)


@nox.session
def demo(session: nox.Session) -> None:
    """Instrument ResNet-50 and BERT and print what was seen."""
    if not is_made_from_the_same(session):
        # Compiled are the modules that it imports, as it does.
        install(session, "--no-compile", *group("demo"))
        install(session, "--no-compile", "--no-deps", "torchvision", *editable(CORE, TORCH, TOOLS))
        made(session)
    session.run("python", "examples/demo.py", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Run every test but the slow ones, part by part.

    After --: names of parts (core, torch, tf, onnxruntime, tools, compress, labs, together); `changed`, for
    the parts above what differs from main; what else there is goes to pytest.
    """
    by_part(session)


@nox.session(venv_backend="none", requires=["dev"])
def tests_slow(session: nox.Session) -> None:
    """Run the slow tests: programs, suites within tests, whole models; arguments as those of `tests`."""
    by_part(session, "-m", f"slow and not {ELSEWHERE}")


@nox.session(venv_backend="none", requires=["dev"])
def tests_long(session: nox.Session) -> None:
    """Run the tests that take longest; arguments as those of `tests`."""
    by_part(session, "-m", "long")


def by_part(session: nox.Session, *marks: str) -> None:
    """Run the tests of each part in a pytest of its own, whose workers load no framework that it lacks."""
    parts = [argument for argument in session.posargs if argument in PARTS]
    others = [argument for argument in session.posargs if argument not in {*PARTS, "changed"}]
    if "changed" in session.posargs:
        parts = changed(session)
    elif others and not parts:  # which may be paths
        python(session, "-m", "pytest", *marks, *others, OMP_NUM_THREADS="1")
        return
    failed = []
    for part in parts or PARTS:
        command = [str(DEV), "-m", "pytest", *marks, *(others or BY_MODULE), str(PARTS[part])]
        env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        try:
            session.run(*command, external=True, env=env, success_codes=[0, NO_TESTS])
        except nox.command.CommandFailed:
            failed.append(part)
    if failed:
        session.error(f"tests failed in {', '.join(failed)}")


def changed(session: nox.Session) -> list[str]:
    """Return the parts of which something differs from main, and those that stand on them."""
    files = []
    for command in (("diff", "--name-only", "main"), ("ls-files", "--others", "--exclude-standard")):
        files += str(session.run("git", *command, external=True, silent=True, log=False)).split()
    core, *drivers = list(PARTS)[:4]
    tools = list(PARTS)[4:7]
    touched = {"together"} if files else set()
    for file in files:
        part = re.sub("^amanda-(driver-)?", "", file.split("/")[1]) if file.startswith("packages/") else ""
        if part in tools:
            touched |= {*tools[tools.index(part) :]}
        elif part in drivers:
            touched |= {part, *tools}
        elif part == core or file in SETTINGS:
            touched |= {*PARTS}
    return [part for part in PARTS if part in touched]


@nox.session(venv_backend="none", requires=["dev"])
def zoo(session: nox.Session) -> None:
    """Train every model of the zoo with and without tools; arguments after -- go to pytest."""
    paths = (f"{TORCH}/tests/zoo", f"{TORCH}/tests/graph/test_models.py")
    chosen = session.posargs or PARALLEL
    python(session, "-m", "pytest", *paths, "-m", "zoo or not zoo", *chosen, OMP_NUM_THREADS="1")


@nox.session(venv_backend="none", requires=["dev"])
def zoo_tf(session: nox.Session) -> None:
    """Train every Keras model of the zoo in every mode; arguments after -- go to pytest."""
    # oneDNN fuses operators in a pass of its own, which no option of a graph turns off.
    alone = {"OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    chosen = session.posargs or PARALLEL
    python(session, "-m", "pytest", f"{TF}/tests/keras_zoo", "-m", "zoo_tf or not zoo_tf", *chosen, **alone)


@nox.session(venv_backend="none", requires=["dev"])
def opdb(session: nox.Session) -> None:
    """Call every operator of torch's own database with and without tools; arguments after -- go to pytest."""
    chosen = session.posargs or PARALLEL
    python(session, "-m", "pytest", f"{TORCH}/tests/opdb", "-m", "opdb", *chosen, OMP_NUM_THREADS="1")


@nox.session(venv_backend="none", requires=["dev"])
def opdb_onnx(session: nox.Session) -> None:
    """Run ONNX' own suite of operators with and without tools; arguments after -- go to pytest."""
    oracles(session, "ONNX Runtime", "onnxruntime", ONNXRUNTIME, "ONNX' suite of operators")


@nox.session(venv_backend="none", requires=["dev"])
def opdb_tf(session: nox.Session) -> None:
    """Call functions of TensorFlow and Keras with and without tools; arguments after -- go to pytest."""
    oracles(session, "TensorFlow", "tensorflow-cpu", TF, "functions of TensorFlow and Keras")


def oracles(session: nox.Session, kind: str, package: str, driver: Path, what: str) -> None:
    """Run a driver's tests of operators, and write what they counted into docs/support.md."""
    env = {"OMP_NUM_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0", "PYTHONPATH": str(ROOT / "website")}
    tests = (f"{driver}/tests/opdb", "-m", "opdb")
    if session.posargs:
        python(session, "-m", "pytest", *tests, *session.posargs, **env)
        return
    code = f"from importlib.metadata import version; print(version({package!r}))"
    version = str(session.run(str(DEV), "-c", code, external=True, silent=True)).strip()
    python(session, "-m", "amanda_docs.support", kind, version, what, *tests, *PARALLEL, **env)


@nox.session(venv_backend="none", requires=["dev"])
def soak(session: nox.Session) -> None:
    """Run for long under tools: memory and exceptions; arguments after -- go to pytest."""
    paths = [f"{TORCH}/tests/test_{name}.py" for name in ("soak", "restored_property")]
    python(session, "-m", "pytest", *paths, "-m", "soak", *session.posargs, OMP_NUM_THREADS="1")


@nox.session(venv_backend="none", requires=["dev"])
def reliability(session: nox.Session) -> None:
    """Attack each framework under tools, in 20 minutes at most; after -- the names of some attacks.

    JAX and MindSpore are attacked where their sessions have made their environments.
    """
    paths = ("tests/support", "website")
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    attacks = ("tests/reliability/run.py", *(session.posargs or ["--record"]))
    python(session, *attacks, **env)
    for name, framework in (("jax", "JAX"), ("mindspore", "MindSpore")):
        other = ROOT / ".nox" / name / BIN / "python"
        if other.exists():
            session.run(
                str(other), *attacks, "--framework", framework, "--minutes", "3", external=True, env=env
            )


def support(session: nox.Session, kind: str, version: str, what: str, *tests: str, **env: str) -> None:
    """Run tests in the session's environment, and write how many passed into docs/support.md."""
    env = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "website"), **env}
    chosen = session.posargs or [*WITH_SLOW, *tests]
    session.run("python", "-m", "amanda_docs.support", kind, version, what, *chosen, env=env)


@nox.session
@nox.parametrize("version", TENSORFLOW_VERSIONS, ids=TENSORFLOW_VERSIONS)
def tf_versions(session: nox.Session, version: str) -> None:
    """Run the TensorFlow driver's tests, but its zoo, on an older version: `nox -s "tf_versions(2.16.2)"`."""
    # TensorFlow 2.20 takes any newer protobuf, but writes graphs with what 6 warns of and 7 has no more.
    needed = (f"tensorflow-cpu=={version}", "protobuf<6", *group("drivers"), "scikit-learn")
    install(session, *needed, but=BOUND_BY_TENSORFLOW)
    keras = f"tf_keras=={version.rpartition('.')[0]}.*"
    install(session, "--no-deps", keras, "basic-pitch", *editable(*DISTRIBUTIONS), but=BOUND_BY_TENSORFLOW)
    tests = (f"{TF}/tests", f"--ignore={TF}/tests/keras_zoo")
    support(session, "TensorFlow", version, "the driver's tests, without its zoo", *tests)


@nox.session
@nox.parametrize("version", TORCH_VERSIONS, ids=TORCH_VERSIONS)
def torch_versions(session: nox.Session, version: str) -> None:
    """Run the PyTorch driver's conformance suite on an older version: `nox -s "torch_versions(2.4.1)"`.

    A build for CUDA is imported without CUDA's libraries, on Linux.
    """
    install(session, "--no-deps", f"torch=={version}", but=("torch",))
    install(session, *group("older-torch"), but=("torch",))
    install(session, "--no-deps", *editable(*DISTRIBUTIONS), but=("torch",))
    libraries = Path(session.virtualenv.location, "cuda")
    session.run("python", ".ci/cuda_stand_ins.py", str(libraries))
    tests = [f"{TORCH}/tests/{name}.py" for name in (*OF_PRIVATE_NAMES, "graph/test_other_versions")]
    found = {**OLD_WARNINGS, "LD_LIBRARY_PATH": str(libraries)}
    support(
        session,
        "PyTorch",
        version,
        "private names, layouts, compiled callables, conformance suite",
        *tests,
        **found,
    )


@nox.session
def newest(session: nox.Session) -> None:
    """Run the conformance suites on the newest version of each framework; `-- --pre` takes candidates too."""
    frameworks = ("torch", "tensorflow-cpu", "onnx", "onnxruntime", "jax", "flax", "optax")
    session.install("--quiet", "--upgrade", *session.posargs, *frameworks, *group("drivers"), "hypothesis")
    session.install("--quiet", "--no-deps", *editable(*DISTRIBUTIONS))
    session.run("python", "-m", "amanda", "doctor")
    # Each in a process of its own: PyTorch's triton and TensorFlow cannot be loaded into one.
    for suite in (*SUITES, f"{JAX}/tests/test_driver.py"):
        session.run("python", "-m", "pytest", *WITH_SLOW, suite, env=OLD_WARNINGS)


def install_mindspore(session: nox.Session) -> None:
    """Install MindSpore, and PyTorch, whose twins of models its tests compare with."""
    install(session, *group("torch"), but=BOUND_BY_MINDSPORE)
    needed = (f"mindspore=={MINDSPORE_VERSION}", "numpy<2", *group("drivers"))
    install(session, *needed, but=BOUND_BY_MINDSPORE)
    install(session, "--no-deps", *editable(CORE, TORCH, MINDSPORE, *ALL_TOOLS))


@nox.session
def opdb_mindspore(session: nox.Session) -> None:
    """Call functions of MindSpore, and train networks, with and without tools; arguments go to pytest."""
    install_mindspore(session)
    what = "calls of functions and training, under tools that change nothing"
    tests = (f"{MINDSPORE}/tests/opdb", "-m", "opdb")
    if session.posargs:
        session.run("python", "-m", "pytest", *tests, *session.posargs, env={"OMP_NUM_THREADS": "1"})
    else:
        support(session, "MindSpore", MINDSPORE_VERSION, what, *tests, OMP_NUM_THREADS="1")


@nox.session
def mindspore(session: nox.Session) -> None:
    """Run the MindSpore driver's tests; arguments after -- go to pytest."""
    install_mindspore(session)
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
    else:
        support(session, "MindSpore", MINDSPORE_VERSION, "the driver's tests", f"{MINDSPORE}/tests")


@nox.session
def jax(session: nox.Session) -> None:
    """Run the JAX driver's tests; arguments after -- go to pytest."""
    _install_jax(session)
    if session.posargs:
        session.run("python", "-m", "pytest", *session.posargs)
    else:
        support(session, "JAX", JAX_VERSION, "the driver's tests", f"{JAX}/tests")


@nox.session
def opdb_jax(session: nox.Session) -> None:
    """Call every public function of JAX and optax with and without tools; arguments after -- go to pytest."""
    _install_jax(session)
    tests = (f"{JAX}/tests/functions", "-m", "opdb")
    if session.posargs:
        session.run("python", "-m", "pytest", *tests, *session.posargs, env={"OMP_NUM_THREADS": "1"})
    else:
        what = "public functions of JAX and optax, under tools that change nothing"
        support(session, "JAX", JAX_VERSION, what, *tests, *PARALLEL, OMP_NUM_THREADS="1")


def _install_jax(session: nox.Session) -> None:
    install(session, *group("torch"), but=BOUND_BY_MINDSPORE)
    needed = (f"jax=={JAX_VERSION}", "flax", "optax", "equinox", "keras", *group("drivers"))
    libraries = ("diffrax", "numpyro", "blackjax")
    install(session, *needed, *libraries, but=BOUND_BY_MINDSPORE)
    install(session, "--no-deps", *editable(CORE, TORCH, JAX, *ALL_TOOLS))


@nox.session(python=PYTHONS)
def pythons(session: nox.Session) -> None:
    """Run the tests that need no framework on each Python that is found: `nox -s pythons-3.12`."""
    install(session, *group("drivers"), "hypothesis")
    install(session, "--no-deps", "--no-build-isolation", "--force-reinstall", str(CORE), str(TOOLS))
    session.run("python", "-m", "amanda", "info", "--load")
    support(
        session,
        "Python",
        str(session.python),
        "amanda-core, amanda-tools without frameworks",
        *FRAMEWORK_FREE,
    )


@nox.session(venv_backend="none", requires=["dev"])
def types(session: nox.Session) -> None:
    """Check types with mypy."""
    python(session, "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def lint(session: nox.Session) -> None:
    """Check style with ruff, and that every distribution's changes can be rendered."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")
    for path in DISTRIBUTIONS:
        configured = ("--config", str(path / "pyproject.toml"), "--dir", str(path))
        python(session, "-m", "towncrier", "build", "--draft", *configured)


@nox.session(requires=["dev"])
def fuzz(session: nox.Session) -> None:
    """Look for crashes, leaks and differences in native code; after -- the seconds for each half."""
    seconds = session.posargs[0] if session.posargs else "150"
    home = Path(session.virtualenv.location)
    share(session)
    told = session.run(str(DEV), ".ci/sanitizers.py", str(home), str(CORE), external=True, silent=True)
    sanitized = json.loads(str(told))
    wheel = str(next((home / "dist").glob("*.whl")))
    install(session, "--no-deps", "--force-reinstall", wheel, *editable(*DISTRIBUTIONS[1:]))
    plain = {"PYTHONPATH": f"{CORE}/tests/support", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    checked = {**plain, **sanitized}
    names = (
        "driver", "sees", "restored", "reader", "tally", "values_in_place_of_others", "lives_with_processes",
        "lives_with_programs",
    )  # fmt: skip
    suite = (f"{CORE}/tests", *(f"{TORCH}/tests/test_{name}.py" for name in names))
    session.run("python", "-m", "pytest", *WITH_SLOW, "-k", "not pure_python", *suite, env=checked)
    session.run("python", "-m", "interceptor_fuzz.programs", "1000000", "1000", seconds, env=checked)
    of_torch = {**checked, "PYTHONPATH": f"{TORCH}/tests/support"}
    session.run("python", "-m", "torch_shapes", "12", env=of_torch)
    # The sanitizers' own coverage callbacks would hide those of the fuzzer: it has the debugging allocator.
    python(session, "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", "atheris")
    corpus = home / "corpus"
    corpus.mkdir(exist_ok=True)
    limits = (f"-max_total_time={seconds}", "-max_len=400", f"-artifact_prefix={home}/")
    python(session, "-m", "interceptor_fuzz.guided", *limits, str(corpus), **plain, PYTHONMALLOC="debug")
    python(session, "-m", "interceptor_fuzz.leaks", "60", "40", "10", **plain)


@nox.session(venv_backend="none", requires=["dev"])
def dist(session: nox.Session) -> None:
    """Build a wheel of each distribution, and of the example of a tool of others, into build/wheels."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(WHEELS))
    python(session, *pip, *map(str, [*DISTRIBUTIONS, EXAMPLE]))


@nox.session(reuse_venv=False, requires=["dist"])
@nox.parametrize("mix", list(MIXES), ids=list(MIXES))
def wheels(session: nox.Session, mix: str) -> None:
    """Test a mix of wheels and editable installs, in an environment with nothing else of ours."""
    built = [str(next(WHEELS.glob(f"{path.name.replace('-', '_')}-*.whl"))) for path in MIXES[mix]]
    others = [path for path in DISTRIBUTIONS if path not in MIXES[mix]]
    share(session)
    install(session, "--no-deps", *built, *editable(*others))
    session.run("python", "-m", "amanda", "info", "--load")
    chosen = session.posargs or [*WITH_SLOW, *SUITES, *(["tests/packaging"] if mix == "wheels" else [])]
    session.run("python", "-m", "pytest", *chosen, env={"AMANDA_WHEELS": str(WHEELS)})


@nox.session
def release(session: nox.Session) -> None:
    """Build every sdist, each wheel from its sdist, check them, and install them into empty environments."""
    install(session, *group("packaging"))
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for path in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(path))
    if sys.platform == "linux":
        (core,) = dist.glob("amanda_core-*linux_*.whl")
        session.run("auditwheel", "repair", "--wheel-dir", str(dist), str(core))
        core.unlink()
    session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    session.run("python", ".ci/conda.py", str(dist))
    in_empty_environments(session, dist, "tests/packaging/test_installs.py", "torch")


@nox.session(requires=["dist"])
def templates(session: nox.Session) -> None:
    """Make a project of each template, build it, and run its tests in an empty environment."""
    install(session, *group("packaging"))
    in_empty_environments(session, WHEELS, "tests/packaging/test_templates.py")


@nox.session(reuse_venv=False, requires=["dist"])
def third_party(session: nox.Session) -> None:
    """Install wheels of Amanda, and tools and a driver of others, and run the tests of these there."""
    share(session)
    install(session, "--no-deps", *map(str, WHEELS.glob("*.whl")))
    install(session, "copier", "autograd")
    with TemporaryDirectory() as folder, session.chdir(folder):
        answers = ("--data", "tool=magnitude", "--data", "kind=weights", str(ROOT / "templates" / "tool"))
        session.run("copier", "copy", "--quiet", "--defaults", *answers, "magnitude")
        shutil.copytree(EXAMPLE_DRIVER, "driver")
        projects = ("./magnitude", "./driver", str(FAKE_ARRAYS))
        install(session, "--no-deps", "--no-build-isolation", *projects)
        for project in projects[:2]:
            shutil.rmtree(f"{project}/src")
        shutil.copytree(EXAMPLE / "tests", "tests")
        for place in ("tests", "magnitude/tests", "driver/tests"):
            session.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", place, *session.posargs)


@nox.session(requires=["dev"])
def docs(session: nox.Session) -> None:
    """Build the site into build/site, strictly; arguments go to the build.

    Snippets are among the tests.
    """
    install(session, *group("site"))
    share(session)
    install(session, "--no-deps", *editable(*DISTRIBUTIONS))
    session.run("python", "-m", "amanda_docs", *session.posargs, env={"PYTHONPATH": str(ROOT / "website")})


@nox.session(requires=["dev"])
def recipes(session: nox.Session) -> None:
    """Run every recipe of docs/, read files and log steps, with libraries that others lack."""
    share(session)
    install(session, *group("trackers"))
    install(session, "--no-deps", *group("recipes"), *editable(*DISTRIBUTIONS))
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    files = ("tests/tools/test_quantize_converted.py", f"{COMPRESS}/tests/test_quantize_qdq.py",
             f"{LABS}/tests/test_live.py", f"{LABS}/tests/test_live_callbacks.py")  # fmt: skip
    names = "recipes or checkpoint or openvino or live"
    chosen = (*WITH_SLOW, "tests/docs", *files, "-k", names, *session.posargs)
    session.run("python", "-m", "pytest", *chosen, env=env)


@nox.session(requires=["dev"])
def suites(session: nox.Session) -> None:
    """Run test suites of other projects with and without tools; after -- the names of some."""
    share(session)
    table = nox.project.load_toml(ROOT / "tests" / "suites" / "suites.toml")
    chosen = set(table).intersection(session.posargs) or set(table)
    needed = sorted({package for name in chosen for package in table[name]["install"]})
    install(session, "--no-deps", *needed, *editable(*DISTRIBUTIONS))
    session.run(
        "python",
        "tests/suites/run.py",
        *session.posargs,
        env={"PYTHONPATH": f"tests/suites{os.pathsep}tests/support"},
    )


@nox.session(venv_backend="none", requires=["dev"])
def bench(session: nox.Session) -> None:
    """Measure everything into docs/benchmarks.md; after -- the names of some, or --quick."""
    python(session, "benchmarks/run.py", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def paper(session: nox.Session) -> None:
    """Measure the paper's figures into docs/paper-evaluation.md; after -- the numbers of some, or --quick."""
    python(session, "benchmarks/paper/run.py", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Check and measure on a GPU, with the packages that this Python has; after -- stages, or --quick."""
    session.run(sys.executable, "benchmarks/gpu/run.py", *session.posargs, external=True)


def share(session: nox.Session) -> None:
    """Let the environment find what is not ours in the shared one; a .pth inside that one is not followed."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    shared = str(session.run(str(DEV), "-c", code, external=True, silent=True)).strip()
    own = str(session.run("python", "-c", code, silent=True)).strip()
    Path(own, "shared.pth").write_text(f"{shared}\n")


def in_empty_environments(session: nox.Session, dist: Path, tests: str, *groups: str) -> None:
    """Run tests that install what is in a folder, with what others make of it at hand."""
    wheelhouse = Path(session.virtualenv.location, "wheelhouse")
    pip = ("-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheelhouse))
    wanted = ("cffi", "pluggy", "pytest", *group("tools", *groups))
    session.run("python", *pip, "--constraint", "constraints.txt", *wanted)
    given = {"AMANDA_WHEELS": str(dist), "AMANDA_WHEELHOUSE": str(wheelhouse)}
    session.run("python", "-m", "pytest", tests, "-m", "installs", *session.posargs, env=given)

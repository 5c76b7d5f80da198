"""Entry points that distributions register, each loaded on its own; and what further ones would bring."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, requires, version
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from amanda.errors import PluginError
from amanda.interceptor.interrupts import collect_signal_errors

logger = logging.getLogger("amanda")

DRIVERS, TOOLS, COMMANDS, HOOKS = "amanda.drivers", "amanda.tools", "amanda.commands", "amanda.plugins"
ARTEFACTS = "amanda.artefacts"

T = TypeVar("T")
State = Literal["ready", "not loaded", "absent", "broken import", "wrong API", "duplicate"]


@dataclass(frozen=True)
class Plugin:
    """A driver or tool that a distribution registers, and whether it can be used.

    state: "ready"; "not loaded" (nothing asked for it yet); "absent" (its framework is not installed);
    "broken import"; "wrong API" (written for another `DRIVER_API`); "duplicate".
    message: what is the matter and what to do about it; empty when ready.
    """

    name: str
    distribution: str
    version: str
    state: State
    message: str


class PluginEntry:
    """An entry point of a distribution, with its object once that is loaded, or the error of the last try."""

    def __init__(self, point: EntryPoint, distribution: str, version: str) -> None:
        self.name, self.distribution, self.version = point.name, distribution, version
        self._point = point
        self._object: Any = None
        self._failure: PluginError | None = None

    @property
    def was_loaded(self) -> bool:
        """Return True if loading was tried before, also if it failed."""
        return self._object is not None or self._failure is not None

    def load(self, may_retry: bool = True) -> Any:
        """Return the object of the entry point; raise PluginError, with the fix, where its import fails.

        The object is loaded once.
        may_retry: whether an import that failed before is tried once more, as memory or files may be free by
        now.
        """
        if self._failure is not None and not may_retry:
            # A new error, as below: the stored one must not hold frames.
            raise PluginError(str(self._failure)) from self._failure.__cause__
        if self._object is None:
            try:
                self._object, self._failure = run_import(self._point.load), None
            except ImportFailure as failure:
                fix = failure.fix(
                    otherwise=f"{upgrade_command(self.distribution)}, or pip uninstall {self.distribution}"
                )
                self._failure = PluginError(f"{self}: {self._point.value} fails to import ({failure}); {fix}")
                self._failure.__cause__ = failure.__cause__
                # A new error: the stored one would grow by a traceback at each raise, and hold its frames.
                raise PluginError(str(self._failure)) from failure.__cause__
        return self._object

    def plugin(self, state: State, message: str = "") -> Plugin:
        """Return the description of this entry for users."""
        return Plugin(self.name, self.distribution, self.version, state, message)

    def __str__(self) -> str:
        return f"{self.name} of {self.distribution} {self.version}"


class ImportFailure(Exception):
    """An import failed, and not because of a signal; the cause is its exception."""

    def fix(self, otherwise: str, package: str = "") -> str:
        """Return what the user can do about the failure.

        otherwise: the answer where neither a lack of memory, files, disk or access is behind it, nor a
        version of another package: the installation is broken.  package: import name of what was imported.
        """
        cause = self.__cause__
        # A lack of memory or files may lie behind several errors of imports.
        while cause is not None:
            if _is_transient(cause):
                return "free memory, open files or disk, whichever it lacked; the next use tries again"
            if isinstance(cause, PermissionError):
                return f"give your user access to {cause.filename or 'that file'}; the next use tries again"
            if misfit := _misfit_package(cause, package):
                return f"{misfit} does not fit it: pip install another version of {misfit.split()[0]}"
            cause = cause.__cause__ or cause.__context__
        return otherwise


_LACKS_NAME = re.compile(r"module '(\w+)[\w.]*' has no attribute|cannot import name .* from '(\w+)")
_OTHER_NUMPY = re.compile(r"numpy\.dtype size changed|numpy\S* failed to import|compiled using NumPy")


def _misfit_package(error: BaseException, package: str) -> str:
    """Return name and version of a package that is too old or new for the one that failed; "" if unknown.

    package: the one that failed, which is not the answer.
    """
    if match := _LACKS_NAME.search(str(error)):
        name = match[1] or match[2]  # from either of the two messages
    elif _OTHER_NUMPY.search(str(error)):
        name = "numpy"
    else:
        return ""
    try:
        return "" if name == package else f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _is_transient(error: BaseException) -> bool:
    """Return True for a lack of memory, open files or disk, also where it kept a library from opening."""
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    # The loader of libraries has its reason in the text alone: of an ImportError, or of ctypes' OSError.
    is_of_loader = isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None)
    has_reason = any(os.strerror(number) in str(error) for number in _TRANSIENT_ERRNOS)
    return isinstance(error, MemoryError) or (is_of_loader and has_reason)


_TRANSIENT_ERRNOS = (
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ENOSPC,
    errno.EDQUOT,
)  # fmt: skip


def run_import(load: Callable[[], T]) -> T:
    """Call a function that imports; return its result.

    Raises ImportFailure from any exception of the import, also its own KeyboardInterrupt or SystemExit; an
    exception of a signal's handler meanwhile, as of the user's Ctrl-C, is raised as it is.
    """
    with collect_signal_errors() as signal_errors:
        try:
            return load()
        except BaseException as error:
            if signal_errors:
                raise signal_errors[0] from None
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            # Without its frames, which hold whatever the half-imported module had made.
            raise ImportFailure(text) from error.with_traceback(None)


class EntryRegistry:
    """The entry points of the distributions on sys.path, and which of their faults were logged."""

    def __init__(self) -> None:
        self._path: tuple[str, ...] = ()  # sys.path at the last reading
        self._entry_by_key: dict[tuple[str, ...], PluginEntry] = {}  # a key begins with the group
        self._logged_messages: set[str] = set()

    def entries(self, group: str, fresh: bool = True) -> list[PluginEntry]:
        """Return the entries of a group, sorted by name.

        fresh: whether to look for distributions that were installed meanwhile, as always with another
        sys.path.
        """
        path = tuple(sys.path)
        if fresh or self._path != path:
            self._read_entry_points()
            self._path = path
        return [self._entry_by_key[key] for key in sorted(self._entry_by_key) if key[0] == group]

    def _read_entry_points(self) -> None:
        """Read all groups; entries that were there before keep their loaded objects and errors."""
        installed = entry_points()
        entry_by_key: dict[tuple[str, ...], PluginEntry] = {}
        # By distribution, which reads its metadata from the disk each time.
        name_and_version_by_id: dict[int, tuple[str, str]] = {}
        for group in (DRIVERS, TOOLS, COMMANDS, HOOKS, ARTEFACTS):
            for point in installed.select(group=group):
                distribution_id = id(point.dist)
                if distribution_id not in name_and_version_by_id:
                    metadata = (
                        point.dist.metadata if point.dist else {"Name": "unknown", "Version": "unknown"}
                    )
                    name_and_version_by_id[distribution_id] = metadata["Name"], metadata["Version"]
                entry = PluginEntry(point, *name_and_version_by_id[distribution_id])
                key = (group, entry.name, entry.distribution, entry.version, point.value)
                entry_by_key[key] = self._entry_by_key.get(key, entry)
        self._entry_by_key = entry_by_key

    def log_once(self, message: str) -> None:
        """Log a plugin's fault, once."""
        if message not in self._logged_messages:
            self._logged_messages.add(message)
            logger.warning(message)


registry = EntryRegistry()


def rivalry_message(entries: Sequence[PluginEntry]) -> str:
    """Return the message for entries of which only one may be installed, with the fix."""
    return (
        f"{' and '.join(map(str, entries))} stand in each other's way and none is used: keep one, "
        f"pip uninstall {' or '.join(entry.distribution for entry in entries)}"
    )


def upgrade_command(distribution: str) -> str:
    """Return the command that installs a newer version of a distribution, ours from the core's origin."""
    address = _address_beside_core(distribution) if distribution in _our_distributions() else ""
    return f"pip install --upgrade {address or distribution}"


def _our_distributions() -> set[str]:
    """Return the names of the distributions that have the origin of amanda-core."""
    try:
        required = "\n".join(requires("amanda-core") or [])
    except PackageNotFoundError:  # it runs from its sources
        required = ""
    return {"amanda-core", *re.findall(r"^amanda-[\w-]+", required, re.MULTILINE)}


class Offer(NamedTuple):
    """Names of tools, of commands, and of packages of `amanda.tools` that hold no tool of their name."""

    tools: tuple[str, ...]
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


# A table and not a query of an index: an error message must not need the network.
OFFERS = {
    "tools": Offer(
        ("dump", "flops", "mapping", "nan", "profile", "standard_mapping", "stats", "trace"),
        ("diff", "instrument", "merge", "run", "view"),
        ("kit", "libraries", "models", "notebook", "results", "select", "steps"),
    ),
    "compress": Offer(
        ("activation_prune", "attention_prune", "dynamic_channel_prune", "prune", "quantize"),
        ("sweep",),
        (
            "axes", "checkpoints", "dataflow", "dynamic_prune", "effective_flops", "onnx_graph", "plots",
            "trials", "weights",
        ),
    ),
    "labs": Offer(
        ("coverage", "effective_path", "inject", "partition", "patch", "remat", "rewrite", "search",
         "sentinel"),
        packages=("live", "rerun"),
    ),
}  # fmt: skip
"""By the extra of amanda-core that brings them."""


def install_command(name: str, kind: Literal["tools", "commands", "packages"]) -> str | None:
    """Return the command that installs a tool, command or package of ours; None for a name of others."""
    extra = _extra_of(name, kind)
    return None if extra is None else extra_command(extra)


def install_hint(name: str, kind: Literal["tools", "commands", "packages"]) -> str | None:
    """Name the distribution of a tool, command or package of ours, and the command that installs it.

    None for a name of others.
    """
    extra = _extra_of(name, kind)
    if extra is None:
        return None
    return f"it is in {_distribution_of(extra)}, which is not installed: {extra_command(extra)}"


def _extra_of(name: str, kind: Literal["tools", "commands", "packages"]) -> str | None:
    """Return the extra of amanda-core that brings a tool, command or package; None for a name of others."""
    for extra, offer in OFFERS.items():
        # Most tools and commands lie in a package of their name.
        all_names = {*offer.tools, *offer.commands, *offer.packages}
        if name in (all_names if kind == "packages" else getattr(offer, kind)):
            return extra
    return None


def extra_command(*extras: str) -> str:
    """Return the command that installs what extras of amanda-core name.

    The distributions come from the folder or the git repository that amanda-core was installed from, where
    it was: pip would look for an extra's distributions in an index alone.
    """
    requested = {_distribution_of(extra) for extra in extras}
    needed = dict.fromkeys(name for extra in extras for name in _needed_by(extra))
    absent = [name for name in needed if name in requested or not _is_installed(name)]
    addresses = [_address_beside_core(name) for name in absent]
    if all(addresses):
        return f"pip install {' '.join(addresses)}"
    return f'pip install "amanda-core[{",".join(extras)}]"'


def _needed_by(extra: str) -> list[str]:
    """Return the distribution of an extra after those that it depends on, which no index has either."""
    # Each of our distributions of tools depends on those before it.
    extras = [*OFFERS][: [*OFFERS].index(extra) + 1] if extra in OFFERS else [extra]
    return [_distribution_of(name) for name in extras]


def _distribution_of(extra: str) -> str:
    """Return the name of the distribution that an extra of amanda-core names."""
    return f"amanda-{extra}" if extra in OFFERS else f"amanda-driver-{extra.replace('tensorflow', 'tf')}"


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


@cache  # every scope without a driver says how to install one
def _address_beside_core(name: str) -> str:
    """Return what pip installs a distribution from, next to where it found amanda-core; "" for an index."""
    origin = _origin_of_core()
    url, vcs = str(origin.get("url", "")), origin.get("vcs_info", {})
    if vcs and "subdirectory" in origin:
        revision = f"@{vcs['requested_revision']}" if vcs.get("requested_revision") else ""
        folder = PurePosixPath(origin["subdirectory"]).with_name(name)
        return f'"{name} @ {vcs["vcs"]}+{url}{revision}#subdirectory={folder}"'
    if "dir_info" in origin:
        path = Path(url2pathname(urlsplit(url).path)).with_name(name)
        if (path / "pyproject.toml").is_file():
            return f'"{path}"' if " " in str(path) else str(path)
    return ""


def _origin_of_core() -> dict[str, Any]:
    """Return what pip recorded on a direct URL that amanda-core was installed from; {} for an index."""
    try:
        origin: dict[str, Any] = json.loads(distribution("amanda-core").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError, OSError):
        return {}
    return origin


def import_from(package: str, name: str) -> Any:
    """Return a name of a package that another of Amanda's distributions may hold.

    Raises ImportError, with the command that installs the package, where it is not installed.

    Args:
        package: Import path below `amanda.tools`.
        name: Name in the package.
    """
    try:
        return getattr(import_module(package), name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        command = install_command(package.rpartition(".")[2], "packages")
        raise ImportError(f"{name} is in {package}, which is not installed: {command}") from None

"""Compile the native interceptor into the wheel; where that fails, leave it out and say so."""

from __future__ import annotations

import hashlib
import os
import platform
import runpy
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = Path("src", "amanda", "interceptor")
COMPILED_FROM = {"_build.py", ".c", ".h"}
CHANGES_THE_BUILD = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "LDSHARED")


class NativeInterceptorHook(BuildHookInterface[Any]):
    """`AMANDA_NATIVE=0` leaves the interceptor out, `AMANDA_REQUIRE_NATIVE=1` insists on it."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root, PACKAGE)
        required = os.environ.get("AMANDA_REQUIRE_NATIVE") == "1"
        try:
            library = self.library(package)
        except (Exception, SystemExit) as failure:
            message = f"amanda-core: no native interceptor ({type(failure).__name__}: {failure})"
            if required:
                raise RuntimeError(f"{message}, and AMANDA_REQUIRE_NATIVE=1 asks for it") from failure
            self.app.display_warning(f"{message}; the pure-Python fallback takes its place")
            if version == "editable":
                (package / library_name()).unlink(missing_ok=True)  # it may be of other sources
            return
        if version == "editable":
            place(library, package)
        else:
            build_data["force_include"][str(library)] = f"amanda/interceptor/{library.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def library(self, package: Path) -> Path:
        """The compiled interceptor, from the cache or compiled now."""
        if os.environ.get("AMANDA_NATIVE") == "0":
            raise RuntimeError("switched off by AMANDA_NATIVE=0")
        if platform.python_implementation() != "CPython":
            raise RuntimeError(f"needs CPython, this is {platform.python_implementation()}")
        self.scratch = tempfile.TemporaryDirectory(prefix="amanda-")  # lives as long as the hook
        folder = cache_folder() / build_key(package)
        cached = folder / library_name()
        if cached.exists():
            return cached
        compiled = self.compile(package)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return place(compiled, folder)
        except OSError as failure:
            self.app.display_warning(f"amanda-core: the build cannot be cached ({failure})")
            return compiled

    def compile(self, package: Path) -> Path:
        ffibuilder = runpy.run_path(str(package / "_build.py"))["ffibuilder"]
        self.app.display_info("amanda-core: compiling the native interceptor")
        return Path(ffibuilder.compile(tmpdir=self.scratch.name))


def library_name() -> str:
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def cache_folder() -> Path:
    """Where compiled interceptors of this user are kept."""
    if given := os.environ.get("AMANDA_CACHE_DIR"):
        return Path(given)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "amanda" / "native"


def build_key(package: Path) -> str:
    """Hash of all that the compiled interceptor depends on: its sources, this Python, the flags."""
    import cffi

    key = hashlib.sha256(f"{sys.version} {library_name()} {cffi.__version__}".encode())
    for name in CHANGES_THE_BUILD:
        key.update(f"\0{name}={os.environ.get(name)}".encode())
    for source in sorted(package.rglob("*")):
        if COMPILED_FROM & {source.name, source.suffix}:
            key.update(f"\0{source.relative_to(package).as_posix()}\0".encode())
            key.update(source.read_bytes())
    return key.hexdigest()[:24]


def place(library: Path, folder: Path) -> Path:
    """Put a copy into the folder in one step: a running process may have the old one mapped."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        part.write(library.read_bytes())
    target = folder / library.name
    shutil.copymode(library, part.name)
    return Path(part.name).replace(target)

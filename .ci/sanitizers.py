"""Build the interceptor with AddressSanitizer and UBSan.

`python sanitizers.py FOLDER PACKAGE` builds the wheel of amanda-core, whose sources are in PACKAGE, into
FOLDER/dist, and prints, as JSON, the environment variables with which Python runs it. Linux, with gcc.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
FLAGS = f"-O1 -g -fno-omit-frame-pointer {SANITIZERS} -DAMANDA_CHECKED"


def main(folder: Path, package: Path) -> None:
    """Build the wheel, and print the variables."""
    compiler, build = folder / "cc", folder / "build"
    compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CC", "gcc")} "$@" {FLAGS}\n')
    compiler.chmod(0o755)
    for place in (build, folder / "dist"):
        shutil.rmtree(place, ignore_errors=True)
    build.mkdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    switches = {"CC": str(compiler), "AMANDA_REQUIRE_NATIVE": "1"}
    subprocess.run(
        [*pip, "--wheel-dir", folder / "dist", package],
        env=os.environ | switches,
        stdout=sys.stderr,
        check=True,
    )
    libraries = [
        subprocess.check_output(["gcc", f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    variables = {
        "AMANDA_FUZZ_BUILD": str(build),
        "CC": str(compiler),
        "LD_PRELOAD": " ".join(libraries),
        # Python leaks at its end; freed memory is overwritten because Python itself is not compiled for it.
        "ASAN_OPTIONS": "detect_leaks=0:max_free_fill_size=65536:free_fill_byte=221:quarantine_size_mb=64",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    print(json.dumps(variables))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

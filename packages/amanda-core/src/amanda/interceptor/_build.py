"""Builds the native interceptor with cffi; run by the build hook of amanda-core."""

import sysconfig
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).parent / "native"
# A thread's state is read at every op: the general model of thread-local storage calls a function for it.
# But musl loads no library of the model initial-exec.
TLS_MODEL = "global-dynamic" if "musl" in str(sysconfig.get_config_var("EXT_SUFFIX")) else "initial-exec"

ffibuilder = FFI()
ffibuilder.cdef("int amanda_boot(void *names);")
ffibuilder.set_source(
    "amanda.interceptor._native",
    "int amanda_boot(void *names);",
    sources=[str(path) for path in sorted(NATIVE.rglob("*.c"))],
    depends=[str(path) for path in sorted(NATIVE.rglob("*.h"))],
    include_dirs=[str(NATIVE)],
    define_macros=[("_CFFI_NO_LIMITED_API", None)],
    extra_compile_args=[
        *("-O3", "-g0", "-fno-plt", "-fvisibility=hidden", f"-ftls-model={TLS_MODEL}", "-fopenmp-simd"),
        *("-Wall", "-Wextra"),
    ],
    # The stubs read structures that the limited API hides: one build serves one minor version of CPython.
    py_limited_api=False,
)

"""Where a tensor of this build of torch keeps what native code asks of each, found by trying."""

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

_LIBRARIES = {"linux": "lib{}.so", "darwin": "lib{}.dylib"}
_SWITCHES = "_ZN3c1013AutogradState13get_tls_stateEv"  # c10::AutogradState &get_tls_state()
_WORD = ctypes.sizeof(ctypes.c_void_p)
_END = 22 * _WORD
"""Bytes of a tensor that are looked at; it is longer in every version."""


class Functions:
    """Addresses of functions in torch's libraries."""

    def __init__(self) -> None:
        home = Path(torch.__file__).parent / "lib"
        names = [_LIBRARIES[sys.platform].format(name) for name in ("torch_cpu", "c10")]
        self._libraries = [ctypes.CDLL(str(home / name)) for name in names]

    def address(self, name: str) -> int:
        """Return where a function lies; LookupError where it does not."""
        for library in self._libraries:
            function = getattr(library, name, None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p).value or 0
        raise LookupError(name)

    def addresses(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return where each of these functions lies."""
        return tuple(map(self.address, names))


Layout = tuple[int, int, int, int, int, int, int, int]


def layout(functions: Functions) -> tuple[Layout | None, str]:
    """Return the layout of plain tensors as `interceptor.Reader` wants it, and what of it is not found.

    None where something is not: functions of torch are called then, at twice the cost.
    """
    with torch.inference_mode(False), torch.enable_grad():
        try:
            switches = functions.address(_SWITCHES)
            found = (*_counter(), _kind(), _rank(), _autodiff(), switches, *_switch(switches))
        except LookupError as error:
            return None, str(error)
    return found, ""


def _read(kind: "type[ctypes._SimpleCData[int]]", samples: Iterable[torch.Tensor], offset: int) -> list[int]:
    return [kind.from_address(sample._cdata + offset).value for sample in samples]


def _first(fits: Callable[[int], bool], step: int = _WORD, start: int = _WORD) -> int:
    for offset in range(start, _END, step):
        if fits(offset):
            return offset
    raise LookupError("a part of a tensor")


def _counter() -> tuple[int, int]:
    """Return where the pointer to a tensor's version counter lies, and where the version in that."""
    samples = [torch.zeros(2) for _ in range(3)]
    for times, sample in enumerate(samples):
        for _ in range(300 + 77 * times):
            sample.zero_()
    detached = [sample.detach() for sample in samples]
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    versions = [sample._version for sample in samples]
    numbers = range(2 * _WORD, 3 * _WORD, 4)

    def numbered(offset: int) -> int | None:
        counters = _read(ctypes.c_uint64, samples, offset)
        # A tensor and what is detached from it share an object for this, and one for their memory: both are
        # on the heap and longer than `numbers`.
        if counters != _read(ctypes.c_uint64, detached, offset) or len({0, *counters}) != 4:
            return None
        if any(_read(ctypes.c_uint64, [unversioned], offset)):
            return None
        held = {n: [ctypes.c_uint32.from_address(one + n).value for one in counters] for n in numbers}
        return next((n for n in numbers if held[n] == versions), None)

    offset = _first(lambda offset: offset < 8 * _WORD and numbered(offset) is not None)
    number = numbered(offset)
    assert number is not None
    return offset, number


def _kind() -> int:
    """Return where 32 bits lie that tell the dtype, in the first two bytes, and then the device."""
    dtypes = (torch.float32, torch.float64, torch.int8, torch.int64, torch.bool, torch.bfloat16)
    on = {device: [torch.zeros(2, dtype=one, device=device) for one in dtypes] for device in ("cpu", "meta")}
    alike = [torch.zeros(3, 4, dtype=one).t() for one in dtypes]

    def fits(offset: int) -> bool:
        cpu, meta = (_read(ctypes.c_uint32, samples, offset) for samples in on.values())
        same = cpu == _read(ctypes.c_uint32, alike, offset)
        numbers = [word & 0xFFFF for word in cpu]
        devices = {word >> 16 & 0xFF for word in cpu}, {word >> 16 & 0xFF for word in meta}
        apart = len(set(numbers)) == len(dtypes) and devices[0] != devices[1]
        no_index = all(word >> 24 == 0xFF for word in (*cpu, *meta))
        return same and apart and no_index and numbers == [word & 0xFFFF for word in meta]

    return _first(fits, step=4)


def _rank() -> int:
    """Return where the number of a tensor's dimensions lies."""
    shapes = ((), (7,), (7, 3), (2, 5, 2), (1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 3))
    samples = [torch.zeros(shape) for shape in shapes]
    return _first(lambda offset: _read(ctypes.c_uint64, samples, offset) == [s.dim() for s in samples])


def _autodiff() -> int:
    """Return where a pointer lies that is NULL unless autograd knows the tensor."""
    plain = [torch.zeros(2), torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]  # views have one
    known = [torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.zeros(1))]
    known.append(known[0] * 2)

    def fits(offset: int) -> bool:
        none = not any(_read(ctypes.c_uint64, plain, offset))
        return none and len({0, *_read(ctypes.c_uint64, known, offset)}) == len(known) + 1

    return _first(fits)


def _switch(switches: int) -> tuple[int, int]:
    """Return which byte of a thread's switches, and which bit of that, is set while gradients are on."""
    address = ctypes.PYFUNCTYPE(ctypes.c_void_p)(switches)() or 0
    with torch.no_grad():
        off = ctypes.string_at(address, 4 * _WORD)
    with torch.enable_grad():
        on = ctypes.string_at(address, 4 * _WORD)
    changed = [(i, one ^ other) for i, (one, other) in enumerate(zip(on, off, strict=True)) if one != other]
    if len(changed) != 1 or changed[0][1].bit_count() != 1 or not on[changed[0][0]] & changed[0][1]:
        raise LookupError("autograd's switches")
    return changed[0]

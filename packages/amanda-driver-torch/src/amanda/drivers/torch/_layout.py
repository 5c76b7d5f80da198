"""Memory offsets of a tensor's version, dtype, rank and autograd state in this build of torch.

Torch documents no layout, so each offset is searched for: samples that differ in one fact must differ in the
word at that offset, and samples that share the fact must share the word.
"""

import ctypes
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

_LIBRARIES = {"linux": "lib{}.so", "darwin": "lib{}.dylib"}
_GET_SWITCHES = "_ZN3c1013AutogradState13get_tls_stateEv"  # c10::AutogradState &get_tls_state()
_WORD = ctypes.sizeof(ctypes.c_void_p)
_END = 22 * _WORD
"""Length of the searched bytes of a tensor, which is longer in every version of torch."""


class Libraries:
    """Addresses of functions in torch's libraries."""

    def __init__(self) -> None:
        home = Path(torch.__file__).parent / "lib"
        names = [_LIBRARIES[sys.platform].format(name) for name in ("torch_cpu", "c10")]
        self._libraries = [ctypes.CDLL(str(home / name)) for name in names]

    def address(self, name: str) -> int:
        """Return the address of a function; raise LookupError if the libraries lack the function."""
        for library in self._libraries:
            function = getattr(library, name, None)
            if function is not None:
                return ctypes.cast(function, ctypes.c_void_p).value or 0
        raise LookupError(name)

    def addresses(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the address of each of these functions."""
        return tuple(map(self.address, names))


Layout = tuple[int, int, int, int, int, int, int, int]


def find_layout(libraries: Libraries) -> tuple[Layout | None, str]:
    """Return the layout of plain tensors for `interceptor.Reader`, and the part that was not found, or "".

    The layout is None if a part was not found: native code then calls functions of torch, at twice the cost.
    """
    # The first scope may open under inference_mode or no_grad, where samples would lack versions and nodes.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            switches = libraries.address(_GET_SWITCHES)
            offsets = (
                *_version_offsets(),
                _dtype_offset(),
                _rank_offset(),
                _autograd_offset(),
                switches,
                *_grad_mode_bit(switches),
            )
        except LookupError as error:
            return None, str(error)
    return offsets, ""


def _words_at(
    word_type: "type[ctypes._SimpleCData[int]]", samples: Iterable[torch.Tensor], offset: int
) -> list[int]:
    """Return the word at an offset in the TensorImpl of each sample."""
    return [word_type.from_address(sample._cdata + offset).value for sample in samples]


def _first_offset(fits: Callable[[int], bool], step: int = _WORD, start: int = _WORD) -> int:
    """Return the first offset that fits, within the searched bytes; raise LookupError if none does."""
    for offset in range(start, _END, step):
        if fits(offset):
            return offset
    raise LookupError("a part of a tensor")


def _version_offsets() -> tuple[int, int]:
    """Return the offset of the pointer to a tensor's version counter, and of the version in the counter."""
    # Versions that differ from each other and from small constants, so that no other word equals them.
    samples = [torch.zeros(2) for _ in range(3)]
    for index, sample in enumerate(samples):
        for _ in range(300 + 77 * index):
            sample.zero_()
    detached = [sample.detach() for sample in samples]
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    versions = [sample._version for sample in samples]
    places = range(2 * _WORD, 3 * _WORD, 4)  # in a counter, behind its vtable pointer and reference counts

    def offset_in_counter(offset: int) -> int | None:
        """Return the version's offset in what the word at `offset` points to; None for any other word."""
        counters = _words_at(ctypes.c_uint64, samples, offset)
        # A tensor and what is detached from it share an object for this, and one for their memory: both are
        # on the heap and longer than `places`. Four values: 0 and three different counters.
        if counters != _words_at(ctypes.c_uint64, detached, offset) or len({0, *counters}) != 4:
            return None
        if any(_words_at(ctypes.c_uint64, [unversioned], offset)):
            return None
        words = {
            place: [ctypes.c_uint32.from_address(counter + place).value for counter in counters]
            for place in places
        }
        return next((place for place in places if words[place] == versions), None)

    offset = _first_offset(lambda offset: offset < 8 * _WORD and offset_in_counter(offset) is not None)
    version_offset = offset_in_counter(offset)
    assert version_offset is not None
    return offset, version_offset


def _dtype_offset() -> int:
    """Return the offset of 32 bits with the dtype, in the first two bytes, and the device after it."""
    dtypes = (torch.float32, torch.float64, torch.int8, torch.int64, torch.bool, torch.bfloat16)
    samples_by_device = {
        device: [torch.zeros(2, dtype=dtype, device=device) for dtype in dtypes] for device in ("cpu", "meta")
    }
    transposed = [torch.zeros(3, 4, dtype=dtype).t() for dtype in dtypes]

    def fits(offset: int) -> bool:
        """Return True if the word differs by dtype and device alone, and has no device index."""
        cpu, meta = (_words_at(ctypes.c_uint32, samples, offset) for samples in samples_by_device.values())
        ignores_strides = cpu == _words_at(ctypes.c_uint32, transposed, offset)
        # From the lowest bits on: 16 of the dtype, 8 of the device type, 8 of the device index.
        dtype_numbers = [word & 0xFFFF for word in cpu]
        devices = {word >> 16 & 0xFF for word in cpu}, {word >> 16 & 0xFF for word in meta}
        has_distinct_words = len(set(dtype_numbers)) == len(dtypes) and devices[0] != devices[1]
        has_no_index = all(word >> 24 == 0xFF for word in (*cpu, *meta))
        is_dtype = dtype_numbers == [word & 0xFFFF for word in meta]
        return ignores_strides and has_distinct_words and has_no_index and is_dtype

    return _first_offset(fits, step=4)


def _rank_offset() -> int:
    """Return the offset of the number of a tensor's dimensions."""
    shapes = ((), (7,), (7, 3), (2, 5, 2), (1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 3))
    samples = [torch.zeros(shape) for shape in shapes]
    return _first_offset(
        lambda offset: _words_at(ctypes.c_uint64, samples, offset) == [s.dim() for s in samples]
    )


def _autograd_offset() -> int:
    """Return the offset of a pointer that is NULL unless autograd knows the tensor."""
    # No view among the plain samples: views have autograd metadata even without a gradient.
    plain = [torch.zeros(2), torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]
    recorded = [torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.zeros(1))]
    recorded.append(recorded[0] * 2)

    def fits(offset: int) -> bool:
        """Return True if the word is 0 in plain tensors, and another pointer in each recorded tensor."""
        is_null = not any(_words_at(ctypes.c_uint64, plain, offset))
        return is_null and len({0, *_words_at(ctypes.c_uint64, recorded, offset)}) == len(recorded) + 1

    return _first_offset(fits)


def _grad_mode_bit(switches: int) -> tuple[int, int]:
    """Return the byte of a thread's switches, and the bit in it, that is set while gradients are on.

    Raises LookupError unless the two modes differ in exactly one bit.  switches: address of the function
    that returns the switches.
    """
    # The switches are thread-local: native code calls this function once per thread, then reads the byte.
    address = ctypes.PYFUNCTYPE(ctypes.c_void_p)(switches)() or 0
    with torch.no_grad():
        off = ctypes.string_at(address, 4 * _WORD)
    with torch.enable_grad():
        on = ctypes.string_at(address, 4 * _WORD)
    pairs = zip(on, off, strict=True)
    changed = [(i, byte_on ^ byte_off) for i, (byte_on, byte_off) in enumerate(pairs) if byte_on != byte_off]
    if len(changed) == 1:
        offset, flipped_bits = changed[0]
        if flipped_bits.bit_count() == 1 and on[offset] & flipped_bits:
            return offset, flipped_bits
    raise LookupError("autograd's switches")

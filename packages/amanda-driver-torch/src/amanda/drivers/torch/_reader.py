"""The reader by which native code reads tensors: addresses of C functions, and offsets in this torch.

Torch documents no layout of tensors, so each offset is searched for: samples that differ in one fact must
differ in the word at that offset, and samples that share the fact must share the word.
"""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from amanda import interceptor

from ._levels import call_with_wrappers, layers

logger = logging.getLogger("amanda")

_native: Any = torch._C  # its stubs lack what is used here

_DESCRIBING_FUNCTIONS = ("aoti_torch_get_dtype", "aoti_torch_get_dim", "aoti_torch_get_device_type",
             "aoti_torch_get_device_index")  # fmt: skip
_AUTODIFF_FUNCTIONS = (
    "_ZNK3c1010TensorImpl13requires_gradEv",  # bool c10::TensorImpl::requires_grad() const
    "_ZN2at6native12is_inferenceERKNS_6TensorE",  # bool at::native::is_inference(const at::Tensor &)
    "_ZNK2at10TensorBase8_versionEv",  # int64_t at::TensorBase::_version() const
    "_ZN3c108GradMode10is_enabledEv",  # bool c10::GradMode::is_enabled()
    "_ZN3c108GradMode11set_enabledEb",  # void c10::GradMode::set_enabled(bool)
    "_ZN2at15sequence_number4peekEv",  # uint64_t at::sequence_number::peek()
)
_STRIDES = "aoti_torch_get_strides"
_FUNCTION_MODE = "_ZN2at4impl27torch_function_mode_enabledEv"
_KEY_INCLUDED = "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"
_TRANSFORM = "FuncTorchDynamicLayerFrontMode"
_MODE_KEYS = ("Python", _TRANSFORM, "Tracer")
"""Included where a dispatch mode, a transform of torch.func, or torch.jit.trace is in force."""


_VALUE_FUNCTIONS = (
    "aoti_torch_get_sizes",
    "aoti_torch_get_dim",
    "_ZNK3c1010TensorImpl8_fw_gradEmRKN2at10TensorBaseE",  # const Tensor &_fw_grad(level, tensor) const
    "_ZNK2at10TensorBase7is_leafEv",  # bool at::TensorBase::is_leaf() const
)


def make_reader(
    straight_through: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[interceptor.Reader | None, str]:
    """Return a reader of tensors for native code, and the part that it lacks, or ""; log a warning of a lack.

    None stands for a build of torch that cannot be read: Python does the same work at a multiple of the time.
    Without a layout of tensors native code calls functions of torch, and Python reads numbers.
    straight_through: returns a value whose gradient goes to an original.
    """
    try:
        libraries = Libraries()
        tensor_layout, missing_part = find_layout(libraries)
        element_layout = None
        if tensor_layout is not None:
            element_layout, missing_part = _element_layout(libraries)
        # In these modes native code hands calls to Python, which knows how to leave and enter them.
        mode_is_enabled = libraries.address(_FUNCTION_MODE)
        key_is_included = libraries.address(_KEY_INCLUDED)
        reader = interceptor.Reader(
            tensors=(torch.Tensor, torch.nn.Parameter),
            plain=(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
            offset=_handle_offset(),
            describe=libraries.addresses(_DESCRIBING_FUNCTIONS),
            extents="shape",
            modes=(
                (mode_is_enabled, 0),
                *((key_is_included, int(_native._parse_dispatch_key(key))) for key in _MODE_KEYS),
            ),
            autodiff=libraries.addresses(_AUTODIFF_FUNCTIONS),
            values=(
                *libraries.addresses(_VALUE_FUNCTIONS),
                _storage_offset(),
                torch.empty(1),
                straight_through,
            ),
            layout=tensor_layout,
            wrappers=_wrapper_layout(),
            elements=element_layout,
        )
        # Symbols may exist and mean something else in another build: a trial on samples decides.
        if _reads_correctly(reader):
            if missing_part:
                logger.warning(_READS_SLOWLY, torch.__version__, missing_part)
            return reader, missing_part
        reason = "its tensors are not as this driver knows them"
    except (AttributeError, OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        reason = f"it lacks {error}"
    logger.warning(_READS_NOTHING, torch.__version__, reason)
    return None, reason


_READS_NOTHING = (
    "native code cannot read the tensors of torch %s, so routines are several times slower: %s; "
    "a version of amanda-driver-torch for this torch can: pip install --upgrade amanda-driver-torch"
)
_READS_SLOWLY = "native code reads the tensors of torch %s in part, so that routines take longer: it lacks %s"


def _handle_offset() -> int:
    """Return the offset, in a tensor's Python object, of the pointer to its TensorImpl (`_cdata`)."""
    samples = [torch.empty(0), torch.nn.Parameter(torch.empty(1)), torch.empty(2, dtype=torch.int8)]
    start, size = object.__basicsize__, torch.Tensor.__basicsize__
    for offset in range(start, size, ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(id(sample) + offset).value for sample in samples]
        if pointers == [sample._cdata for sample in samples]:
            return offset
    raise LookupError("the handle of a tensor")


def _wrapper_layout() -> tuple[int, int, tuple[torch.Tensor, ...]]:
    """Return the index of transforms among modes, the offset of a wrapper's tensor, and sample wrappers."""

    def offset_and_wrappers(*wrappers: torch.Tensor) -> tuple[int, tuple[torch.Tensor, ...]]:
        return _content_offset(wrappers), wrappers

    # Within the transforms, which would unwrap wrappers that they return.
    offset, samples = call_with_wrappers(offset_and_wrappers, torch.empty(2))
    mode_index = 1 + _MODE_KEYS.index(_TRANSFORM)  # the function mode comes before these
    return mode_index, offset, samples


def _content_offset(samples: tuple[torch.Tensor, ...]) -> int:
    """Return the offset, in wrappers of transforms, of the pointer to the tensor that they wrap."""
    wrapped_addresses = []  # addresses of the wrapped tensors
    for sample in samples:
        _, wrapped_tensor, *_ = layers(sample)
        wrapped_addresses.append(wrapped_tensor._cdata)
    for offset in range(0, _WRAPPER_SIZE, ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(sample._cdata + offset).value for sample in samples]
        if pointers == wrapped_addresses:
            return offset
    raise LookupError("the tensor within a wrapper of torch.func")


_WRAPPER_SIZE = 256
"""Bytes of a wrapper in which the pointer to its tensor is looked for; wrappers have more."""


def _storage_offset() -> int:
    """Return the offset, in a TensorImpl, of the pointer to the tensor's storage."""
    samples = [torch.empty(1), torch.empty(3).view(3, 1), torch.empty(2, dtype=torch.int8)]
    storages = [sample.untyped_storage()._cdata for sample in samples]
    for offset in range(0, 8 * ctypes.sizeof(ctypes.c_void_p), ctypes.sizeof(ctypes.c_void_p)):
        pointers = [ctypes.c_void_p.from_address(sample._cdata + offset).value for sample in samples]
        if pointers == storages:
            return offset
    raise LookupError("the storage of a tensor")


def _element_layout(libraries: "Libraries") -> tuple[tuple[Any, ...] | None, str]:
    """Return where numbers of tensors lie in host memory, and the part that was not found, or "".

    With it, which bits of an element say NaN or Inf.  None if a part was not found: Python then reads the
    numbers, which takes longer.
    """
    starts, lengths = [1, 3, 2], [4, 9, 5]
    samples = [torch.zeros(length)[start:] for start, length in zip(starts, lengths, strict=True)]
    storages = [sample.untyped_storage() for sample in samples]
    kinds = [(torch.zeros(1, dtype=dtype), width, mask) for dtype, (width, mask) in _EXPONENTS.items()]

    def offset_of(words: list[int]) -> int:
        """Return the offset of a word in the storages; raise LookupError if there is none."""
        for offset in range(0, 10 * _WORD, _WORD):
            if [ctypes.c_uint64.from_address(storage._cdata + offset).value for storage in storages] == words:
                return offset
        raise LookupError("a part of a storage")

    try:
        data = offset_of([storage.data_ptr() for storage in storages])
        size = offset_of([storage.nbytes() for storage in storages])
        start = _first_offset(lambda place: _words_at(ctypes.c_int64, samples, place) == starts)
        strides = libraries.address(_STRIDES)
        return (data, size, start, *_negation_key(), strides, tuple(kinds)), ""
    except LookupError as error:
        return None, str(error)


def _negation_key() -> tuple[int, int]:
    """Return the offset of a tensor's dispatch keys, and the key of tensors that negate their memory."""
    # Several, since a pointer may differ in one bit by chance. The numbers of a conjugate are not in memory.
    numbers = [torch.zeros(length, dtype=torch.complex64) for length in (2, 3, 5, 7, 1, 4)]
    plain, negated = [number.imag for number in numbers], [number.conj().imag for number in numbers]

    def changed_bits(offset: int) -> set[int]:
        pairs = zip(
            *(_words_at(ctypes.c_uint64, samples, offset) for samples in (plain, negated)), strict=True
        )
        return {plain_word ^ negated_word for plain_word, negated_word in pairs}

    def is_one_key(offset: int) -> bool:
        words = _words_at(ctypes.c_uint64, plain, offset)
        changed = changed_bits(offset)
        return len(set(words)) == len(changed) == 1 and min(changed).bit_count() == 1

    offset = _first_offset(is_one_key)
    return offset, min(changed_bits(offset))


_EXPONENTS = {
    torch.float32: (4, 0xFF << 23), torch.float64: (8, 0x7FF << 52), torch.float16: (2, 0x1F << 10),
    torch.bfloat16: (2, 0xFF << 7), torch.uint8: (1, 0), torch.int8: (1, 0), torch.int16: (2, 0),
    torch.int32: (4, 0), torch.int64: (8, 0), torch.bool: (1, 0),
}  # fmt: skip
"""Bytes of an element, and the bits that are all set in one that is not finite; 0 for integers."""


def _reads_correctly(reader: interceptor.Reader) -> bool:
    """Return True if the reader reads keys, versions, memory and forms of sample tensors as they are."""
    with torch.inference_mode(False), torch.enable_grad():
        plain, trained = torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)
        return (
            _reads_keys(reader, plain, trained)
            and _reads_sizes(reader, plain)
            and _reads_versions(reader)
            and _reads_memory(reader, plain)
            and _finds_substitutes(reader, plain, trained)
            and _reads_layers(reader, plain, trained)
        )


def _reads_keys(reader: interceptor.Reader, plain: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return True if the keys of arguments tell dtype, rank, device and need of a gradient, and nothing else.

    Key 0 stands for arguments that the reader cannot read.
    """
    key = reader.key((plain, 1))
    has_equal_keys = key != 0 and key == reader.key((torch.ones(4, 5), 2))
    other_tensors = [plain.double(), torch.zeros(2), torch.zeros(2, 3, device="meta"), trained]
    has_distinct_keys = all(reader.key((tensor, 1)) not in (0, key) for tensor in other_tensors)
    with torch.no_grad():
        ignores_gradients = reader.key((trained, 1)) == reader.key((plain, 1)) != key
    return has_equal_keys and has_distinct_keys and ignores_gradients


def _reads_sizes(reader: interceptor.Reader, plain: torch.Tensor) -> bool:
    """Return True if keys with sizes are equal for tensors of the same sizes, and differ for others."""
    with_sizes = True
    key = reader.key((plain, 1), {}, with_sizes)
    key_for_equal_sizes = reader.key((torch.ones(2, 3), 2), {}, with_sizes)
    key_for_other_sizes = reader.key((torch.ones(3, 2), 1), {}, with_sizes)
    return key == key_for_equal_sizes != 0 and key != key_for_other_sizes


def _reads_versions(reader: interceptor.Reader) -> bool:
    """Return True if versions count the writes into a tensor, and an inference tensor has none."""
    tensor = torch.zeros(2, 3)
    first_version = reader.version(tensor)
    tensor.zero_()
    with torch.inference_mode():
        has_no_version = reader.version(torch.zeros(1)) is None
    return first_version == 0 and reader.version(tensor) == 1 and has_no_version


def _reads_memory(reader: interceptor.Reader, plain: torch.Tensor) -> bool:
    """Return True if the memory of a view is that of its base, of no equal tensor, and within its storage."""
    view, equal_tensor, row = plain.view(6), torch.ones(2, 3), plain[1]
    shrunk = torch.zeros(3)
    shrunk.untyped_storage().resize_(8)
    spans = [reader.host_memory(tensor) for tensor in (plain.t(), row, plain[:, 2], shrunk, plain[2:])]
    start, width = plain.data_ptr(), plain.element_size()
    right_spans = [
        (start, 6 * width, True), (row.data_ptr(), 3 * width, True), (start + 2 * width, 4 * width, False),
        None,
    ]  # fmt: skip
    negated = torch.zeros(1, dtype=torch.complex64).conj().imag
    _, _, is_dense = reader.host_memory(negated) or (0, 0, False)
    reads_spans = spans[:4] in (right_spans, [None] * 4) and not is_dense
    reads_memory = reader.memory(plain) == reader.memory(view) != reader.memory(equal_tensor) != 0
    return reads_memory and reads_spans


def _finds_substitutes(reader: interceptor.Reader, plain: torch.Tensor, trained: torch.Tensor) -> bool:
    """Return True if a tensor of the same form can stand for another, and no other value can."""
    same_form = torch.ones(2, 3)
    misfits = [same_form.double(), same_form.t(), trained, same_form.to_sparse(), torch.zeros(1), None]
    fits = reader.can_substitute(plain, same_form) and reader.can_substitute(trained, same_form)
    return fits and not any(reader.can_substitute(plain, misfit) for misfit in misfits)


def _reads_layers(reader: interceptor.Reader, *tensors: torch.Tensor) -> bool:
    """Return True if keys under transforms tell apart plain, batched, tracked and detached tensors."""

    def layer_keys(batched: torch.Tensor, tracked: torch.Tensor) -> list[int]:
        samples = *tensors, batched, tracked, tracked.detach()
        return [reader.key((sample,)) for sample in samples]

    keys = call_with_wrappers(layer_keys, tensors[0])
    return 0 not in keys and len({*keys}) == len(keys)


_LIBRARIES = {"linux": "lib{}.so", "darwin": "lib{}.dylib"}
_GET_SWITCHES = "_ZN3c1013AutogradState13get_tls_stateEv"  # c10::AutogradState &get_tls_state()
_WORD = ctypes.sizeof(ctypes.c_void_p)
_END = 23 * _WORD
"""Length of the searched bytes of a tensor, which ends with its keys; a word shorter since torch 2.13."""


class Libraries:
    """Addresses of functions in torch's libraries."""

    def __init__(self) -> None:
        library_folder = Path(torch.__file__).parent / "lib"
        names = [_LIBRARIES[sys.platform].format(name) for name in ("torch_cpu", "c10")]
        self._libraries = [ctypes.CDLL(str(library_folder / name)) for name in names]

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
    """Return the layout of tensors for `interceptor.Reader`, and the part that was not found, or "".

    The layout is None if a part was not found: native code then calls functions of torch, at twice the cost.
    """
    # The first scope may open under inference_mode or no_grad, where samples would lack versions and nodes.
    with torch.inference_mode(False), torch.enable_grad():
        try:
            get_switches = libraries.address(_GET_SWITCHES)
            layout = (
                *_version_offsets(),
                _dtype_offset(),
                _rank_offset(),
                _autograd_offset(),
                get_switches,
                *_grad_mode_bit(get_switches),
            )
        except LookupError as error:
            return None, str(error)
    return layout, ""


def _words_at(
    word_type: "type[ctypes._SimpleCData[int]]", samples: Iterable[torch.Tensor], offset: int
) -> list[int]:
    """Return the word at an offset in the TensorImpl of each sample."""
    return [word_type.from_address(sample._cdata + offset).value for sample in samples]


def _first_offset(fits: Callable[[int], bool], step: int = _WORD, start: int = _WORD) -> int:
    """Return the first offset in a tensor's memory that fits; raise LookupError if none does."""
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
    detached_samples = [sample.detach() for sample in samples]
    with torch.inference_mode():
        inference_tensor = torch.zeros(2)
    versions = [sample._version for sample in samples]
    # Offsets in a counter that may be the version's: behind its vtable pointer and reference counts.
    version_offsets = range(2 * _WORD, 3 * _WORD, 4)

    def offset_in_counter(offset: int) -> int | None:
        """Return the version's offset in what the word at `offset` points to; None for any other word."""
        counters = _words_at(ctypes.c_uint64, samples, offset)  # addresses, if the word is the pointer
        # A tensor and what is detached from it share an object for this, and one for their memory: both are
        # on the heap and longer than the searched offsets. Four values: 0 and three different counters.
        if counters != _words_at(ctypes.c_uint64, detached_samples, offset) or len({0, *counters}) != 4:
            return None
        if any(_words_at(ctypes.c_uint64, [inference_tensor], offset)):
            return None
        for version_offset in version_offsets:
            words = [ctypes.c_uint32.from_address(counter + version_offset).value for counter in counters]
            if words == versions:
                return version_offset
        return None

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
    transposed_samples = [torch.zeros(3, 4, dtype=dtype).t() for dtype in dtypes]

    def fits(offset: int) -> bool:
        """Return True if the word differs by dtype and device alone, and has no device index."""
        cpu_words, meta_words = (
            _words_at(ctypes.c_uint32, samples, offset) for samples in samples_by_device.values()
        )
        ignores_strides = cpu_words == _words_at(ctypes.c_uint32, transposed_samples, offset)
        # From the lowest bits on: 16 of the dtype, 8 of the device type, 8 of the device index.
        cpu_dtypes, meta_dtypes = ([word & 0xFFFF for word in words] for words in (cpu_words, meta_words))
        cpu_types, meta_types = ({word >> 16 & 0xFF for word in words} for words in (cpu_words, meta_words))
        tells_dtypes = cpu_dtypes == meta_dtypes and len(set(cpu_dtypes)) == len(dtypes)
        has_no_index = all(word >> 24 == 0xFF for word in (*cpu_words, *meta_words))
        return ignores_strides and tells_dtypes and cpu_types != meta_types and has_no_index

    return _first_offset(fits, step=4)


def _rank_offset() -> int:
    """Return the offset of the number of a tensor's dimensions."""
    shapes = ((), (7,), (7, 3), (2, 5, 2), (1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 3))
    samples = [torch.zeros(shape) for shape in shapes]
    return _first_offset(
        lambda offset: _words_at(ctypes.c_uint64, samples, offset) == [sample.dim() for sample in samples]
    )


def _autograd_offset() -> int:
    """Return the offset of a pointer that is NULL unless autograd knows the tensor."""
    # No view among the plain samples: views have autograd metadata even without a gradient.
    plain_tensors = [torch.zeros(2), torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]
    recorded_tensors = [torch.zeros(2, requires_grad=True), torch.nn.Parameter(torch.zeros(1))]
    recorded_tensors.append(recorded_tensors[0] * 2)

    def fits(offset: int) -> bool:
        """Return True if the word is 0 in plain tensors, and another pointer in each recorded tensor."""
        is_null = not any(_words_at(ctypes.c_uint64, plain_tensors, offset))
        return (
            is_null
            and len({0, *_words_at(ctypes.c_uint64, recorded_tensors, offset)}) == len(recorded_tensors) + 1
        )

    return _first_offset(fits)


def _grad_mode_bit(get_switches: int) -> tuple[int, int]:
    """Return the byte of a thread's switches, and the bit in it, that is set while gradients are on.

    Raises LookupError unless the two modes differ in exactly one bit.  get_switches: address of the function
    that returns the address of the switches.
    """
    # The switches are thread-local: native code calls this function once per thread, then reads the byte.
    address = ctypes.PYFUNCTYPE(ctypes.c_void_p)(get_switches)() or 0
    with torch.no_grad():
        bytes_off = ctypes.string_at(address, 4 * _WORD)
    with torch.enable_grad():
        bytes_on = ctypes.string_at(address, 4 * _WORD)
    pairs = zip(bytes_on, bytes_off, strict=True)
    changed_bytes = [
        (i, byte_on ^ byte_off) for i, (byte_on, byte_off) in enumerate(pairs) if byte_on != byte_off
    ]
    if len(changed_bytes) == 1:
        offset, flipped_bits = changed_bytes[0]
        if flipped_bits.bit_count() == 1 and bytes_on[offset] & flipped_bits:
            return offset, flipped_bits
    raise LookupError("autograd's switches")

/* The seam of execution/tensors.h for PyTorch: tensors are read by functions of PyTorch's libraries, or from memory. */
#include "execution/tensors.h"

#define DEPTH_LIMIT 3
#define LENGTH_LIMIT 64
#define LAYER_LIMIT 16

int reader_is_plain(const Reader *reader, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    return value == Py_None || type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type ||
           type == &PyComplex_Type || type == &PyUnicode_Type || type == &PyEllipsis_Type ||
           among(reader->plain, reader->plain_count, type);
}

/* A key as it is being computed, and what it depends on besides the values: in_transform says that layers count. */
typedef struct {
    const Reader *reader;
    int gradients, sized, in_transform;
    uint64_t key;
} KeyState;

/* Mix the extents of a tensor into the key, as Python reads them. 0: the tensor has none. */
static int mix_extents(KeyState *state, PyObject *value) {
    Py_INCREF(value); /* a list may lose it, if a collection runs */
    disturb();
    PyObject *extents = PyObject_GetAttr(value, state->reader->extents);
    Py_hash_t hash = extents ? PyObject_Hash(extents) : -1;
    Py_XDECREF(extents);
    Py_DECREF(value);
    if (hash == -1) PyErr_Clear();
    state->key = mix(state->key, (uint64_t)hash);
    return hash != -1;
}

static inline int mix_described(KeyState *state, PyObject *value) {
    const Reader *reader = state->reader;
    const void *tensor = tensor_at(reader, value);
    uint64_t word = 1;
    for (const Describe *describe = reader->describe; *describe; describe++) {
        int64_t answer = 0;
        if ((*describe)(tensor, &answer)) return 0;
        word = word * 1021 + (uint64_t)answer;
    }
    word = word << 1 | (state->gradients && reader->needs_gradient(*(void *const *)tensor));
    state->key = mix(state->key, word);
    return !state->sized || mix_extents(state, value);
}

static int is_wrapper_kind(const Reader *reader, const void *kind) {
    for (int i = 0; i < reader->wrappers.count; i++)
        if (reader->wrappers.kinds[i] == kind) return 1;
    return 0;
}

/* Mix into the key which layers of a tensor need a gradient: its wrappers, and the plain tensor in the innermost. 0: a
   layer is of an unknown class. */
static int mix_layers(KeyState *state, PyObject *value) {
    const Reader *reader = state->reader;
    const char *layer = *(const char *const *)tensor_at(reader, value);
    for (int i = 0; layer && i < LAYER_LIMIT; i++) {
        const void *kind = *(const void *const *)layer;
        state->key = mix(mix(state->key, (uintptr_t)kind), (uint64_t)reader->needs_gradient(layer));
        if (kind == reader->plain_kind) return !state->sized || mix_extents(state, value);
        if (!is_wrapper_kind(reader, kind)) return 0;
        layer = *(const char *const *)(layer + reader->wrappers.content);
    }
    return 0;
}

static inline int mix_tensor(KeyState *state, PyObject *value) {
    const Reader *reader = state->reader;
    if (unlikely(state->in_transform)) return mix_layers(state, value);
    const char *tensor = impl_with_layout(reader, value);
    if (!tensor) return mix_described(state, value);
    uint64_t kind = *(const uint32_t *)(tensor + reader->layout.dtype_and_device);
    uint64_t rank = *(const uint64_t *)(tensor + reader->layout.rank);
    int needs_gradient = state->gradients && *(void *const *)(tensor + reader->layout.autograd) && reader->needs_gradient(tensor);
    state->key = mix(state->key, (kind | rank << 32) << 1 | (uint64_t)needs_gradient);
    return !state->sized || mix_extents(state, value);
}

static int mix_value(KeyState *state, PyObject *value, int depth) {
    const Reader *reader = state->reader;
    PyTypeObject *type = Py_TYPE(value);
    if (type == reader->tensors[0] || among(reader->tensors, reader->tensor_count, type))
        return mix_tensor(state, value);
    if (type == &PyBool_Type) {
        state->key = mix(state->key, (uintptr_t)value); /* flags decide what an op writes */
        return 1;
    }
    state->key = mix(state->key, (uintptr_t)type);
    if (reader_is_plain(reader, value)) return 1;
    if (depth == DEPTH_LIMIT) return 0;
    if (type == &PyTuple_Type || type == &PyList_Type) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
        if (count > LENGTH_LIMIT) return 0;
        state->key = mix(state->key, (uint64_t)count);
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
            if (!mix_value(state, PySequence_Fast_GET_ITEM(value, i), depth + 1)) return 0;
        return PySequence_Fast_GET_SIZE(value) == count;
    }
    if (type == &PySlice_Type) {
        PySliceObject *slice = (PySliceObject *)value;
        return mix_value(state, slice->start, depth + 1) &&
               mix_value(state, slice->stop, depth + 1) &&
               mix_value(state, slice->step, depth + 1);
    }
    return 0;
}

static inline int mix_argument(KeyState *state, PyObject *value) {
    return Py_TYPE(value) == state->reader->tensors[0] ? mix_tensor(state, value) : mix_value(state, value, 0);
}

static int mix_named(KeyState *state, PyObject *name, PyObject *value) {
    Py_hash_t hash = PyObject_Hash(name);
    if (hash == -1) {
        PyErr_Clear();
        return 0;
    }
    state->key = mix(state->key, (uint64_t)hash);
    return mix_value(state, value, 0);
}

int python_mode_active(const Reader *reader) {
    for (int i = 0; i < reader->mode_count; i++)
        if (reader->modes[i].is_active(reader->modes[i].number)) return 1;
    return 0;
}

/* Whether function transforms, whose wrappers are known, are the only mode in force that needs Python. */
static int only_transforms_active(const Reader *reader) {
    if (!reader->wrappers.count) return 0;
    for (int i = 0; i < reader->mode_count; i++)
        if (i != reader->wrappers.mode && reader->modes[i].is_active(reader->modes[i].number)) return 0;
    return 1;
}

/* The key of a call's form: the types of its arguments, of tensors dtype, rank and device, their extents if `sized`, and
   which of them need a gradient, if gradients are on. Under transforms a key only tells whether the call has work at
   all: which layers of its tensors need a gradient. 0: the form cannot be told, or another mode that needs Python is in
   force. */
uint64_t reader_key(const Reader *reader, Thread *thread, const Arguments *arguments, int sized, int *gradients) {
    int in_transform = python_mode_active(reader);
    if (unlikely(in_transform) && !only_transforms_active(reader)) return 0;
    *gradients = reader_gradients(reader, thread);
    uint64_t count = (uint64_t)arguments->count + (arguments->receiver != NULL);
    KeyState start = {reader, *gradients, sized, in_transform, mix((uint64_t)(*gradients | in_transform << 1), count)};
    KeyState *state = &start;
    if (arguments->receiver && !mix_argument(state, arguments->receiver)) return 0;
    PyObject *const *items = arguments->items, *name, *value;
    for (PyObject *const *end = items + arguments->count; items < end; items++)
        if (!mix_argument(state, *items)) return 0;
    for (Py_ssize_t i = 0; arguments->names && i < PyTuple_GET_SIZE(arguments->names); i++)
        if (!mix_named(state, PyTuple_GET_ITEM(arguments->names, i), items[i])) return 0;
    Py_ssize_t position = 0;
    while (arguments->dict && PyDict_Next(arguments->dict, &position, &name, &value))
        if (!mix_named(state, name, value)) return 0;
    return state->key ? state->key : 1;
}

uint64_t reader_version_of_list(const Reader *reader, PyObject *value) {
    uint64_t versions = UNVERSIONED;
    if (!PyTuple_Check(value) && !PyList_Check(value)) return versions;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(value, i);
        versions = mix(versions, reader_is_tensor(reader, item) ? tensor_version(reader, item) : reader_version_of_list(reader, item));
    }
    return versions;
}

/* The extents of a tensor as a tuple, or of each tensor in a list; None for anything else. */
static PyObject *shape_of(const Reader *reader, PyObject *value, int depth) {
    disturb();
    if (reader_is_tensor(reader, value)) {
        int64_t rank = 0, *sizes = NULL;
        const void *tensor = tensor_at(reader, value);
        if (!reader->sizes || reader->rank(tensor, &rank) || reader->sizes(tensor, &sizes)) {
            PyObject *extents = PyObject_GetAttr(value, reader->extents);
            PyObject *shape = extents ? PySequence_Tuple(extents) : NULL;
            Py_XDECREF(extents);
            if (shape) return shape;
            PyErr_Clear(); /* a tensor that has no extents */
            Py_RETURN_NONE;
        }
        PyObject *shape = PyTuple_New(rank);
        for (int64_t i = 0; shape && i < rank; i++) {
            PyObject *extent = PyLong_FromLongLong(sizes[i]);
            if (extent) PyTuple_SET_ITEM(shape, i, extent);
            else Py_CLEAR(shape);
        }
        return shape;
    }
    if (!depth || (!PyTuple_Check(value) && !PyList_Check(value))) Py_RETURN_NONE;
    PyObject *shapes = PyList_New(0);
    for (Py_ssize_t i = 0; shapes && i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(value, i);
        if (!reader_is_tensor(reader, item)) continue;
        Py_INCREF(item);
        PyObject *shape = shape_of(reader, item, 0);
        if (!shape || PyList_Append(shapes, shape)) Py_CLEAR(shapes);
        Py_XDECREF(shape);
        Py_DECREF(item);
    }
    PyObject *all = shapes ? PyList_AsTuple(shapes) : NULL;
    Py_XDECREF(shapes);
    return all;
}

static int has_shape(const Reader *reader, PyObject *value, PyObject *shape);

/* Whether the tensors in a list have these shapes. */
static int has_shapes(const Reader *reader, PyObject *list, PyObject *shapes) {
    if (!PyTuple_CheckExact(shapes)) return 0;
    Py_ssize_t tensors = 0, count = PyTuple_GET_SIZE(shapes);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list); i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(list, i);
        if (!reader_is_tensor(reader, item)) continue;
        if (tensors == count || !has_shape(reader, item, PyTuple_GET_ITEM(shapes, tensors++))) return 0;
    }
    return tensors == count;
}

/* Whether a value has this shape; also 0 where only a slower comparison could tell. */
static int has_shape(const Reader *reader, PyObject *value, PyObject *shape) {
    if (!reader_is_tensor(reader, value)) {
        if (PyTuple_Check(value) || PyList_Check(value)) return has_shapes(reader, value, shape);
        return shape == Py_None;
    }
    int64_t rank = 0, *sizes = NULL;
    const void *tensor = tensor_at(reader, value);
    if (!PyTuple_CheckExact(shape) || !reader->sizes || reader->rank(tensor, &rank) || reader->sizes(tensor, &sizes))
        return 0;
    if (PyTuple_GET_SIZE(shape) != rank) return 0;
    for (int64_t i = 0; i < rank; i++) {
        PyObject *extent = PyTuple_GET_ITEM(shape, i);
        if (!PyLong_CheckExact(extent) || PyLong_AsLongLong(extent) != sizes[i]) return 0;
    }
    return 1;
}

PyObject *reader_shapes(const Reader *reader, PyObject *const *values, Py_ssize_t count, PyObject *before) {
    int same = before && PyTuple_GET_SIZE(before) == count;
    for (Py_ssize_t i = 0; same && i < count; i++) same = has_shape(reader, values[i], PyTuple_GET_ITEM(before, i));
    if (same) return Py_NewRef(before);
    PyObject *shapes = PyTuple_New(count);
    for (Py_ssize_t i = 0; shapes && i < count; i++) {
        PyObject *shape = shape_of(reader, values[i], 1);
        if (shape) PyTuple_SET_ITEM(shapes, i, shape);
        else Py_CLEAR(shapes);
    }
    return shapes;
}

static inline void add_tensor(const Reader *reader, PyObject *value, ShapeCode *words) {
    int64_t rank = 0, *sizes = NULL;
    const void *handle = tensor_at(reader, value);
    const char *tensor = impl_with_layout(reader, value);
    if (tensor) rank = *(const int64_t *)(tensor + reader->layout.rank);
    if (!reader->sizes || (!tensor && reader->rank(handle, &rank)) || reader->sizes(handle, &sizes) ||
        words->count + 1 + rank > WORD_LIMIT) {
        words->count = -1;
        return;
    }
    int64_t *into = words->items + words->count;
    *into++ = rank;
    for (int64_t i = 0; i < rank; i++) *into++ = sizes[i];
    words->count += (int)rank + 1;
}

static void add_listed(const Reader *reader, PyObject *list, ShapeCode *words) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list), tensors = 0;
    for (Py_ssize_t i = 0; i < count; i++) tensors += reader_is_tensor(reader, PySequence_Fast_GET_ITEM(list, i));
    if (tensors) add_word(words, LISTED); /* the shape of none is that of a scalar */
    add_word(words, tensors);
    for (Py_ssize_t i = 0; words->count >= 0 && i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(list, i);
        if (reader_is_tensor(reader, item)) add_tensor(reader, item, words);
    }
}

void reader_shape_code(const Reader *reader, PyObject *const *values, Py_ssize_t count, ShapeCode *words) {
    add_word(words, count);
    for (Py_ssize_t i = 0; words->count >= 0 && i < count; i++) {
        if (reader_is_tensor(reader, values[i])) add_tensor(reader, values[i], words);
        else if (PyTuple_Check(values[i]) || PyList_Check(values[i])) add_listed(reader, values[i], words);
        else add_word(words, SHAPELESS);
    }
}

uint64_t reader_clock(const Reader *reader) { return reader->clock(); }

/* ---- substitutes ---- */

static inline const void *impl_if_plain(const Reader *reader, PyObject *value) {
    if (!reader->sizes || !reader_is_tensor(reader, value)) return NULL;
    const void *tensor = *(const void *const *)tensor_at(reader, value);
    return *(const void *const *)tensor == reader->plain_kind ? tensor : NULL;
}

int reader_needs_gradient(const Reader *reader, PyObject *tensor) {
    return reader->needs_gradient(*(void *const *)tensor_at(reader, tensor));
}

const void *reader_memory(const Reader *reader, PyObject *value) {
    const void *tensor = impl_if_plain(reader, value);
    return tensor ? *(const void *const *)((const char *)tensor + reader->storage) : NULL;
}

const void *reader_storage(const Reader *reader, PyObject *value, const void **data, int64_t *size) {
    const char *tensor = reader->elements.count && reader_is_tensor(reader, value) ? impl_with_layout(reader, value) : NULL;
    const char *storage = tensor ? *(const char *const *)(tensor + reader->storage) : NULL;
    if (!storage) return NULL;
    *data = *(const void *const *)(storage + reader->elements.data);
    *size = *(const int64_t *)(storage + reader->elements.size);
    return *size < 0 ? NULL : storage; /* a symbolic size */
}

/* Whether sizes and strides are those of a permutation of a contiguous tensor. */
static int is_permutation(int64_t rank, const int64_t *sizes, const int64_t *strides) {
    int64_t stride = 1, length = 1;
    for (int64_t i = 0; i < rank; i++) length *= sizes[i];
    for (int64_t i = 0; i < rank && stride < length; i++) { /* one more dimension each time */
        int64_t at = 0;
        while (at < rank && (sizes[at] == 1 || strides[at] != stride)) at++;
        if (at == rank) return 0;
        stride *= sizes[at];
    }
    return stride == length;
}

int reader_host_memory(const Reader *reader, PyObject *value, Memory *memory) {
    const char *tensor = reader->elements.count && reader_is_tensor(reader, value) ? impl_with_layout(reader, value) : NULL;
    if (!tensor) return 0;
    uint32_t word = *(const uint32_t *)(tensor + reader->layout.dtype_and_device);
    int kind = 0;
    while (reader->elements.kinds[kind].dtype_and_device != word)
        if (++kind == reader->elements.count) return 0;
    int64_t rank = *(const int64_t *)(tensor + reader->layout.rank), *sizes, *strides, span = 1;
    const void *handle = tensor_at(reader, value);
    if (reader->sizes(handle, &sizes) || reader->elements.strides(handle, &strides)) return 0;
    for (int64_t i = 0; i < rank; i++) {
        if (strides[i] < 0) return 0;
        span = sizes[i] && span ? span + (sizes[i] - 1) * strides[i] : 0;
    }
    memory->width = reader->elements.kinds[kind].width;
    memory->exponent = reader->elements.kinds[kind].exponent;
    memory->count = (Py_ssize_t)span;
    memory->at = NULL;
    memory->is_dense = 1;
    memory->is_negated = (*(const uint64_t *)(tensor + reader->elements.keys) & reader->elements.lazy_key) != 0;
    if (!span) return 1;
    const char *storage = *(const char *const *)(tensor + reader->storage);
    const char *data = storage ? *(const char *const *)(storage + reader->elements.data) : NULL;
    if (!data) return 0;
    int64_t start = *(const int64_t *)(tensor + reader->elements.start);
    memory->at = data + start * memory->width;
    memory->is_dense = !memory->is_negated && is_permutation(rank, sizes, strides);
    /* A program may shrink a storage below its tensors, as FSDP frees it. A symbolic size is negative. */
    return (start + span) * memory->width <= *(const int64_t *)(storage + reader->elements.size);
}

PyObject *storage_of(PyObject *tensor) {
    disturb();
    return PyObject_CallMethod(tensor, "untyped_storage", NULL);
}

int64_t width_of(PyObject *tensor) {
    disturb();
    PyObject *width = PyObject_CallMethod(tensor, "element_size", NULL);
    int64_t bytes = width ? PyLong_AsLongLong(width) : -1;
    Py_XDECREF(width);
    return bytes;
}

int reader_layout(const Reader *reader, PyObject *value, Layout *layout) {
    const char *tensor = reader->elements.count && reader_is_tensor(reader, value) ? impl_with_layout(reader, value) : NULL;
    int64_t *sizes, *strides;
    const void *handle = tensor_at(reader, value);
    if (!tensor || reader->sizes(handle, &sizes) || reader->elements.strides(handle, &strides)) return 0;
    layout->storage = *(const void *const *)(tensor + reader->storage);
    layout->start = *(const int64_t *)(tensor + reader->elements.start);
    layout->rank = *(const int64_t *)(tensor + reader->layout.rank);
    layout->sizes = sizes;
    layout->strides = strides;
    layout->kind = *(const uint32_t *)(tensor + reader->layout.dtype_and_device);
    return layout->storage != NULL;
}

static inline int has_tangent(const Reader *reader, PyObject *value) {
    const void *handle = tensor_at(reader, value);
    return *reader->tangent(*(const void *const *)handle, 0, handle) != reader->no_tangent;
}

Training reader_training(const Reader *reader, PyObject *value) {
    if (!reader->sizes) return ASK_PYTHON;
    const char *tensor = impl_with_layout(reader, value);
    if (tensor && !*(void *const *)(tensor + reader->layout.autograd)) return NOT_TRAINED;
    return reader_needs_gradient(reader, value) && reader->is_leaf(tensor_at(reader, value)) ? TRAINED : NOT_TRAINED;
}

int reader_is_leaf(const Reader *reader, PyObject *tensor) { return reader->is_leaf(tensor_at(reader, tensor)); }

/* Whether a value may take the place of a tensor: a plain tensor of the same form that needs no gradient. Gradients reach
   the original by `with_straight_through`. */
int can_substitute(const Reader *reader, PyObject *original, PyObject *value) {
    if (!reader_memory(reader, original) || !reader_memory(reader, value)) return 0;
    if (reader_needs_gradient(reader, value) || has_tangent(reader, original)) return 0;
    const void *tensor = tensor_at(reader, original), *substitute = tensor_at(reader, value);
    if (reader->unversioned(tensor) != reader->unversioned(substitute)) return 0;
    for (const Describe *describe = reader->describe; *describe; describe++) {
        int64_t first = 0, second = 0;
        if ((*describe)(tensor, &first) || (*describe)(substitute, &second) || first != second) return 0;
    }
    int64_t rank = 0, *sizes, *substitute_sizes;
    if (reader->rank(tensor, &rank) || reader->sizes(tensor, &sizes) ||
        reader->sizes(substitute, &substitute_sizes)) return 0;
    for (int64_t i = 0; i < rank; i++)
        if (sizes[i] != substitute_sizes[i]) return 0;
    return 1;
}

/* A value that can substitute the original, as a result of the straight-through function if gradients are needed. */
PyObject *with_straight_through(const Reader *reader, PyObject *original, PyObject *value, int gradients) {
    if (!gradients || !reader_needs_gradient(reader, original) || reader->unversioned(tensor_at(reader, original)))
        return Py_NewRef(value);
    disturb();
    return PyObject_CallFunctionObjArgs(reader->straight_through, original, value, NULL);
}

static int read_types(PyObject *tuple, PyTypeObject **types, int *count) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *type = PyTuple_GET_ITEM(tuple, i);
        if (!PyType_Check(type) || *count == TYPE_LIMIT) {
            PyErr_Format(PyExc_TypeError, "up to %d types are wanted, not %R", TYPE_LIMIT, tuple);
            return -1;
        }
        types[(*count)++] = (PyTypeObject *)Py_NewRef(type);
    }
    return 0;
}

static int read_addresses(PyObject *tuple, void **addresses, int *count) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        if (*count == FUNCTION_LIMIT) {
            PyErr_Format(PyExc_ValueError, "no more than %d functions are read", FUNCTION_LIMIT);
            return -1;
        }
        void *address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(tuple, i));
        if (!address) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a function's address is not 0");
            return -1;
        }
        addresses[(*count)++] = address;
    }
    return 0;
}

static int read_modes(Reader *reader, PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        unsigned long long ask;
        unsigned short which;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "KH", &ask, &which)) return -1;
        if (!ask || reader->mode_count == FUNCTION_LIMIT) {
            PyErr_Format(PyExc_ValueError, "up to %d functions' addresses are wanted", FUNCTION_LIMIT);
            return -1;
        }
        reader->modes[reader->mode_count].is_active = (ModePredicate)(uintptr_t)ask;
        reader->modes[reader->mode_count++].number = which;
    }
    return 0;
}

static int read_values(Reader *reader, PyObject *tuple) {
    unsigned long long sizes, rank, tangent, is_leaf;
    PyObject *sample, *through;
    if (!PyArg_ParseTuple(tuple, "KKKKnOO", &sizes, &rank, &tangent, &is_leaf, &reader->storage, &sample, &through)) return -1;
    if (!sizes || !rank || !tangent || !is_leaf || !reader_is_tensor(reader, sample)) {
        PyErr_Format(PyExc_ValueError, "four addresses, an offset, a tensor and a callable are wanted, not %R", tuple);
        return -1;
    }
    const void *handle = tensor_at(reader, sample);
    reader->rank = (Describe)(uintptr_t)rank;
    reader->tangent = (Tangent)(uintptr_t)tangent;
    reader->is_leaf = (Predicate)(uintptr_t)is_leaf;
    reader->plain_kind = **(const void *const *const *)handle;
    reader->no_tangent = *reader->tangent(*(const void *const *)handle, 0, handle);
    reader->straight_through = Py_NewRef(through);
    reader->sizes = (Sizes)(uintptr_t)sizes;
    return 0;
}

static int read_layout(Reader *reader, PyObject *tuple) {
    unsigned long long switches;
    if (!PyArg_ParseTuple(tuple, "nnnnnKnb", &reader->layout.version_counter, &reader->layout.version, &reader->layout.dtype_and_device,
                          &reader->layout.rank, &reader->layout.autograd, &switches, &reader->layout.grad_mode_byte,
                          &reader->layout.grad_mode_bit))
        return -1;
    if (!switches || !reader->plain_kind) {
        PyErr_SetString(PyExc_ValueError, "a layout goes with an address, and with values");
        return -1;
    }
    reader->layout.switches = (char *(*)(void))(uintptr_t)switches;
    reader->layout.available = 1;
    return 0;
}

static int read_elements(Reader *reader, PyObject *tuple) {
    unsigned long long strides, exponent;
    PyObject *kinds, *sample;
    unsigned long long lazy_key;
    if (!PyArg_ParseTuple(tuple, "nnnnKKO!", &reader->elements.data, &reader->elements.size, &reader->elements.start, &reader->elements.keys, &lazy_key,
                          &strides, &PyTuple_Type, &kinds))
        return -1;
    reader->elements.lazy_key = lazy_key;
    if (!strides || !reader->layout.available || PyTuple_GET_SIZE(kinds) > ELEMENT_LIMIT) {
        PyErr_Format(PyExc_ValueError, "an address and up to %d element types are wanted, and a layout", ELEMENT_LIMIT);
        return -1;
    }
    reader->elements.strides = (Sizes)(uintptr_t)strides;
    for (int i = 0; i < PyTuple_GET_SIZE(kinds); i++) {
        int width;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(kinds, i), "OiK", &sample, &width, &exponent)) return -1;
        const char *tensor = reader_is_tensor(reader, sample) ? impl_with_layout(reader, sample) : NULL;
        if (!tensor) {
            PyErr_Format(PyExc_TypeError, "a plain tensor is wanted, not %R", sample);
            return -1;
        }
        reader->elements.kinds[i].dtype_and_device = *(const uint32_t *)(tensor + reader->layout.dtype_and_device);
        reader->elements.kinds[i].width = width;
        reader->elements.kinds[i].exponent = exponent;
    }
    reader->elements.count = (int)PyTuple_GET_SIZE(kinds);
    return 0;
}

static int read_wrappers(Reader *reader, PyObject *tuple) {
    PyObject *samples;
    if (!PyArg_ParseTuple(tuple, "inO!", &reader->wrappers.mode, &reader->wrappers.content, &PyTuple_Type, &samples)) return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(samples);
    if (!reader->plain_kind || reader->wrappers.content <= 0 || count > FUNCTION_LIMIT) {
        PyErr_Format(PyExc_ValueError, "a mode, an offset and up to %d tensors are wanted, and values", FUNCTION_LIMIT);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *sample = PyTuple_GET_ITEM(samples, i);
        if (!reader_is_tensor(reader, sample)) {
            PyErr_Format(PyExc_TypeError, "a tensor is wanted, not %R", sample);
            return -1;
        }
        reader->wrappers.kinds[i] = **(const void *const *const *)tensor_at(reader, sample);
    }
    reader->wrappers.count = (int)count;
    return 0;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tensors", "plain", "offset", "describe", "extents", "modes", "autodiff", "values", "layout", "wrappers",
                            "elements", NULL};
    PyObject *tensors, *plain, *describe, *extents, *modes, *autodiff, *values = Py_None, *layout = Py_None, *wrappers = Py_None;
    PyObject *elements = Py_None;
    Py_ssize_t offset;
    int count = 0, described = 0;
    void *functions[FUNCTION_LIMIT];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!nO!UO!O!|OOOO", names, &PyTuple_Type, &tensors, &PyTuple_Type,
                                     &plain, &offset, &PyTuple_Type, &describe, &extents, &PyTuple_Type, &modes,
                                     &PyTuple_Type, &autodiff, &values, &layout, &wrappers, &elements))
        return NULL;
    Reader *reader = (Reader *)type->tp_alloc(type, 0);
    if (!reader) return NULL;
    reader->offset = offset;
    reader->extents = Py_NewRef(extents);
    if (read_types(tensors, reader->tensors, &reader->tensor_count) ||
        read_types(plain, reader->plain, &reader->plain_count) || read_modes(reader, modes) ||
        read_addresses(describe, (void **)reader->describe, &described) ||
        read_addresses(autodiff, functions, &count))
        goto failed;
    if (count != 6) {
        PyErr_Format(PyExc_ValueError, "autodiff is six functions, not %d", count);
        goto failed;
    }
    reader->needs_gradient = (Predicate)functions[0];
    reader->unversioned = (Predicate)functions[1];
    reader->version = (int64_t(*)(const void *))functions[2];
    reader->gradients_on = (bool (*)(void))functions[3];
    reader->set_gradients = (void (*)(bool))functions[4];
    reader->clock = (uint64_t(*)(void))functions[5];
    if (values != Py_None && read_values(reader, values)) goto failed;
    if (layout != Py_None && read_layout(reader, layout)) goto failed;
    if (wrappers != Py_None && read_wrappers(reader, wrappers)) goto failed;
    if (elements != Py_None && read_elements(reader, elements)) goto failed;
    return (PyObject *)reader;
failed:
    Py_DECREF(reader);
    return NULL;
}

static void reader_dealloc(Reader *self) {
    for (int i = 0; i < self->tensor_count; i++) Py_DECREF(self->tensors[i]);
    for (int i = 0; i < self->plain_count; i++) Py_DECREF(self->plain[i]);
    Py_XDECREF(self->extents);
    Py_XDECREF(self->straight_through);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *reader_key_of(Reader *self, PyObject *args) {
    PyObject *positional, *keywords = NULL;
    int sized = 0;
    if (!PyArg_ParseTuple(args, "O!|O!p", &PyTuple_Type, &positional, &PyDict_Type, &keywords, &sized)) return NULL;
    Arguments arguments = {.items = ((PyTupleObject *)positional)->ob_item,
                           .count = PyTuple_GET_SIZE(positional),
                           .dict = keywords};
    int gradients;
    return PyLong_FromUnsignedLongLong(reader_key(self, thread_state(), &arguments, sized, &gradients));
}

static PyObject *reader_version_of(Reader *self, PyObject *value) {
    uint64_t version = version_of(self, value);
    if (version == UNVERSIONED) Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(version);
}

static PyObject *reader_can_substitute(Reader *self, PyObject *args) {
    PyObject *original, *value;
    if (!PyArg_ParseTuple(args, "OO", &original, &value)) return NULL;
    return PyBool_FromLong(can_substitute(self, original, value));
}

static PyObject *reader_memory_span(Reader *self, PyObject *value) {
    Memory memory;
    if (!reader_host_memory(self, value, &memory)) Py_RETURN_NONE;
    return Py_BuildValue("nnN", (Py_ssize_t)(intptr_t)memory.at, memory.count * memory.width, PyBool_FromLong(memory.is_dense));
}

static PyObject *reader_memory_of(Reader *self, PyObject *value) {
    return PyLong_FromVoidPtr((void *)reader_memory(self, value));
}

static PyMethodDef reader_methods[] = {
    {"can_substitute", (PyCFunction)reader_can_substitute, METH_VARARGS,
     "can_substitute(original, value): whether native code may put a value in the place of a tensor."},
    {"memory", (PyCFunction)reader_memory_of, METH_O, "Return the address of a plain tensor's storage; 0 for any other value."},
    {"host_memory", (PyCFunction)reader_memory_span, METH_O,
     "Return address and bytes of a plain tensor's numbers, from the first to the last in memory, and whether each is an\n"
     "element, as it is, and each element once; None for any other value."},
    {"key", (PyCFunction)reader_key_of, METH_VARARGS,
     "key(args, kwargs={}, sized=False): return the key of a call's form, 64 bits; 0 if only Python can tell the form."},
    {"version", (PyCFunction)reader_version_of, METH_O, "Return a number that changes with each write into a tensor, or into one in a list."},
    {0}};

PyTypeObject Reader_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Reader",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Reader(tensors, plain, offset, describe, extents, modes, autodiff, values=None, layout=None, wrappers=None,\n"
              "elements=None):\n"
              "functions and offsets by which native code reads tensors.\n\n"
              "tensors: types, by identity, of which the framework's handle lies `offset` bytes into an object.\n"
              "plain: types whose values hold no tensor and override nothing.\n"
              "describe: addresses of `int32_t f(handle *, int64_t *out)` that write dtype, rank and device; 0: success.\n"
              "extents: name of a tensor's attribute that is hashable and equal for equal extents.\n"
              "modes: pairs of the address of `bool f(uint16_t)` and its argument; true: Python has to run the plans.\n"
              "autodiff: addresses of `bool needs_gradient(handle)`, `bool unversioned(handle *)`,\n"
              "`int64_t version(handle *)`, `bool gradients_on()`, `void set_gradients(bool)`, and\n"
              "`uint64_t clock()`, which goes on with each backward op that the framework makes.\n"
              "values: for values of routines in the place of tensors: addresses of `int32_t sizes(handle *, int64_t **out)`,\n"
              "`int32_t rank(handle *, int64_t *out)`, `handle *tangent(handle, uint64_t level, handle *)` and `bool\n"
              "is_leaf(handle *)`, false if a backward op made the tensor; the offset, in the object that a handle points\n"
              "to, of the pointer to a tensor's storage; a plain tensor; and straight_through(original, value), which\n"
              "returns the value with its gradients' way back to the original.\n"
              "layout: offsets in the object that the handle of a plain tensor points to, with which native code calls no\n"
              "functions: of the pointer to the counter of writes (NULL: there is none), and in the counter of the 32 bits\n"
              "that count; of 32 bits for dtype and device; of 64 for the rank; of a pointer that is NULL if the tensor needs\n"
              "no gradient.  Then the address of `char *switches()` of a thread, and the byte and the bit of these that is\n"
              "set while gradients are on.\n"
              "wrappers: of function transforms around tensors: the index of their mode, the offset, in the object that the\n"
              "handle of a wrapper points to, of the handle of the wrapped tensor, and a wrapper of each kind.  In that mode\n"
              "a key tells whether a call has work, and no program may be learned under it.\n"
              "elements: of numbers in host memory: the offsets, in a storage, of the pointer to its memory and of 64 bits with\n"
              "its bytes; in the object that a handle points to, of 64 bits with the place of the first element; that of 64 bits of which one, the\n"
              "next item, is set where elements are negatives of what is in memory; the address of `int32_t\n"
              "strides(handle *, int64_t **out)`; and for each element type a tensor, the bytes of an element, and the\n"
              "bits that are all set in an element that is not finite, 0 for integers.",
    .tp_new = reader_new,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_methods = reader_methods,
};

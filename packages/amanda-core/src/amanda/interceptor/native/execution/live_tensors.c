/* Live tensors, by the indices that a tool has given them, and the writes into their memory. */
#include "execution/live_tensors.h"
#include <string.h>
#include <structmember.h>

#define WRITE_LIMIT 128 /* writes kept for one storage; a tensor that was not read since misses earlier ones */

/* Where a tensor's elements lie in its storage; shared by the writes of the same. */
typedef struct {
    int references;
    int64_t start, width, rank;
    int64_t sizes_and_strides[];
} Span;

typedef struct {
    int64_t serial, op;
    Span *span;
} Write;

typedef struct {
    PyObject *reference; /* owned; weak, to the storage */
    int first, count, room; /* a ring, once it has the most writes */
    Write *items;
} Writes;

/* ---- the end of tensors and storages ---- */

static void release_live(LiveTensor *live) {
    PyObject *reference = live->reference;
    PyMem_Free(live);
    Py_XDECREF(reference);
}

static void release_span(Span *span) {
    if (!--span->references) PyMem_Free(span);
}

static void release_writes(Writes *writes) {
    PyObject *reference = writes->reference;
    for (int i = 0; i < writes->count; i++) release_span(writes->items[i].span);
    PyMem_Free(writes->items);
    PyMem_Free(writes);
    Py_XDECREF(reference);
}

static PyObject *ending_call(Ending *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *reference;
    if (!PyArg_ParseTuple(args, "O", &reference)) return NULL;
    LiveTensors *owner = self->owner;
    uint64_t address = owner ? (uint64_t)(uintptr_t)map_remove(&owner->address_by_reference, (uint64_t)(uintptr_t)reference) : 0;
    if (!address) Py_RETURN_NONE;
    /* The address of a tensor is never that of a storage while both live, but one may follow the other. */
    LiveTensor *live = map_get(&owner->live_by_id, address);
    Writes *writes = map_get(&owner->writes_by_storage, address);
    if (live && live->reference == reference) release_live(map_remove(&owner->live_by_id, address));
    else if (writes && writes->reference == reference) release_writes(map_remove(&owner->writes_by_storage, address));
    Py_RETURN_NONE;
}

static PyTypeObject Ending_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Ending",
    .tp_basicsize = sizeof(Ending),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_call = (ternaryfunc)ending_call,
};

/* ---- live tensors ---- */

static PyObject *return_self(PyObject *self, PyObject *Py_UNUSED(none)) { return Py_NewRef(self); }
static PyMethodDef strong_reference = {"reference", return_self, METH_NOARGS, NULL};

PyObject *referent(PyObject *reference) {
    if (PyCFunction_Check(reference)) return Py_NewRef(PyCFunction_GET_SELF(reference));
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *tensor = NULL;
    if (PyWeakref_GetRef(reference, &tensor) < 0) PyErr_Clear();
    return tensor;
#else
    PyObject *tensor = PyWeakref_GET_OBJECT(reference);
    return tensor == Py_None ? NULL : Py_NewRef(tensor);
#endif
}

int live_set(LiveTensors *self, PyObject *tensor, int64_t index, int64_t root) {
    LiveTensor *live = live_find(self, tensor);
    PyObject *reference = NULL;
    if (!live) {
        reference = PyWeakref_NewRef(tensor, (PyObject *)self->ending);
        if (!reference && PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear(); /* no weak references: the tensor lives as long as this object */
            reference = PyCFunction_New(&strong_reference, tensor);
        }
        if (!reference) return -1;
        disturb();
        live = live_find(self, tensor); /* again, since an allocation may run a collection */
    }
    if (!live) {
        uint64_t address = (uint64_t)(uintptr_t)tensor;
        live = PyMem_Malloc(sizeof *live);
        if (!live || map_reserve(&self->live_by_id, 1) ||
            map_set(&self->address_by_reference, (uint64_t)(uintptr_t)reference, (void *)(uintptr_t)address)) {
            PyMem_Free(live);
            Py_DECREF(reference);
            PyErr_NoMemory();
            return -1;
        }
        map_set(&self->live_by_id, address, live);
        live->reference = Py_NewRef(reference);
    }
    live->index = index;
    live->root = root;
    live->serial = self->serial;
    Py_XDECREF(reference);
    return 0;
}

/* ---- writes ---- */

/* Bytes of an element, asked of the first tensor of each kind; 0: unknown. */
static int64_t width_of_kind(LiveTensors *self, Thread *thread, PyObject *tensor, uint32_t kind) {
    int64_t width = (int64_t)(intptr_t)map_get(&self->width_by_kind, (uint64_t)kind + 1);
    if (width) return width;
    thread->suspensions++;
    width = width_of(tensor);
    thread->suspensions--;
    if (width < 0) PyErr_Clear();
    if (width <= 0 || map_set(&self->width_by_kind, (uint64_t)kind + 1, (void *)(intptr_t)width)) return 0;
    return width;
}

static int is_span(const Span *span, const Layout *layout, int64_t width) {
    if (span->start != layout->start || span->width != width || span->rank != layout->rank) return 0;
    size_t bytes = (size_t)layout->rank * sizeof(int64_t);
    return !memcmp(span->sizes_and_strides, layout->sizes, bytes) &&
           !memcmp(span->sizes_and_strides + layout->rank, layout->strides, bytes);
}

/* Bytes of a storage from the first element of a tensor to after the last; end 0: it has none. */
static void range_of(int64_t start, int64_t width, int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t *first,
                     int64_t *end) {
    int64_t last = start;
    *first = start * width;
    *end = 0;
    for (int64_t i = 0; i < rank; i++) {
        if (!sizes[i]) return;
        last += (sizes[i] - 1) * strides[i];
    }
    *end = (last + 1) * width;
}

/* Whether two tensors of a storage surely share no element. */
static int are_apart(const Span *span, const Layout *layout, int64_t width) {
    int64_t first, end, other_first, other_end;
    range_of(span->start, span->width, span->rank, span->sizes_and_strides, span->sizes_and_strides + span->rank, &first, &end);
    range_of(layout->start, width, layout->rank, layout->sizes, layout->strides, &other_first, &other_end);
    return !end || !other_end || end <= other_first || other_end <= first;
}

static Write *write_at(const Writes *writes, int i) { return &writes->items[(writes->first + i) % WRITE_LIMIT]; }

Change changed_since(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor, int64_t serial) {
    if (serial == self->serial) return UNCHANGED_SINCE;
    Layout layout;
    if (!reader_layout(reader, tensor, &layout)) return ONLY_PYTHON_KNOWS;
    if (!map_get(&self->writes_by_storage, (uint64_t)(uintptr_t)layout.storage)) return UNCHANGED_SINCE;
    int64_t width = width_of_kind(self, thread, tensor, layout.kind);
    if (!width) return ONLY_PYTHON_KNOWS;
    const Writes *writes = map_get(&self->writes_by_storage, (uint64_t)(uintptr_t)layout.storage);
    for (int i = writes ? writes->count - 1 : -1; i >= 0; i--) {
        const Write *write = write_at(writes, i);
        if (write->serial <= serial) break;
        if (is_span(write->span, &layout, width)) return CHANGED_SINCE;
        if (!are_apart(write->span, &layout, width)) return ONLY_PYTHON_KNOWS; /* strided views may interleave */
    }
    return UNCHANGED_SINCE;
}

/* The writes of a storage, which is kept by weak reference; NULL with an exception. */
static Writes *writes_of(LiveTensors *self, PyObject *storage, uint64_t address) {
    Writes *writes = map_get(&self->writes_by_storage, address);
    if (writes) return writes;
    PyObject *reference = PyWeakref_NewRef(storage, (PyObject *)self->ending);
    writes = reference ? map_get(&self->writes_by_storage, address) : NULL; /* a collection may have noted it meanwhile */
    if (writes) {
        Py_DECREF(reference);
        return writes;
    }
    writes = reference ? PyMem_Calloc(1, sizeof *writes) : NULL;
    if (!writes || map_set(&self->address_by_reference, (uint64_t)(uintptr_t)reference, (void *)(uintptr_t)address) ||
        map_set(&self->writes_by_storage, address, writes)) {
        PyMem_Free(writes);
        Py_XDECREF(reference);
        return PyErr_Occurred() ? NULL : (Writes *)PyErr_NoMemory();
    }
    writes->reference = reference;
    return writes;
}

int can_note_write(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor) {
    Layout layout;
    if (!reader_layout(reader, tensor, &layout) || !width_of_kind(self, thread, tensor, layout.kind)) return 0;
    uint64_t address = (uint64_t)(uintptr_t)layout.storage;
    if (map_get(&self->writes_by_storage, address)) return 1;
    thread->suspensions++;
    PyObject *storage = storage_of(tensor);
    thread->suspensions--;
    const Writes *writes = storage ? writes_of(self, storage, address) : NULL;
    Py_XDECREF(storage);
    if (!writes) PyErr_Clear();
    return writes != NULL;
}

static Span *make_span(const Layout *layout, int64_t width) {
    size_t bytes = (size_t)layout->rank * sizeof(int64_t);
    Span *span = PyMem_Malloc(sizeof(Span) + 2 * bytes);
    if (!span) return NULL;
    *span = (Span){.start = layout->start, .width = width, .rank = layout->rank};
    if (bytes) memcpy(span->sizes_and_strides, layout->sizes, bytes);
    if (bytes) memcpy(span->sizes_and_strides + layout->rank, layout->strides, bytes);
    return span;
}

/* Add a write, of which `span` is shared; -1: no memory. */
static int add_write(LiveTensors *self, Writes *writes, int64_t op, Span *span) {
    if (writes->count == WRITE_LIMIT) { /* a loop may write a buffer without end */
        release_span(writes->items[writes->first].span);
        writes->first = (writes->first + 1) % WRITE_LIMIT;
        writes->count--;
    } else if (writes->count == writes->room) {
        int room = writes->room ? writes->room * 2 : 4;
        Write *items = PyMem_Realloc(writes->items, (size_t)room * sizeof *items);
        if (!items) return -1;
        writes->items = items;
        writes->room = room;
    }
    span->references++;
    *write_at(writes, writes->count++) = (Write){++self->serial, op, span};
    return 0;
}

static int add_write_of(LiveTensors *self, Writes *writes, int64_t op, const Layout *layout, int64_t width) {
    Span *last = writes->count ? write_at(writes, writes->count - 1)->span : NULL;
    if (last && is_span(last, layout, width)) return add_write(self, writes, op, last);
    Span *span = make_span(layout, width);
    int failed = !span || add_write(self, writes, op, span);
    if (failed) PyMem_Free(span);
    return failed ? -1 : 0;
}

int note_write(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor, int64_t op) {
    Layout layout;
    if (!reader_layout(reader, tensor, &layout)) return 0;
    Writes *writes = map_get(&self->writes_by_storage, (uint64_t)(uintptr_t)layout.storage);
    return writes ? add_write_of(self, writes, op, &layout, width_of_kind(self, thread, tensor, layout.kind)) : 0;
}

/* ---- for Python ---- */

static PyObject *live_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    LiveTensors *self = (LiveTensors *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->ending = PyObject_New(Ending, &Ending_Type);
    if (self->ending) self->ending->owner = self;
    else Py_CLEAR(self);
    return (PyObject *)self;
}

static int live_traverse(LiveTensors *self, visitproc visit, void *arg) {
    for (size_t i = 0; i < self->live_by_id.size; i++)
        if (self->live_by_id.cells[i].value) Py_VISIT(((LiveTensor *)self->live_by_id.cells[i].value)->reference);
    return 0;
}

static void live_dealloc(LiveTensors *self) {
    PyObject_GC_UnTrack(self);
    if (self->ending) self->ending->owner = NULL;
    Py_CLEAR(self->ending);
    for (size_t i = 0; i < self->live_by_id.size; i++)
        if (self->live_by_id.cells[i].value) release_live(self->live_by_id.cells[i].value);
    for (size_t i = 0; i < self->writes_by_storage.size; i++)
        if (self->writes_by_storage.cells[i].value) release_writes(self->writes_by_storage.cells[i].value);
    map_clear(&self->live_by_id);
    map_clear(&self->writes_by_storage);
    map_clear(&self->address_by_reference);
    map_clear(&self->width_by_kind);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *live_find_method(LiveTensors *self, PyObject *tensor) {
    LiveTensor *live = live_find(self, tensor);
    if (!live) Py_RETURN_NONE;
    return Py_BuildValue("LLO", (long long)live->index, (long long)live->serial, live->reference);
}

static PyObject *live_set_method(LiveTensors *self, PyObject *args) {
    PyObject *tensor;
    long long index, root;
    if (!PyArg_ParseTuple(args, "OLL", &tensor, &index, &root) || live_set(self, tensor, index, root)) return NULL;
    Py_RETURN_NONE;
}

static int read_integers(PyObject *tuple, int64_t *integers, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) integers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *live_note_write(LiveTensors *self, PyObject *args) {
    PyObject *storage, *sizes, *strides;
    unsigned long long address;
    long long op, start, width;
    if (!PyArg_ParseTuple(args, "OKL(LO!O!L)", &storage, &address, &op, &start, &PyTuple_Type, &sizes, &PyTuple_Type, &strides,
                          &width))
        return NULL;
    Py_ssize_t rank = PyTuple_GET_SIZE(sizes);
    if (!address || PyTuple_GET_SIZE(strides) != rank)
        return PyErr_Format(PyExc_ValueError, "a span has a stride for each extent, of a storage at an address");
    int64_t *integers = PyMem_Calloc((size_t)rank * 2 + 1, sizeof *integers);
    if (!integers) return PyErr_NoMemory();
    Layout layout = {NULL, start, rank, integers, integers + rank, 0};
    Writes *writes = NULL;
    if (!read_integers(sizes, integers, rank) && !read_integers(strides, integers + rank, rank))
        writes = writes_of(self, storage, address);
    int failed = !writes || add_write_of(self, writes, op, &layout, width);
    PyMem_Free(integers);
    if (failed) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *integers_as_tuple(const int64_t *integers, Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *integer = PyLong_FromLongLong(integers[i]);
        if (integer) PyTuple_SET_ITEM(tuple, i, integer);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *live_writes(LiveTensors *self, PyObject *args) {
    unsigned long long address;
    long long serial;
    if (!PyArg_ParseTuple(args, "KL", &address, &serial)) return NULL;
    PyObject *list = PyList_New(0);
    /* Looked up at each turn, since an allocation may run a collection. */
    for (int i = 0; list; i++) {
        const Writes *writes = address ? map_get(&self->writes_by_storage, address) : NULL;
        if (!writes || i >= writes->count) break;
        const Write write = *write_at(writes, writes->count - 1 - i);
        if (write.serial <= serial) break;
        write.span->references++;
        const int64_t *sizes = write.span->sizes_and_strides, *strides = sizes + write.span->rank;
        PyObject *item = Py_BuildValue("LL(LNNL)", (long long)write.serial, (long long)write.op, (long long)write.span->start,
                                       integers_as_tuple(sizes, write.span->rank),
                                       integers_as_tuple(strides, write.span->rank), (long long)write.span->width);
        release_span(write.span);
        if (!item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *live_reduce(LiveTensors *self, PyObject *Py_UNUSED(none)) { return Py_BuildValue("O()", Py_TYPE(self)); }

static PyMethodDef live_methods[] = {
    {"__reduce__", (PyCFunction)live_reduce, METH_NOARGS, "A copy knows no tensors."},
    {"find", (PyCFunction)live_find_method, METH_O,
     "find(tensor): return index, serial number of the write as of which, and a reference; None for an unknown tensor."},
    {"set", (PyCFunction)live_set_method, METH_VARARGS,
     "set(tensor, index, root): set the index of a tensor as of the last write, and the one before it was first written.\n\n"
     "An unknown tensor is kept by weak reference until its end, or strongly if it has none."},
    {"note_write", (PyCFunction)live_note_write, METH_VARARGS,
     "note_write(storage, address, op, span): note that an op has written a span of the storage at an address.\n\n"
     "span: start, extents and strides in elements, and bytes of an element.  Of 128 writes the oldest is dropped."},
    {"writes", (PyCFunction)live_writes, METH_VARARGS,
     "writes(address, serial): return serial number, op and span of writes into a storage since one, the newest first."},
    {0}};

static PyMemberDef live_members[] = {
    {"serial", T_LONGLONG, offsetof(LiveTensors, serial), READONLY, "Number of the last write."},
    {"counted", T_LONGLONG, offsetof(LiveTensors, counted), READONLY, "Number of executions that native code has counted."},
    {"busy", T_INT, offsetof(LiveTensors, busy), 0, "While it is not 0, Python records, and native code calls Python."},
    {0}};

PyTypeObject LiveTensors_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.LiveTensors",
    .tp_basicsize = sizeof(LiveTensors),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "LiveTensors(): indices of live tensors, and writes into their memory.",
    .tp_new = live_new,
    .tp_dealloc = (destructor)live_dealloc,
    .tp_traverse = (traverseproc)live_traverse,
    .tp_methods = live_methods,
    .tp_members = live_members,
};

int live_boot(PyObject *names) {
    return PyType_Ready(&Ending_Type) || add_type(names, "LiveTensors", &LiveTensors_Type) ? -1 : 0;
}

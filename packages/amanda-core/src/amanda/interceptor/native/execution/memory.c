/* Observers of memory that need no call where an op reads and gives tensors of known storages alone. */
#include "execution/observer.h"
#include "interception/table.h"

typedef struct {
    PyObject_HEAD
    Map data_by_storage; /* address of a storage -> NEW, or the address of its memory, plus 2 so that it is neither */
} KnownStorages;

#define NEW ((void *)1) /* where its memory lies has not been read yet */

static PyTypeObject KnownStorages_Type;

typedef struct MemoryObserver {
    Observer base;
    KnownStorages *known;          /* owned */
    struct MemoryObserver *before; /* owned; the observer before the op; NULL: this one is */
    Map number_by_thread;          /* the reader's clock before the execution under way on a thread, plus 1 */
} MemoryObserver;

/* ---- storages ---- */

static int is_known(KnownStorages *known, const Reader *reader, PyObject *value) {
    const void *data;
    const void *storage = reader_storage(reader, value, &data);
    if (!storage) return 0;
    uint64_t key = (uint64_t)(uintptr_t)storage;
    void *known_data = map_get(&known->data_by_storage, key), *present_data = (char *)data + 2;
    if (known_data != NEW) return known_data == present_data; /* another: the storage has been resized */
    return !map_set(&known->data_by_storage, key, present_data);
}

/* Whether all tensors of a value have known storages.  is_output: and no backward op that has saved others. */
static int has_known_storages(KnownStorages *known, const Reader *reader, PyObject *value, int is_output) {
    if (reader_is_tensor(reader, value))
        return is_known(known, reader, value) &&
               !(is_output && reader_needs_gradient(reader, value) && !reader_is_leaf(reader, value));
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return reader_is_plain(reader, value);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(value, i);
        if (PyList_Check(item) || PyTuple_Check(item) || !has_known_storages(known, reader, item, is_output)) return 0;
    }
    return 1;
}

static Observation observe_memory(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                  Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    MemoryObserver *self = (MemoryObserver *)observer;
    if (!self->before && map_set(&self->number_by_thread, (uint64_t)(uintptr_t)thread, (void *)(uintptr_t)(reader_clock(reader) + 1)))
        return CALL_PYTHON;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!has_known_storages(self->known, reader, values[i], self->before != NULL)) return CALL_PYTHON;
    return OBSERVED;
}

/* ---- for Python ---- */

static PyObject *known_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    return type->tp_alloc(type, 0);
}

static void known_dealloc(KnownStorages *self) {
    map_clear(&self->data_by_storage);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *known_add(KnownStorages *self, PyObject *storage) {
    unsigned long long address = PyLong_AsUnsignedLongLong(storage);
    if (PyErr_Occurred()) return NULL;
    if (address && map_set(&self->data_by_storage, address, NEW)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *known_discard(KnownStorages *self, PyObject *storage) {
    unsigned long long address = PyLong_AsUnsignedLongLong(storage);
    if (PyErr_Occurred()) return NULL;
    map_remove(&self->data_by_storage, address);
    Py_RETURN_NONE;
}

static PyObject *known_reduce(KnownStorages *self, PyObject *Py_UNUSED(none)) { return Py_BuildValue("O()", Py_TYPE(self)); }

static PyMethodDef known_methods[] = {
    {"__reduce__", (PyCFunction)known_reduce, METH_NOARGS, "A copy knows no storages."},
    {"add", (PyCFunction)known_add, METH_O, "add(storage): know the storage at an address, until its memory is another."},
    {"discard", (PyCFunction)known_discard, METH_O, "discard(storage): forget the storage at an address; one that is gone, say."},
    {0}};

static PyTypeObject KnownStorages_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.KnownStorages",
    .tp_basicsize = sizeof(KnownStorages),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "KnownStorages(): storages of tensors, by the address of each.",
    .tp_new = known_new,
    .tp_dealloc = (destructor)known_dealloc,
    .tp_methods = known_methods,
};

static PyObject *memory_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    MemoryObserver *self = (MemoryObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_memory;
    self->base.reads = SELECTED_VALUES;
    return (PyObject *)self;
}

static int memory_init(MemoryObserver *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"known", "before", NULL};
    PyObject *known, *before = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|O!", names, &KnownStorages_Type, &known, Py_TYPE(self), &before)) return -1;
    Py_XSETREF(self->known, (KnownStorages *)Py_NewRef(known));
    Py_XSETREF(self->before, (MemoryObserver *)Py_XNewRef(before));
    return 0;
}

static int memory_traverse(MemoryObserver *self, visitproc visit, void *arg) {
    Py_VISIT(self->known);
    Py_VISIT(self->before);
    return 0;
}

static void memory_dealloc(MemoryObserver *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->known);
    Py_CLEAR(self->before);
    map_clear(&self->number_by_thread);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *memory_take_number(MemoryObserver *self, PyObject *Py_UNUSED(none)) {
    uintptr_t number = (uintptr_t)map_remove(&self->number_by_thread, (uint64_t)(uintptr_t)thread_state());
    return PyLong_FromLongLong((long long)number - 1);
}

static PyMethodDef memory_methods[] = {
    {"take_number", (PyCFunction)memory_take_number, METH_NOARGS,
     "Return and forget the number of the next backward op, as it was before the execution under way on this thread; -1 if\n"
     "native code has not begun the execution."},
    {0}};

static PyTypeObject MemoryObserver_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.MemoryObserver",
    .tp_basicsize = sizeof(MemoryObserver),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "MemoryObserver(known, before=None): base of observers that native code calls only at storages that are not known.\n\n"
              "A subclass defines __call__(*values, **options).  Without `before` the object is the routine before an op, with\n"
              "it the one after it, which is also called where the op has made backward ops: these may have saved more.",
    .tp_new = memory_new,
    .tp_init = (initproc)memory_init,
    .tp_dealloc = (destructor)memory_dealloc,
    .tp_traverse = (traverseproc)memory_traverse,
    .tp_methods = memory_methods,
};

int memory_boot(PyObject *names) {
    return add_type(names, "KnownStorages", &KnownStorages_Type) || add_type(names, "MemoryObserver", &MemoryObserver_Type);
}

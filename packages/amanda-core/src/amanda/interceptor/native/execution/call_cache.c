/* Call caches: the plans of an op, and the programs that run at its calls. */
#include "execution/program.h"
#include <structmember.h>

#define ENTRY_LIMIT 256

static void forget_entries(CallCache *self) {
    Map map = self->entries;
    self->entries = (Map){NULL, 0, 0};
    self->last_learned = (Cell){0, NULL};
    for (size_t i = 0; i < map.size; i++) Py_XDECREF((PyObject *)map.cells[i].value);
    map_clear(&map);
}

static PyObject *cache_learn(CallCache *self, PyObject *args) {
    unsigned long long key;
    PyObject *program;
    if (!PyArg_ParseTuple(args, "KO", &key, &program)) return NULL;
    if (program != Py_None && !Py_IS_TYPE(program, &Program_Type))
        return PyErr_Format(PyExc_TypeError, "a Program or None is wanted, not %R", program);
    if (!key) Py_RETURN_NONE;
    if (self->entries.used >= ENTRY_LIMIT) forget_entries(self);
    PyObject *old = map_get(&self->entries, key);
    if (map_set(&self->entries, key, program)) return PyErr_NoMemory();
    counts.learned++;
    Py_INCREF(program);
    self->last_learned = (Cell){key, program};
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *cache_forget(CallCache *self, PyObject *Py_UNUSED(none)) {
    forget_entries(self);
    Py_RETURN_NONE;
}

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *plans;
    int sized = 0;
    if (!PyArg_ParseTuple(args, "O|p", &plans, &sized)) return NULL;
    CallCache *self = (CallCache *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->plans = Py_NewRef(plans);
    self->sized = (char)sized;
    return (PyObject *)self;
}

static Py_ssize_t cache_length(CallCache *self) {
    Py_ssize_t live = 0;
    for (size_t i = 0; i < self->entries.size; i++) live += self->entries.cells[i].value != NULL;
    return live;
}

static int cache_traverse(CallCache *self, visitproc visit, void *arg) {
    Py_VISIT(self->plans);
    for (size_t i = 0; i < self->entries.size; i++) Py_VISIT((PyObject *)self->entries.cells[i].value);
    return 0;
}

static int cache_clear(CallCache *self) {
    forget_entries(self);
    return 0;
}

static void cache_dealloc(CallCache *self) {
    PyObject_GC_UnTrack(self);
    forget_entries(self);
    Py_CLEAR(self->plans);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef cache_methods[] = {
    {"learn", (PyCFunction)cache_learn, METH_VARARGS,
     "learn(key, program): run the program at calls of this key; None runs the op as it is."},
    {"forget", (PyCFunction)cache_forget, METH_NOARGS, "Forget the programs; the plans stay."},
    {0}};

static PyMemberDef cache_members[] = {
    {"plans", T_OBJECT, offsetof(CallCache, plans), READONLY, "Plans of the op, by signature."}, {0}};

static PySequenceMethods cache_sequence = {.sq_length = (lenfunc)cache_length};

PyTypeObject CallCache_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.CallCache",
    .tp_basicsize = sizeof(CallCache),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "CallCache(plans, sized=False): an op's plans, and the programs of its calls by form; len() counts the programs.\n\n"
              "sized: whether calls of other shapes are calls of another form.",
    .tp_new = cache_new,
    .tp_dealloc = (destructor)cache_dealloc,
    .tp_traverse = (traverseproc)cache_traverse,
    .tp_clear = (inquiry)cache_clear,
    .tp_methods = cache_methods,
    .tp_members = cache_members,
    .tp_as_sequence = &cache_sequence,
};

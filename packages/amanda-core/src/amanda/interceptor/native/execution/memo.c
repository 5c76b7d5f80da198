/* Memos: what is known of an op that has a plan. */
#include "execution/program.h"
#include <structmember.h>

#define ENTRY_LIMIT 256

int memo_boot(PyObject *names) {
    return add_type(names, "Hook", &Hook_Type) || add_type(names, "Program", &Program_Type) ||
                   add_type(names, "Memo", &Memo_Type) || add_type(names, "Tally", &Tally_Type)
               ? -1
               : 0;
}

static void forget_entries(Memo *self) {
    Map map = self->entries;
    self->entries = (Map){NULL, 0, 0};
    self->usual = (Cell){0, NULL};
    for (size_t i = 0; i < map.size; i++) Py_XDECREF((PyObject *)map.cells[i].value);
    map_clear(&map);
}

static PyObject *memo_learn(Memo *self, PyObject *args) {
    unsigned long long key;
    PyObject *known;
    if (!PyArg_ParseTuple(args, "KO", &key, &known)) return NULL;
    if (known != Py_None && !Py_IS_TYPE(known, &Program_Type))
        return PyErr_Format(PyExc_TypeError, "a Program or None is wanted, not %R", known);
    if (!key) Py_RETURN_NONE;
    if (self->entries.used >= ENTRY_LIMIT) forget_entries(self);
    PyObject *old = map_get(&self->entries, key);
    if (map_set(&self->entries, key, known)) return PyErr_NoMemory();
    counts.learned++;
    Py_INCREF(known);
    self->usual = (Cell){key, known};
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *memo_forget(Memo *self, PyObject *Py_UNUSED(none)) {
    forget_entries(self);
    Py_RETURN_NONE;
}

static PyObject *memo_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *plans;
    int sized = 0;
    if (!PyArg_ParseTuple(args, "O|p", &plans, &sized)) return NULL;
    Memo *self = (Memo *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->plans = Py_NewRef(plans);
    self->sized = (char)sized;
    return (PyObject *)self;
}

static Py_ssize_t memo_length(Memo *self) {
    Py_ssize_t live = 0;
    for (size_t i = 0; i < self->entries.size; i++) live += self->entries.cells[i].value != NULL;
    return live;
}

static int memo_traverse(Memo *self, visitproc visit, void *arg) {
    Py_VISIT(self->plans);
    for (size_t i = 0; i < self->entries.size; i++) Py_VISIT((PyObject *)self->entries.cells[i].value);
    return 0;
}

static int memo_clear(Memo *self) {
    forget_entries(self);
    return 0;
}

static void memo_dealloc(Memo *self) {
    PyObject_GC_UnTrack(self);
    forget_entries(self);
    Py_CLEAR(self->plans);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef memo_methods[] = {
    {"learn", (PyCFunction)memo_learn, METH_VARARGS,
     "learn(key, program): run it at calls of this key; None: the op as it is."},
    {"forget", (PyCFunction)memo_forget, METH_NOARGS, "Forget what was learned; the plans stay."},
    {0}};

static PyMemberDef memo_members[] = {
    {"plans", T_OBJECT, offsetof(Memo, plans), READONLY, "Plans by what they are made for."}, {0}};

static PySequenceMethods memo_sequence = {.sq_length = (lenfunc)memo_length};

PyTypeObject Memo_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Memo",
    .tp_basicsize = sizeof(Memo),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Memo(plans, sized=False): an op's plans, and what calls of it come to; its length is how many are known.\n\n"
              "sized: whether extents of tensors decide too.",
    .tp_new = memo_new,
    .tp_dealloc = (destructor)memo_dealloc,
    .tp_traverse = (traverseproc)memo_traverse,
    .tp_clear = (inquiry)memo_clear,
    .tp_methods = memo_methods,
    .tp_members = memo_members,
    .tp_as_sequence = &memo_sequence,
};

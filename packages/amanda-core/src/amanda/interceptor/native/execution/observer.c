/* Observers in native code, and gates: switches by which native code skips routines. */
#include "execution/observer.h"
#include <structmember.h>

PyTypeObject Observer_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Observer",
    .tp_basicsize = sizeof(Observer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Base of observers that programs run in native code.",
};

/* ---- gates ---- */

typedef struct {
    PyObject_HEAD
    char open;
} Gate;

static PyMemberDef gate_members[] = {
    {"open", T_BOOL, offsetof(Gate, open), 0, "Whether the routines are called; true at first."}, {0}};

static PyObject *gate_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"open", NULL};
    int open = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", names, &open)) return NULL;
    Gate *self = (Gate *)type->tp_alloc(type, 0);
    if (self) self->open = (char)open;
    return (PyObject *)self;
}

static PyObject *gate_reduce(Gate *self, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O(i)", Py_TYPE(self), (int)self->open);
}

static PyMethodDef gate_methods[] = {{"__reduce__", (PyCFunction)gate_reduce, METH_NOARGS, "Copy the gate as it is."}, {0}};

static PyTypeObject Gate_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Gate",
    .tp_basicsize = sizeof(Gate),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Gate(open=True): a switch of routines; native code does not call a GatedRoutine while its gate is not open.",
    .tp_new = gate_new,
    .tp_members = gate_members,
    .tp_methods = gate_methods,
};

typedef struct {
    Observer base;
    Gate *gate; /* owned */
} GatedRoutine;

static Observation observe_gate(Observer *observer, Thread *Py_UNUSED(thread), const Reader *Py_UNUSED(reader),
                                PyObject *const *Py_UNUSED(values), Py_ssize_t Py_UNUSED(count), const OpInputs *Py_UNUSED(op_inputs)) {
    const Gate *gate = ((GatedRoutine *)observer)->gate;
    return gate && !gate->open ? OBSERVED : CALL_PYTHON;
}

static PyObject *gated_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    GatedRoutine *self = (GatedRoutine *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_gate;
    self->base.reads = NO_VALUES;
    return (PyObject *)self;
}

static int gated_init(GatedRoutine *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"gate", NULL};
    PyObject *gate;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, &Gate_Type, &gate)) return -1;
    Py_XSETREF(self->gate, (Gate *)Py_NewRef(gate));
    return 0;
}

static int gated_traverse(GatedRoutine *self, visitproc visit, void *arg) {
    Py_VISIT(self->gate);
    return 0;
}

static void gated_dealloc(GatedRoutine *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->gate);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject GatedRoutine_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.GatedRoutine",
    .tp_basicsize = sizeof(GatedRoutine),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "GatedRoutine(gate): base of observers that do nothing while a gate is not open.\n\n"
              "A subclass defines __call__, which returns None then: Python calls it in any case.",
    .tp_new = gated_new,
    .tp_init = (initproc)gated_init,
    .tp_dealloc = (destructor)gated_dealloc,
    .tp_traverse = (traverseproc)gated_traverse,
};

int observer_boot(PyObject *names) {
    if (PyType_Ready(&Observer_Type)) return -1;
    return add_type(names, "Gate", &Gate_Type) || add_type(names, "GatedRoutine", &GatedRoutine_Type) ? -1 : 0;
}

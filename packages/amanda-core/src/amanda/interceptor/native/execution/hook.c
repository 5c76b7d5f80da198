/* Hooks: programs that a framework calls with a tuple of values. */
#include "execution/program.h"
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Program *program; /* owned */
    Reader *reader;   /* owned */
    PyObject *go_on;  /* owned */
    PyObject *first;  /* owned; what it is called with first */
    PyObject *shapes; /* owned; those of the op; None: no routine is given any */
} Hook;

static PyObject *call_hook(PyObject *self, PyObject *const *args, size_t flags, PyObject *Py_UNUSED(names)) {
    Hook *hook = (Hook *)self;
    if (!PyVectorcall_NARGS(flags) || !PyTuple_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "a hook is called with a tuple of values");
    Program *program = hook->program;
    Shapes shapes;
    shapes.told = NULL;
    shapes.words.count = program->tallied ? 0 : -1;
    Py_ssize_t sides = PyVectorcall_NARGS(flags);
    if (program->tallied) add_words_of(&shapes.words, hook->shapes);
    for (Py_ssize_t i = sides; shapes.words.count >= 0 && i--;) /* those that entered come last */
        if (PyTuple_Check(args[i]))
            reader_words(hook->reader, ((PyTupleObject *)args[i])->ob_item, PyTuple_GET_SIZE(args[i]), &shapes.words);
    if (program->shaped || (program->tallied && shapes.words.count < 0)) {
        shapes.told = Py_NewRef(hook->shapes);
        for (Py_ssize_t i = sides; i--;) {
            if (!PyTuple_Check(args[i])) continue;
            PyObject *const *items = ((PyTupleObject *)args[i])->ob_item;
            if (add_shapes(hook->reader, &shapes.told, items, PyTuple_GET_SIZE(args[i]))) return NULL;
        }
    }
    PyObject *done = run_on_values(program, hook->reader, args[0], &shapes), *values = done;
    *(done == Py_None ? &counts.native : &counts.handed[done == Py_NotImplemented ? ARGUMENTS : RESULT]) += 1;
    if (done && done != Py_None) {
        PyObject *told = program->shaped || program->tallied ? told_shapes(&shapes) : NULL;
        values = PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(hook->go_on, hook->first, args[0], done, told, NULL);
        Py_DECREF(done);
    }
    Py_XDECREF(shapes.told);
    return values;
}

PyObject *program_hook(Program *self, PyObject *args) {
    Reader *reader;
    PyObject *go_on, *first, *shapes = Py_None;
    if (!PyArg_ParseTuple(args, "O!OO|O!", &Reader_Type, &reader, &go_on, &first, &PyTuple_Type, &shapes)) return NULL;
    if ((self->shaped || self->tallied) && shapes == Py_None) return PyErr_Format(PyExc_TypeError, "routines want shapes: give those of the op");
    Hook *hook = PyObject_GC_New(Hook, &Hook_Type);
    if (!hook) return NULL;
    hook->vectorcall = call_hook;
    hook->program = (Program *)Py_NewRef(self);
    hook->reader = (Reader *)Py_NewRef(reader);
    hook->go_on = Py_NewRef(go_on);
    hook->first = Py_NewRef(first);
    hook->shapes = Py_NewRef(shapes);
    PyObject_GC_Track(hook);
    return (PyObject *)hook;
}

static int hook_traverse(Hook *self, visitproc visit, void *arg) {
    Py_VISIT(self->program);
    Py_VISIT(self->reader);
    Py_VISIT(self->go_on);
    Py_VISIT(self->first);
    Py_VISIT(self->shapes);
    return 0;
}

static void hook_dealloc(Hook *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->program);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->go_on);
    Py_CLEAR(self->first);
    Py_CLEAR(self->shapes);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject Hook_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "The routines of a program on a tuple of values that a framework calls it with.",
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_traverse = (traverseproc)hook_traverse,
};

/* Extents: a with statement enters and leaves them by native methods, before whose first instruction no handler of a
   signal runs, as it does before that of a Python function. */
#include "interception/site.h"

#define MOST_TRIES 16

static int is_unsettled(PyObject *self) { /* never an exception */
    PyObject *answer = PyObject_GetAttrString(self, "_unsettled");
    int unsettled = answer ? PyObject_IsTrue(answer) : 0;
    Py_XDECREF(answer);
    if (PyErr_Occurred()) PyErr_Clear();
    return unsettled > 0;
}

/* End what an exception has left unsettled; the exception stays. */
static void settle(PyObject *self) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    for (int tries = 0; tries < MOST_TRIES && is_unsettled(self); tries++) {
        PyObject *result = PyObject_CallMethod(self, "_end", NULL);
        if (!result) PyErr_Clear();
        Py_XDECREF(result);
    }
    PyErr_Restore(kind, error, trace);
}

static PyObject *extent_enter(PyObject *self, PyObject *Py_UNUSED(none)) {
    int entered = is_unsettled(self);
    PyObject *result = PyObject_CallMethod(self, "_begin", NULL);
    if (!result && !entered) settle(self);
    return result;
}

static PyObject *extent_exit(PyObject *self, PyObject *Py_UNUSED(args)) {
    PyObject *result = PyObject_CallMethod(self, "_end", NULL);
    if (!result) settle(self);
    return result;
}

static PyMethodDef extent_methods[] = {
    {"__enter__", extent_enter, METH_NOARGS, "Enter the extent; return what `_begin` returns."},
    {"__exit__", extent_exit, METH_VARARGS, "Leave the extent as a whole, also where a signal's handler raises."},
    {0}};

static PyTypeObject Extent_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Extent",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "Extent(): context that calls `_begin()` as it is entered and `_end()` as it is left, methods of a subclass.\n\n"
              "An exception out of these, as of a KeyboardInterrupt, is raised once `_unsettled` is false: until then\n"
              "`_end()` is called again.",
    .tp_new = PyType_GenericNew,
    .tp_methods = extent_methods,
};

int extent_boot(PyObject *names) { return add_type(names, "Extent", &Extent_Type); }

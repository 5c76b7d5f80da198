#include "amanda.h"

int add_function(PyObject *names, PyMethodDef *def) {
    PyObject *function = PyCFunction_New(def, NULL);
    int failed = !function || PyDict_SetItemString(names, def->ml_name, function);
    Py_XDECREF(function);
    return failed ? -1 : 0;
}

int add_type(PyObject *names, const char *name, PyTypeObject *type) {
    return PyType_Ready(type) || PyDict_SetItemString(names, name, (PyObject *)type) ? -1 : 0;
}

/* Puts the interceptor's functions and types into the dict at `names`: 0, or -1 after a report
   on stderr. cffi releases the GIL around a call, so it is taken here. */
int amanda_boot(void *names) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int failed = stub_boot(names) || place_boot(names);
    if (failed) PyErr_Print();
    PyGILState_Release(gil);
    return failed ? -1 : 0;
}

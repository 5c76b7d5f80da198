/* Numbers of calls of ops that have plans: which native code ran, and which it left to Python, and why. */
#include "execution/counts.h"

struct Counts counts;

static const char *const reasons[REASONS] = {
    [NEW_OP] = "new op",
    [NEW_FORM] = "new form of call",
    [NO_READER] = "op without a native reader of tensors",
    [MODE] = "mode or transform",
    [ARGUMENTS] = "kind of argument",
    [SWITCHES] = "cache off or autodiff on",
    [RESULT] = "result of a routine",
    [WRITTEN] = "written value that autodiff saves",
};

static PyObject *statistics(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *handed = PyDict_New();
    for (int i = 0; handed && i < REASONS; i++) {
        PyObject *number = counts.handed[i] ? PyLong_FromUnsignedLongLong(counts.handed[i]) : NULL;
        if (number && PyDict_SetItemString(handed, reasons[i], number)) Py_CLEAR(handed);
        Py_XDECREF(number);
        if (PyErr_Occurred()) Py_CLEAR(handed);
    }
    return handed ? Py_BuildValue("{sKsKsN}", "native", (unsigned long long)counts.native, "learned",
                                  (unsigned long long)counts.learned, "python", handed)
                  : NULL;
}

static PyMethodDef statistics_def = {
    "statistics", statistics, METH_NOARGS,
    "Return numbers of calls of ops with routines in this process: `native`, that ran in native code; `learned`, of forms\n"
    "of calls that it learned; `python`, of calls that ran in Python, by reason."};

int statistics_boot(PyObject *names) { return add_function(names, &statistics_def); }

#include "execution/observer.h"
#include "execution/program.h"
#include "interception/lock.h"
#include "interception/site.h"
#include "pytorch/autograd.h"
#include "statistics/finite.h"
#include "statistics/moments.h"

int add_function(PyObject *names, PyMethodDef *def) {
    PyObject *function = PyCFunction_New(def, NULL);
    int failed = !function || PyDict_SetItemString(names, def->ml_name, function);
    Py_XDECREF(function);
    return failed ? -1 : 0;
}

int add_type(PyObject *names, const char *name, PyTypeObject *type) {
    return PyType_Ready(type) || PyDict_SetItemString(names, name, (PyObject *)type) ? -1 : 0;
}

/* Whether the interpreter that `modules` belongs to is the main one: it is where the stubs' state lives,
   and the one that PyGILState knows. */
static int called_from_main(PyObject *names) {
    PyObject *modules = PyDict_GetItemString(names, "modules");
    return PyInterpreterState_Get() == PyInterpreterState_Main() && modules == PySys_GetObject("modules");
}

/* What Python tells apart: `interceptor/__init__.py` says why there is no native code. */
enum { BOOT_FAILED = -1, BOOTED, OTHER_INTERPRETER };

/* Put the interceptor's functions and types into the dict at `names`, which has sys.modules under "modules".
   BOOT_FAILED: after a report on stderr.  cffi releases the GIL around a call, so it is taken here. */
int amanda_boot(void *names) {
    PyGILState_STATE gil = PyGILState_Ensure();
    int result = OTHER_INTERPRETER;
    if (called_from_main(names)) {
        int failed = activation_boot(names) || site_boot(names) || place_boot(names) || region_boot(names) ||
                     ordinal_boot(names) || lock_boot(names) || extent_boot(names) || probe_boot(names) || /* interception */
                     execution_boot(names) || statistics_boot(names) || observer_boot(names) ||
                     storages_boot(names) || clock_boot(names) || records_boot(names) ||       /* execution */
                     add_type(names, "Reader", &Reader_Type) || graph_boot(names) || hooks_boot(names) ||
                     sent_boot(names) || saved_boot(names) ||                                  /* pytorch */
                     moments_boot(names) || finite_boot(names);                                /* statistics */
        if (failed) PyErr_Print();
        result = failed ? BOOT_FAILED : BOOTED;
    }
    PyGILState_Release(gil);
    return result;
}

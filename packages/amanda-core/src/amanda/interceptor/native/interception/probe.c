/* What the self-test at boot calls: a target of each kind for which CPython specialises calls, and the frames that
   native code walks.  They are of no use besides, so nobody else's builtin is touched. */
#include "interception/frames.h"
#include "interception/place.h"

static PyObject *call_plain(PyObject *Py_UNUSED(self), PyObject *value) { return Py_NewRef(value); }

static PyObject *call_array(PyObject *Py_UNUSED(self), PyObject *const *values, Py_ssize_t count) {
    return Py_NewRef(count ? values[0] : Py_None);
}

static PyObject *call_keywords(PyObject *Py_UNUSED(self), PyObject *const *values, Py_ssize_t count, PyObject *names) {
    return Py_NewRef(count || names ? values[0] : Py_None);
}

static PyObject *call_tuple(PyObject *Py_UNUSED(self), PyObject *values) { return Py_NewRef(PyTuple_GET_ITEM(values, 0)); }

static PyObject *call_without(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) { Py_RETURN_NONE; }

static PyObject *read_number(PyObject *Py_UNUSED(self), void *Py_UNUSED(closure)) { return PyLong_FromLong(1); }

#define FUNCTION_OF(function) (PyCFunction)(void (*)(void))function

static PyMethodDef conventions[] = {
    {"without", call_without, METH_NOARGS, NULL},
    {"plain", call_plain, METH_O, NULL},
    {"tuple", call_tuple, METH_VARARGS, NULL},
    {"array", FUNCTION_OF(call_array), METH_FASTCALL, NULL},
    {"keywords", FUNCTION_OF(call_keywords), METH_FASTCALL | METH_KEYWORDS, NULL},
    {0}};

static PyGetSetDef properties[] = {{"number", read_number, NULL, NULL, NULL}, {0}};

static PyMappingMethods mapping = {.mp_subscript = call_plain};

static PyTypeObject Probe_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Probe",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A method of each calling convention, a property and a subscript, for the self-test.",
    .tp_new = PyType_GenericNew,
    .tp_getset = properties,
    .tp_as_mapping = &mapping,
};

/* List of (code, instruction) of the innermost frames, as the walk of call sites reads them. */
static PyObject *walked_frames(PyObject *Py_UNUSED(module), PyObject *most) {
    Py_ssize_t left = PyLong_AsSsize_t(most);
    PyObject *list = PyErr_Occurred() ? NULL : PyList_New(0);
    Walk walk;
    for (walk_start(&walk); list && left > 0 && walk_frame(&walk); walk_next(&walk), left--) {
        PyObject *item = Py_BuildValue("Oi", walk_code(&walk), walk_instruction(&walk));
        if (!item || PyList_Append(list, item)) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    walk_end(&walk);
    return list;
}

static PyMethodDef walked_frames_def = {"walked_frames", walked_frames, METH_O, NULL};

/* The methods again as functions, each of a definition of its own: a site is known by that. */
static PyObject *new_functions(void) {
    static PyMethodDef definitions[sizeof conventions / sizeof *conventions];
    memcpy(definitions, conventions, sizeof conventions);
    PyObject *functions = PyList_New(0);
    for (PyMethodDef *definition = definitions; functions && definition->ml_name; definition++) {
        PyObject *function = PyCFunction_New(definition, NULL);
        if (!function || PyList_Append(functions, function)) Py_CLEAR(functions);
        Py_XDECREF(function);
    }
    return functions;
}

int probe_boot(PyObject *names) {
    PyObject *functions = new_functions();
    int failed = !functions || PyDict_SetItemString(names, "probe_functions", functions);
    Py_XDECREF(functions);
    if (!Probe_Type.tp_methods) Probe_Type.tp_methods = conventions;
    return failed || add_function(names, &walked_frames_def) || add_type(names, "Probe", &Probe_Type) ? -1 : 0;
}

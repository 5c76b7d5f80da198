/* The way of a call to its handler in Python, from the start or from where native code has stopped. */
#include "execution/program.h"
#include "interception/call.h"

static PyStructSequence_Field resumption_fields[] = {
    {"plan", "Plan that native code has followed; the call may look different by now."},
    {"step", "Last step whose routine has run; -1: none has."},
    {"returned", "Result of that routine, which native code cannot put in place; None: no change."},
    {"outputs", "Result of the op, with changes by routines; NotImplemented: the op has not run."},
    {"inputs", "List of the inputs, where routines have changed some; else None."},
    {NULL, NULL}};
static PyStructSequence_Desc resumption_desc = {
    "amanda.interceptor.Resumption", "State with which Python continues an execution that native code has begun.",
    resumption_fields, 5};
PyTypeObject Resumption_Type;

PyObject *make_resumption(PyObject *plan, Py_ssize_t step, PyObject *result, PyObject *outputs, PyObject *inputs) {
    PyObject *number = PyLong_FromSsize_t(step), *resumption = number ? PyStructSequence_New(&Resumption_Type) : NULL;
    if (!resumption) {
        Py_XDECREF(number);
        Py_XDECREF(result);
        Py_XDECREF(inputs);
        return NULL;
    }
    PyStructSequence_SetItem(resumption, 0, Py_NewRef(plan));
    PyStructSequence_SetItem(resumption, 1, number);
    PyStructSequence_SetItem(resumption, 2, result ? result : Py_NewRef(Py_None));
    PyStructSequence_SetItem(resumption, 3, Py_NewRef(outputs ? outputs : Py_NotImplemented));
    PyStructSequence_SetItem(resumption, 4, inputs ? inputs : Py_NewRef(Py_None));
    return resumption;
}

static PyObject *packed_arguments(const Arguments *arguments) {
    int offset = arguments->receiver != NULL;
    PyObject *tuple = PyTuple_New(arguments->count + offset);
    if (!tuple) return NULL;
    if (offset) PyTuple_SET_ITEM(tuple, 0, Py_NewRef(arguments->receiver));
    for (Py_ssize_t i = 0; i < arguments->count; i++)
        PyTuple_SET_ITEM(tuple, i + offset, Py_NewRef(arguments->items[i]));
    return tuple;
}

static PyObject *packed_keywords(const Arguments *arguments) {
    if (arguments->dict) return Py_NewRef(arguments->dict);
    return arguments->names ? keywords_of(arguments->items + arguments->count, arguments->names) : PyDict_New();
}

PyObject *call_handler(Thread *thread, const Call *call, uint64_t key, PyObject *resumption) {
    PyObject *args = packed_arguments(&call->arguments), *kwargs = packed_keywords(&call->arguments), *result = NULL;
    PyObject *id = PyLong_FromUnsignedLongLong(call->id), *form = PyLong_FromUnsignedLongLong(key);
    PyObject *plan = call->plan ? call->plan : Py_None;
    if (args && kwargs && id && form) {
        PyObject *stack[] = {call->state, plan, id, (PyObject *)call->site, args, kwargs, form,
                             resumption ? resumption : Py_None};
        thread->suspensions++;
        disturb();
        result = PyObject_Vectorcall(call->site->handler, stack, Py_IS_TYPE(plan, &CallCache_Type) ? 8 : 6, NULL);
        thread->suspensions--;
    }
    Py_XDECREF(form);
    Py_XDECREF(id);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return result;
}

int execution_boot(PyObject *names) {
    /* A reload keeps the type that there is: what it has made is still in use. */
    if (!Resumption_Type.tp_name && PyStructSequence_InitType2(&Resumption_Type, &resumption_desc)) return -1;
    return PyDict_SetItemString(names, "Resumption", (PyObject *)&Resumption_Type) ||
                   add_type(names, "Hook", &Hook_Type) || add_type(names, "Program", &Program_Type) ||
                   add_type(names, "CallCache", &CallCache_Type) || add_type(names, "ShapeCounter", &Tally_Type)
               ? -1
               : 0;
}

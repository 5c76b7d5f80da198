/* The way of a call to its handler in Python. */
#include "execution/program.h"

static PyObject *packed_arguments(const Arguments *given) {
    int offset = given->self != NULL;
    PyObject *tuple = PyTuple_New(given->count + offset);
    if (!tuple) return NULL;
    if (offset) PyTuple_SET_ITEM(tuple, 0, Py_NewRef(given->self));
    for (Py_ssize_t i = 0; i < given->count; i++)
        PyTuple_SET_ITEM(tuple, i + offset, Py_NewRef(given->items[i]));
    return tuple;
}

static PyObject *packed_keywords(const Arguments *given) {
    if (given->dict) return Py_NewRef(given->dict);
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict && given->names && i < PyTuple_GET_SIZE(given->names); i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(given->names, i), given->items[given->count + i]))
            Py_CLEAR(dict);
    return dict;
}

/* key: under what a memo may learn of the call, or 0.  done: what is done of its plan already, or NULL. */
PyObject *hand_over(Thread *thread, Call *call, uint64_t key, PyObject *done) {
    PyObject *args = packed_arguments(call->given), *kwargs = packed_keywords(call->given), *result = NULL;
    PyObject *id = PyLong_FromUnsignedLongLong(call->id), *known = PyLong_FromUnsignedLongLong(key);
    if (args && kwargs && id && known) {
        PyObject *stack[] = {call->state, call->plan, id, (PyObject *)call->site, args, kwargs, known,
                             done ? done : Py_None};
        thread->off++;
        disturb();
        result = PyObject_Vectorcall(call->site->handler, stack, Py_IS_TYPE(call->plan, &Memo_Type) ? 8 : 6, NULL);
        thread->off--;
    }
    Py_XDECREF(known);
    Py_XDECREF(id);
    Py_XDECREF(kwargs);
    Py_XDECREF(args);
    return result;
}

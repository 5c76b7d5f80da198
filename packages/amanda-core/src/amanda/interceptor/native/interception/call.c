/* Arguments of intercepted calls, packed, spread and exchanged. */
#include "interception/call.h"

PyObject *keywords_of(PyObject *const *values, PyObject *names) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), values[i])) Py_CLEAR(dict);
    return dict;
}

/* Give a call other arguments, as many: positional ones and then those by keyword, after a free place.
   made: two references to release after the call.  0: not of this kind of call; -1: an exception. */
int call_with(Call *call, Arguments *given, PyObject **flat, PyObject **made) {
    Site *site = call->site;
    *given = *call->given;
    call->given = given;
    if (site->bound) call->self = given->self = *flat++;
    given->items = flat;
    switch (site->kind) {
    case ASSIGN: return 0;
    case NOARGS: case GET: return 1;
    case ONE: case SUBSCRIPT: call->a = flat[0]; return 1;
    case FAST: case FAST_KEYWORDS: case FUNCTION: case PYTHON: call->a = (PyObject *)flat; return 1;
    case KEYWORDS:
        if (given->dict) {
            PyObject *name, *value, *own = given->dict;
            Py_ssize_t position = 0, i = given->count;
            call->b = given->dict = made[1] = PyDict_New();
            while (made[1] && PyDict_Next(own, &position, &name, &value))
                if (PyDict_SetItem(made[1], name, flat[i++])) return -1;
            if (!made[1]) return -1;
        } /* fall through */
    case VARARGS:
        call->a = made[0] = PyTuple_New(given->count);
        for (Py_ssize_t i = 0; made[0] && i < given->count; i++) PyTuple_SET_ITEM(made[0], i, Py_NewRef(flat[i]));
        return made[0] ? 1 : -1;
    }
    Py_UNREACHABLE();
}

/* An operator turns a TypeError from within it into NotImplemented: a tool's own is raised again. */
PyObject *raise_failure(Thread *thread, PyObject *result) {
    PyObject *failure = take_failure(thread);
    if (!failure) return result;
    PyErr_SetObject((PyObject *)Py_TYPE(failure), failure);
    Py_DECREF(failure);
    Py_DECREF(result);
    return NULL;
}

/* Types may share a definition: a call through the descriptor of another type is not the target's. */
int is_targets(Site *site, PyObject *self) {
    if (!site->bound) return 1;
    int in_class = Py_IS_TYPE(site->target, &PyClassMethodDescr_Type);
    PyTypeObject *type = in_class ? (PyTypeObject *)self : Py_TYPE(self);
    return PyType_IsSubtype(type, PyDescr_TYPE((PyDescrObject *)site->target));
}

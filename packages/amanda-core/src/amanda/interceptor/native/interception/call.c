/* Arguments of intercepted calls, spread and exchanged. */
#include "interception/call.h"

PyObject *keywords_of(PyObject *const *values, PyObject *names) {
    PyObject *dict = PyDict_New();
    for (Py_ssize_t i = 0; dict && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(dict, PyTuple_GET_ITEM(names, i), values[i])) Py_CLEAR(dict);
    return dict;
}

/* A dict with the keys of another, and values in their order. */
static PyObject *with_values(PyObject *dict, PyObject *const *values) {
    PyObject *name, *value, *copy = PyDict_New();
    Py_ssize_t position = 0;
    while (copy && PyDict_Next(dict, &position, &name, &value))
        if (PyDict_SetItem(copy, name, *values++)) Py_CLEAR(copy);
    return copy;
}

/* Give a call as many other arguments, positional and then by keyword; they lie after a free place, where a vectorcall
   may put an object of its own.  NO_CALL_WITH: this kind of call takes no others. */
CallWith call_with(Call *call, PyObject **flat, NewArguments *owned) {
    Arguments *arguments = &call->arguments;
    if (arguments->receiver) call->self = arguments->receiver = *flat++;
    arguments->items = flat;
    switch (call->site->kind) {
    case ASSIGN: return NO_CALL_WITH;
    case NOARGS: case GET: return CALL_WITH_READY;
    case ONE: case SUBSCRIPT: call->a = flat[0]; return CALL_WITH_READY;
    case FAST: case FAST_KEYWORDS: case FUNCTION: case PYTHON: call->a = (PyObject *)flat; return CALL_WITH_READY;
    case KEYWORDS:
        if (arguments->dict) {
            owned->kwargs = with_values(arguments->dict, flat + arguments->count);
            if (!owned->kwargs) return CALL_WITH_FAILED;
            call->b = arguments->dict = owned->kwargs;
        } /* fall through */
    case VARARGS:
        call->a = owned->args = PyTuple_New(arguments->count);
        for (Py_ssize_t i = 0; owned->args && i < arguments->count; i++)
            PyTuple_SET_ITEM(owned->args, i, Py_NewRef(flat[i]));
        return owned->args ? CALL_WITH_READY : CALL_WITH_FAILED;
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
int receiver_fits_target(Site *site, PyObject *self) {
    if (!takes_receiver(site)) return 1;
    int in_class = Py_IS_TYPE(site->target, &PyClassMethodDescr_Type);
    PyTypeObject *type = in_class ? (PyTypeObject *)self : Py_TYPE(self);
    return PyType_IsSubtype(type, PyDescr_TYPE((PyDescrObject *)site->target));
}

/* How an intercepted call is made: as it is, or with other arguments. */
#ifndef AMANDA_CALL_H
#define AMANDA_CALL_H
#include "interception/site.h"

/* Objects made for a call with other arguments, which it owns until it has returned. */
typedef struct {
    PyObject *args, *kwargs; /* NULL: the convention needs none */
} NewArguments;

typedef enum { CALL_WITH_FAILED = -1, CALL_WITH_READY, NO_CALL_WITH } CallWith; /* FAILED: an exception is set */

PyObject *keywords_of(PyObject *const *values, PyObject *names);
PyObject *raise_failure(Thread *thread, PyObject *result);
int receiver_fits_target(Site *site, PyObject *self);
CallWith call_with(Call *call, PyObject **flat, NewArguments *owned);

FLAT PyObject *call_with_tuple(Site *site, PyObject *const *items, size_t nargsf, PyObject *names) {
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    PyObject *args = PyTuple_New(count), *kwargs = NULL, *result = NULL;
    if (!args) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(args, i, Py_NewRef(items[i]));
    if (names && PyTuple_GET_SIZE(names) && !(kwargs = keywords_of(items + count, names))) goto done;
    if (Py_EnterRecursiveCall(" while calling a Python object")) goto done;
    if (site->pristine->ml_flags & METH_KEYWORDS)
        result = ((PyCFunctionWithKeywords)(void (*)(void))site->pristine->ml_meth)(site->self, args, kwargs);
    else if (kwargs)
        PyErr_Format(PyExc_TypeError, "%s() takes no keyword arguments", site->pristine->ml_name);
    else
        result = site->pristine->ml_meth(site->self, args);
    Py_LeaveRecursiveCall();
done:
    Py_DECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

/* Run the native code that a site stands in for. All functions between a stub and that code are inlined (FLAT): an op
   calls deeper than the processor's stack of return addresses, so that each frame around it costs a mispredicted
   return. */
FLAT PyObject *vanilla(Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    switch (site->kind) {
    case NOARGS: case ONE: case VARARGS: case GET: case SUBSCRIPT:
        return ((PyCFunction)site->native)(self, a);
    case KEYWORDS:
        return ((PyCFunctionWithKeywords)site->native)(self, a, b);
    case FAST:
        return ((PyObject * (*)(PyObject *, PyObject *const *, Py_ssize_t)) site->native)(
            self, (PyObject *const *)a, (Py_ssize_t)b);
    case FAST_KEYWORDS:
        return ((PyObject * (*)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *)) site->native)(
            self, (PyObject *const *)a, (Py_ssize_t)b, c);
    case ASSIGN:
        return ((objobjargproc)site->native)(self, a, b) ? NULL : Py_NewRef(Py_None);
    case FUNCTION:
        if (site->native) return ((vectorcallfunc)site->native)(self, (PyObject *const *)a, (size_t)b, c);
        return call_with_tuple(site, (PyObject *const *)a, (size_t)b, c);
    case PYTHON:
        return PyObject_Vectorcall(self, (PyObject *const *)a, (size_t)b, c);
    }
    Py_UNREACHABLE();
}

/* Read the arguments out of the registers of a convention. `room`: for arguments that lie in registers themselves. */
FLAT Arguments read_arguments(const Site *site, PyObject **room, PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    Arguments arguments = {self, room, 0, NULL, NULL};
    switch (site->kind) {
    case FUNCTION: case PYTHON:
        return (Arguments){NULL, (PyObject *const *)a, PyVectorcall_NARGS((size_t)b), c, NULL};
    case FAST_KEYWORDS:
        arguments.names = c; /* fall through */
    case FAST:
        arguments.items = (PyObject *const *)a;
        arguments.count = (Py_ssize_t)b;
        break;
    case KEYWORDS:
        arguments.dict = b && PyDict_GET_SIZE(b) ? b : NULL; /* fall through */
    case VARARGS:
        arguments.items = ((PyTupleObject *)a)->ob_item;
        arguments.count = PyTuple_GET_SIZE(a);
        break;
    case NOARGS: case GET:
        break;
    case ASSIGN:
        room[1] = b; /* fall through */
    case ONE: case SUBSCRIPT:
        room[0] = a;
        arguments.count = site->kind == ASSIGN ? 2 : 1;
        break;
    }
    return arguments;
}

FLAT PyObject *call_op(Thread *thread, Call *call) {
    PyObject *key = thread->key;
    thread->key = call->site->flags & TRANSPARENT ? NULL : call->site->key;
    PyObject *result = vanilla(call->site, call->self, call->a, call->b, call->c);
    thread->key = key;
    return result;
}

/* A call's result, unless an operator has dropped a tool's exception for it: that is raised again. */
static inline PyObject *reraise_kept_failure(Thread *thread, PyObject *result) {
    return unlikely(result == Py_NotImplemented) && thread->failed ? raise_failure(thread, result) : result;
}

#endif

/* Python methods that are replaced by native ones. */
#ifndef AMANDA_WRAPPED_H
#define AMANDA_WRAPPED_H
#include "interception/base.h"

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* owned; what is called in the end, attributes included */
    PyObject *site;     /* owned; a detour's site, or the function that an enclosure asks for paths */
    PyObject *references; /* weak ones: compilers keep what they know of a function beside it */
} Wrapped;

#define WRAPPED_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR)

extern PyTypeObject Wrapped_Type;
PyObject *wrapped_new(PyTypeObject *type, vectorcallfunc call, PyObject *function, PyObject *site);

#endif

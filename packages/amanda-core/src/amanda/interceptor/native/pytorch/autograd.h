/* The graph of backward ops. */
#ifndef AMANDA_AUTOGRAD_H
#define AMANDA_AUTOGRAD_H
#include "interception/base.h"

/* What an execution leaves at the backward ops that it made. */
typedef struct {
    PyObject_HEAD
    PyObject *trace, *shapes; /* owned */
    long long begin, start, end;
    int order;
} Mark;

extern PyTypeObject Mark_Type;

int graph_boot(PyObject *names);
int hooks_boot(PyObject *names);
int sent_boot(PyObject *names);
int saved_boot(PyObject *names);

#endif

/* The graph of backward ops. */
#ifndef AMANDA_AUTOGRAD_H
#define AMANDA_AUTOGRAD_H
#include "interception/base.h"

int graph_boot(PyObject *names);
int hooks_boot(PyObject *names);
int sent_boot(PyObject *names);
int saved_boot(PyObject *names);

#endif

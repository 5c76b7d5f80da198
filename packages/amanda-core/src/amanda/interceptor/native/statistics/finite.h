/* Checks that tensors hold finite numbers alone. */
#ifndef AMANDA_FINITE_H
#define AMANDA_FINITE_H
#include "interception/base.h"

int finite_boot(PyObject *names);

#endif

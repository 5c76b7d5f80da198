/* Statistics of numbers in memory, for observers: they belong to no call. */
#ifndef AMANDA_MOMENTS_H
#define AMANDA_MOMENTS_H
#include "interception/base.h"

int moments_boot(PyObject *names);

#endif

/* What interception calls in the folders that lean on it: they define it, and it knows no more of them. */
#ifndef AMANDA_ABOVE_H
#define AMANDA_ABOVE_H
#include "interception/place.h"

struct Site;

/* pytorch/tensors.c: what reads the tensors of a site's calls. */
extern PyTypeObject Reader_Type;
int reader_is_trained(const Reader *reader, PyObject *tensor); /* a leaf that needs a gradient; -1: cannot be told */

/* execution/run.c: a call of an op that has a plan, or that has none yet. */
PyObject *run_plan(Thread *thread, struct Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c);

#endif

/* Tensors that backward ops have saved. Defined in pytorch/, for the framework's graph of these ops. */
#ifndef AMANDA_SAVED_H
#define AMANDA_SAVED_H
#include "interception/base.h"

typedef struct SavedTensorReader SavedTensorReader;

extern PyTypeObject SavedTensorReader_Type;

/* Called with a value that an op has saved: a tensor, a list of tensors, or None.  0: go on; any other result ends the
   visit, -1 with an exception. */
typedef int (*SavedVisitor)(PyObject *value, void *context);

/* The backward ops of some tensors that are to be searched, which it takes over. */
typedef struct {
    PyObject **ops; /* owned */
    size_t count, room;
} BackwardOps;

int add_maker(const SavedTensorReader *self, PyObject *tensor, BackwardOps *ops); /* -1: an exception */
/* Visit what ops, and those that they lead on to, have saved: the ops with numbers from first to before end.  Returns the
   last result of the visitor. */
int visit_saved(SavedTensorReader *self, BackwardOps *ops, uint64_t first, uint64_t end, SavedVisitor visit, void *context);

#endif

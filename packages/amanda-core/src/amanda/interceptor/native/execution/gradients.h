/* Gradients on their way from backward op to backward op. Defined in pytorch/, for the framework's graph of these ops. */
#ifndef AMANDA_GRADIENTS_H
#define AMANDA_GRADIENTS_H
#include "interception/place.h"

typedef struct SentGradients SentGradients;

extern PyTypeObject SentGradients_Type;

/* The backward op that runs on this thread. */
typedef struct {
    PyObject *op;      /* owned; NULL: none runs */
    int is_leaf;       /* it accumulates the gradient of a leaf */
    int has_number;
    uint64_t number;
    uint64_t key;      /* in its pass */
    long long pass;
} BackwardOp;

int find_backward_op(SentGradients *self, Thread *thread, BackwardOp *found); /* -1: an exception */
/* The same for an op of a pass that has ended; `pass` is not set.  -1: an exception. */
int read_backward_op(SentGradients *self, Thread *thread, PyObject *op, BackwardOp *found);
void drop_gradients(SentGradients *self, const BackwardOp *op, Py_ssize_t count); /* the first ones that were sent to the op */
/* Send the indices of gradients on, None for one that is not recorded.  Returns the gradient of a leaf, new; None. */
PyObject *send_gradients(SentGradients *self, Thread *thread, const BackwardOp *op, PyObject *indices);

#endif

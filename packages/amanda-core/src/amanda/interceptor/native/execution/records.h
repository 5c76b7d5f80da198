/* Recorded executions of an op, and those under way. */
#ifndef AMANDA_RECORDS_H
#define AMANDA_RECORDS_H
#include "execution/gradients.h"
#include "execution/live_tensors.h"

/* One recorded execution.  Roots and positions are trees of tuples, as deep as the values: an index, or None for no tensor. */
typedef struct {
    PyObject_HEAD
    long long index, calls, recomputations;
    long long forward; /* index of the execution whose backward op it is; -1: none is known */
    PyObject *inputs, *input_roots, *outputs, *output_roots; /* owned tuples */
    PyObject *written; /* owned tuple of (flat position, index, root) of inputs after the op */
    int64_t *roots;    /* of the inputs, or LISTED_ROOTS, NO_ROOT */
} Record;

/* A value among lists.  index, root: those that a record has for it, if has_position; in an open execution, its index
   before the op.  is_due: it is to get these. */
typedef struct {
    PyObject *value;     /* owned, while indices are set */
    PyObject *reference; /* owned, while the execution is open; NULL: not a known tensor */
    int64_t index, root;
    uint64_t version;
    char has_position, is_due;
} Leaf;

typedef struct {
    Leaf *items;
    int count, room;
} Leaves;

/* An execution under way.  serial: of the last write before the op.  number: of the next backward op before it. */
typedef struct {
    const Thread *thread;
    PyObject *execution; /* owned; with which Python began it; NULL: native code did */
    Record *record;      /* owned; that native code found */
    int64_t serial;
    uint64_t number;
    Leaves leaves;
} Open;

/* Numbers of the backward ops that an execution has made. */
typedef struct {
    uint64_t first, end;
    long long index;
} NodeRange;

typedef struct Records {
    PyObject_HEAD
    LiveTensors *live;       /* owned */
    PyObject *ops;           /* owned list; indices of the recorded executions, of which native code may not have all yet */
    PyObject *written;       /* owned tuple; flat positions of inputs that the op writes without a new version */
    struct Records *forward; /* owned; of the forward op of a backward op; NULL: none */
    Record **records;        /* owned */
    int count, room;
    char accepts_any;        /* whether an execution that fits no record is one more of the last */
    int open_count, open_room, first_range, range_count;
    Open *open;
    NodeRange *ranges; /* a ring */
    Leaves spare;
} Records;

#define UNKNOWN_ROOT (-1) /* of a tensor that fits any */
#define NO_ROOT (-2)      /* of a value that is no tensor */
#define LISTED_ROOTS (-3)

static inline int64_t integer_of(PyObject *integer) {
    return PyLong_Check(integer) ? (int64_t)PyLong_AsLongLong(integer) : UNKNOWN_ROOT;
}

static inline int64_t recorded_root(PyObject *root) {
    return PyTuple_Check(root) ? LISTED_ROOTS : root == Py_None ? NO_ROOT : integer_of(root);
}

extern PyTypeObject Records_Type;

Leaves take_spare(Records *self); /* none, in memory that is used again */
void release_leaf_values(Leaves *leaves);
void release_leaves(Records *self, Leaves *leaves);
int push_open(Records *self, Open open);                  /* begin an execution, which is taken over; -1: no memory */
int innermost(const Records *self, const Thread *thread); /* position of a thread's last execution; -1: it has none */
Open pop_open(Records *self, int i);
void release_open(Records *self, Open *open);
int add_range(Records *self, uint64_t first, uint64_t end, long long index); /* -1: no memory */
const NodeRange *range_of_node(const Records *self, uint64_t number);        /* NULL: none of the last has the number */
int repeats_boot(PyObject *names);

#endif

/* Live tensors, by the indices that a tool has given them, and the writes into their memory. */
#ifndef AMANDA_LIVE_TENSORS_H
#define AMANDA_LIVE_TENSORS_H
#include "execution/tensors.h"
#include "interception/table.h"

/* index, root: of the tensor as of the write with a serial number.  reference: owned; weak, or a function that returns it. */
typedef struct {
    int64_t index, root, serial;
    PyObject *reference;
} LiveTensor;

typedef struct LiveTensors LiveTensors;

/* What a weak reference calls as its tensor or storage ends; it does not keep what it tells. */
typedef struct {
    PyObject_HEAD
    LiveTensors *owner; /* borrowed; NULL: it is gone */
} Ending;

struct LiveTensors {
    PyObject_HEAD
    Map live_by_id;           /* address of a tensor's object -> LiveTensor */
    Map writes_by_storage;    /* address of a storage -> Writes */
    Map address_by_reference; /* weak reference -> the key of its tensor or storage in the maps above */
    Map width_by_kind;        /* element type and device, plus 1 -> bytes */
    int64_t serial;           /* of the last write */
    long long counted;        /* executions that native code has counted */
    int busy;                 /* > 0: Python is recording an execution */
    Ending *ending;           /* owned */
};

typedef enum { ONLY_PYTHON_KNOWS = -1, UNCHANGED_SINCE, CHANGED_SINCE } Change;

extern PyTypeObject LiveTensors_Type;

static inline LiveTensor *live_find(const LiveTensors *self, PyObject *tensor) {
    return map_get(&self->live_by_id, (uint64_t)(uintptr_t)tensor);
}

PyObject *referent(PyObject *reference); /* new; NULL: the tensor is gone */
int live_set(LiveTensors *self, PyObject *tensor, int64_t index, int64_t root); /* -1: an exception; may run Python */
/* Whether a tensor was written after the write with a serial number. */
Change changed_since(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor, int64_t serial);
/* Make ready for `note_write`; 0: only Python can note a write of this tensor. May run Python. */
int can_note_write(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor);
int note_write(LiveTensors *self, Thread *thread, const Reader *reader, PyObject *tensor, int64_t op); /* -1: no memory */
int live_boot(PyObject *names);

#endif

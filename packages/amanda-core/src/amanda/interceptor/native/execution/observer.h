/* Observers in native code: objects that programs run without a call of Python. */
#ifndef AMANDA_OBSERVER_H
#define AMANDA_OBSERVER_H
#include "execution/tensors.h"

/* Inputs of the op at which an observer runs after it, or the gradients that entered a backward op. */
typedef struct {
    PyObject *const *items;
    Py_ssize_t count;
    int is_alone; /* whether the routines before the op were idle, and left out */
} OpInputs;

typedef enum { OBSERVER_FAILED = -1, CALL_PYTHON, OBSERVED } Observation; /* FAILED: an exception is set */

/* Base of such objects. A program calls the object itself, as any routine, after CALL_PYTHON. */
typedef struct Observer {
    PyObject_HEAD
    Observation (*observe)(struct Observer *self, Thread *thread, const Reader *reader, PyObject *const *values,
                           Py_ssize_t count, const OpInputs *op_inputs);
    /* Called for a routine after an op where Python runs the rest of the execution; -1: an exception. NULL: none. */
    int (*hand_over)(struct Observer *self, Thread *thread, const Reader *reader, const OpInputs *op_inputs);
    /* Whether a call of `observe` before an op has no effect, also on what runs after the op. NULL: each has some. */
    int (*is_idle)(const struct Observer *self);
    /* Count an execution of a backward op as `observe` after the op does, without a call by the op; -1: an exception.
       NULL: there is no such way.  may_repeat: whether that would record all that `observe` does. */
    int (*repeat)(struct Observer *self, Thread *thread, PyObject *op);
    int (*may_repeat)(const struct Observer *self);
    enum { ALL_VALUES, SELECTED_VALUES, NO_VALUES } reads; /* ALL: it serves no routine that selects some */
} Observer;

#define NUMBER_LIMIT (1 << 24) /* of ops on a clock or a tracker, whose tables have a row for each */

/* The clock of time.perf_counter_ns. */
static inline int64_t nanoseconds(void) {
#if PY_VERSION_HEX >= 0x030D0000
    PyTime_t now = 0;
    return PyTime_PerfCounterRaw(&now) ? 0 : now;
#else
    return _PyTime_GetPerfCounter();
#endif
}

extern PyTypeObject Observer_Type;
int observer_boot(PyObject *names);
int storages_boot(PyObject *names);
int clock_boot(PyObject *names);
int records_boot(PyObject *names);

#endif

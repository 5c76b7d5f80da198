/* The values of an execution: the inputs as routines have changed them, the outputs, their shapes. */
#ifndef AMANDA_VALUES_H
#define AMANDA_VALUES_H
#include "execution/program.h"

/* Values that a routine is called with lie after a free place, which a method takes for its own object. */
typedef struct {
    PyObject *free, *items[VALUE_LIMIT];
} Values;

#define UNREAD (-1) /* count of values that have not been read, or that only Python can read */

typedef struct {
    Values inputs;
    Py_ssize_t count;  /* of inputs; or UNREAD */
    uint32_t changed;  /* a bit for each input that a routine has changed */
    PyObject *packed;  /* owned; the input that is a tuple of several arguments; NULL: none is */
    int replacement_count;
    PyObject *replacements[VALUE_LIMIT]; /* owned; values that routines returned */
    Shapes shapes; /* of the inputs, and once the op has run, of the outputs */
} Execution;

static inline void execution_begin(Execution *execution) { /* without a write to the arrays, which are large */
    execution->count = UNREAD;
    execution->changed = 0;
    execution->packed = NULL;
    execution->replacement_count = 0;
    execution->shapes.objects = NULL;
    execution->shapes.code.count = 0;
}

void release_values(Execution *execution);

static inline void execution_end(Execution *execution) {
    if (execution->replacement_count || execution->shapes.objects || execution->packed) release_values(execution);
}

/* Lay out all arguments, for which there is room, and return how many there are. */
static inline int flatten_arguments(const Arguments *arguments, PyObject **flat) {
    PyObject *const *items = arguments->items, **end = flat;
    if (arguments->receiver) *end++ = arguments->receiver;
    for (Py_ssize_t i = arguments->count + named_count(arguments); i > 0; i--) *end++ = *items++;
    PyObject *name, *value, *dict = arguments->dict;
    Py_ssize_t position = 0;
    while (dict && PyDict_Next(dict, &position, &name, &value)) *end++ = value;
    return (int)(end - flat);
}

int gather_inputs(Execution *execution, const Program *program, const Arguments *arguments);

/* Read the inputs, unless they have been read. 0: only Python can read them, or an exception is set. */
static inline int read_inputs(Execution *execution, const Program *program, const Arguments *arguments) {
    return execution->count != UNREAD || gather_inputs(execution, program, arguments);
}

Py_ssize_t items_of_outputs(const Reader *reader, const Program *program, const Execution *execution,
                          PyObject *const *outputs, PyObject *const **values, PyObject **written);

/* Point `values` to the outputs of a call that returned `*outputs`: that object, its items, or inputs that the call has
   written, which are put into `written`. Return how many there are, or UNREAD. */
static inline Py_ssize_t outputs_of(const Reader *reader, const Program *program, const Execution *execution,
                                    PyObject *const *outputs, PyObject *const **values, PyObject **written) {
    *values = outputs;
    return reader_is_tensor(reader, *outputs) ? 1
                                              : items_of_outputs(reader, program, execution, outputs, values, written);
}

int shares_changed_memory(const Reader *reader, const Execution *execution, PyObject *const *values, Py_ssize_t count);
int may_replace_output(const Reader *reader, int gradients, const Execution *execution, PyObject *output, PyObject *value,
                       int last);
int shapes_of_inputs(const Reader *reader, Program *program, Execution *execution);
PyObject *shapes_of_outputs(const Reader *reader, Program *program, Execution *execution, PyObject *outputs);

#endif

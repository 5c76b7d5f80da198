/* A plan in native form: what calls of an op come to, and where Python goes on. */
#ifndef AMANDA_PROGRAM_H
#define AMANDA_PROGRAM_H
#include "execution/counts.h"
#include "execution/tally.h"
#include "execution/tensors.h"
#include "interception/lock.h"

#define VALUE_LIMIT 32

/* What a call reads first lies together, here and below. */
typedef struct {
    Tally *tally;             /* borrowed; the func itself, which native code counts in; NULL: it is called */
    char isolated, takes_all;
    char takes_shapes;        /* of the values, by the last of the names */
    uint8_t count, positional; /* the rest of those selected are passed by name */
    PyObject *func;           /* owned */
    Lock *lock;               /* owned */
    PyObject *names, *kwargs; /* owned; names: of kwargs; both NULL for none */
    uint8_t select[VALUE_LIMIT];
} Step;

typedef struct {
    PyObject_VAR_HEAD
    PyObject *trace;  /* owned; called for the backward ops that the op made, or a BackwardMarker; None: neither */
    PyObject *refuse; /* owned; tells of the first argument that only Python can run the call; None: of none */
    PyObject *written; /* owned tuple; positions of the inputs that are the outputs where a call returns None */
    int8_t *sources;  /* input -> flat argument, or constant; NULL: the arguments as they are */
    int before, after;
    int8_t source_count, spread, first, last; /* spread: the input that is a tuple of several arguments; -1: none is */
    char replaces;    /* the step after all others runs instead of the op */
    char substitutes; /* values may take the place of others here */
    char shaped;      /* shapes are wanted, by steps or at backward ops */
    char tallied;     /* they are wanted as a code, by steps that count */
    PyObject *shapes; /* owned; those of the last call, which the next one shares where they are the same; NULL: none */
    PyObject *reporter; /* owned; its methods add to, or raise, what went wrong in a step */
    PyObject *constants; /* owned tuple; inputs that the call leaves to their defaults */
    PyObject *plan;      /* owned; what Python goes on with */
    Step steps[];
} Program;

/* An op's plans, for Python, and what its calls come to by the key of their form. */
typedef struct {
    PyObject_HEAD
    char sized;      /* whether extents of tensors decide too */
    Cell last_learned; /* a copy of the entry: in the object itself it costs no miss of the processor's cache */
    PyObject *plans; /* owned */
    Map entries;     /* key of a call -> owned Program; None: nothing is to be done */
} CallCache;

/* The shapes of one execution, for steps and for marks. */
typedef struct {
    PyObject *objects; /* owned; a tuple of those of each side so far; NULL: not wanted as objects */
    ShapeCode code;
} Shapes;

extern PyTypeObject CallCache_Type, Program_Type, Hook_Type;
int execution_boot(PyObject *names);

/* Run the steps on values that belong to no call; shapes: for the steps that take some. None, or the Resumption with
   which Python goes on. */
PyObject *run_on_values(Program *program, const Reader *reader, PyObject *values, Shapes *shapes);
PyObject *shapes_as_objects(Shapes *shapes); /* borrowed; NULL: an exception */
int add_shapes(const Reader *reader, PyObject **shapes, PyObject *const *values, Py_ssize_t count); /* of one more side */
PyObject *program_hook(Program *program, PyObject *args);

/* ---- handler.c: the way to Python ---- */

extern PyTypeObject Resumption_Type;

/* Where Python goes on after native code: after a step, of which the routine returned `result` (stolen; NULL: None).
   outputs: NULL: the op has not run.  inputs: a list of those that routines have changed (stolen); NULL: none has. */
PyObject *make_resumption(PyObject *plan, Py_ssize_t step, PyObject *result, PyObject *outputs, PyObject *inputs);

/* key: under which the call's form may be learned; 0: it may not.  resumption: NULL: nothing of the plan is done. */
PyObject *call_handler(Thread *thread, const Call *call, uint64_t key, PyObject *resumption);

#endif

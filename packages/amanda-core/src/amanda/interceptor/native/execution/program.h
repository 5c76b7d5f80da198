/* A plan in native form: the routines that run at calls of an op, and the state with which Python continues. */
#ifndef AMANDA_PROGRAM_H
#define AMANDA_PROGRAM_H
#include "execution/counts.h"
#include "execution/tally.h"
#include "execution/observer.h"
#include "interception/lock.h"

#define VALUE_LIMIT 32

/* One routine of a program. Here and below, the fields that a call reads first lie together, in few lines of the cache. */
typedef struct {
    Tally *tally;             /* borrowed; the func itself, if native code counts in it; NULL: the func is called */
    Observer *observer;       /* borrowed; the func itself, if native code may observe instead; NULL: it may not */
    char isolated, takes_all;
    char takes_shapes;        /* a keyword `shapes`, which is the last of the names */
    uint8_t count, positional; /* of selected values: all, and those passed by position; the others go by name */
    PyObject *func;           /* owned */
    Lock *lock;               /* owned */
    PyObject *names, *kwargs; /* owned; names: of kwargs; both NULL for none */
    uint8_t select[VALUE_LIMIT];
} Step;

typedef struct {
    PyObject_VAR_HEAD
    PyObject *trace;  /* owned; called for the backward ops that the op made, or a BackwardMarker; None: neither */
    PyObject *refuse; /* owned; called with the first input: true if only Python can run the call; None: never */
    PyObject *written; /* owned tuple; positions of the inputs that are the outputs of a call that returns None */
    int8_t *sources;  /* for each input the position of its argument, -1: a constant; NULL: inputs are the arguments */
    int before, after;
    int8_t source_count, packed_input, first, last; /* packed_input: made of the arguments from first to before last; -1: none */
    char replaces;    /* whether there is one step more, which runs instead of the op */
    char substitutes; /* whether native code may put values that routines return in the place of tensors */
    char needs_shapes;      /* as Python objects, for steps or for marks at backward ops */
    char needs_shape_codes; /* as words, for steps that count */
    PyObject *shapes; /* owned; of the last call, which the next call of these shapes shares; NULL: none yet */
    PyObject *reporter; /* owned; its methods raise errors of steps, or add notes to them */
    PyObject *constants; /* owned tuple; inputs that the call leaves to their defaults */
    PyObject *plan;      /* owned; handed to Python with a call that Python continues */
    Step steps[];
} Program;

/* An op's plans, for Python, and the programs of its calls by the key of their form. */
typedef struct {
    PyObject_HEAD
    char sized;      /* whether the extents of tensors are a part of keys */
    Cell last_learned; /* a copy of the entry: in the object itself it costs no miss of the processor's cache */
    PyObject *plans; /* owned */
    Map entries;     /* key of a call -> owned Program; None: the op runs as it is */
} CallCache;

/* The shapes of one execution, for steps and for marks. */
typedef struct {
    PyObject *objects; /* owned; a tuple of the shapes of inputs, outputs, ... so far; NULL: not made */
    ShapeCode code;
} Shapes;

extern PyTypeObject CallCache_Type, Program_Type, Hook_Type;
int execution_boot(PyObject *names);

/* Run the steps of a hook on a tuple of values.  entered: a tuple of the gradients that entered the op, for a hook after
   it; or NULL.  is_alone: whether no hook before the op has run.  shapes: for the steps that take some.  Returns None, or
   the Resumption with which Python continues. */
PyObject *run_on_values(Program *program, const Reader *reader, PyObject *values, PyObject *entered, int is_alone,
                        Shapes *shapes);
PyObject *shapes_as_objects(Shapes *shapes); /* borrowed; NULL: an exception */
int add_shapes(const Reader *reader, PyObject **shapes, PyObject *const *values, Py_ssize_t count); /* of one more side */
PyObject *program_hook(Program *program, PyObject *args);

/* ---- handler.c: the way to Python ---- */

extern PyTypeObject Resumption_Type;

/* The state with which Python continues after a step, whose routine returned `result` (stolen; NULL: None).
   outputs: NULL: the op has not run.  inputs: a list of all, if routines have changed some (stolen); NULL: none. */
PyObject *make_resumption(PyObject *plan, Py_ssize_t step, PyObject *result, PyObject *outputs, PyObject *inputs);

/* Call Python's handler.  key: under which the handler may store a program for calls of this form; 0: it may not.
   resumption: NULL: no step of the plan has run. */
PyObject *call_handler(Thread *thread, const Call *call, uint64_t key, PyObject *resumption);

#endif

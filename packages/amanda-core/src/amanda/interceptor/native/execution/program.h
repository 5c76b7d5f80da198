/* What calls of an op come to, as native code runs it. */
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
    char isolated, everything;
    char shapes;              /* it is given those of the values, by the last of the names */
    uint8_t count, positional; /* the rest of those selected are given by name */
    PyObject *func;           /* owned */
    Lock *lock;               /* owned */
    PyObject *names, *kwargs; /* owned; names: of kwargs; both NULL for none */
    uint8_t select[VALUE_LIMIT];
} Step;

typedef struct {
    PyObject_VAR_HEAD
    PyObject *trace;  /* owned; hears of the backward ops that the op made; None: nobody does */
    PyObject *refuse; /* owned; says of the first argument that only Python can; None: of none */
    PyObject *written; /* owned tuple; positions of the inputs that are the outputs where a call returns None */
    int8_t *sources;  /* input -> flat argument, or constant; NULL: the arguments as they are */
    int before, after;
    int8_t source_count, spread, first, last; /* spread: the input that is a tuple of several arguments; -1: none is */
    char replaces;    /* the step after all others runs instead of the op */
    char substitutes; /* values may be put in the place of others here */
    char shaped;      /* shapes are wanted, by steps or at backward ops */
    char tallied;     /* they are wanted as words, by steps that count */
    PyObject *shapes; /* owned; those of the last call, which the next one has too where they are the same; NULL: none */
    PyObject *told;   /* owned; Python's word on what went wrong in a step */
    PyObject *constants; /* owned tuple; inputs that the call leaves to their defaults */
    PyObject *plan;      /* owned; what Python goes on with */
    Step steps[];
} Program;

/* What is known of an op that has a plan: the plans themselves, for Python, and what calls that were met before
   come to: nothing at all, or a program. */
typedef struct {
    PyObject_HEAD
    char sized;      /* whether extents of tensors decide too */
    Cell usual;      /* that of the entries which was learned last: in the memo itself it costs no miss of the cache */
    PyObject *plans; /* owned */
    Map entries;     /* key of a call -> owned Program; None: nothing is to be done */
} Memo;

/* The shapes of one execution, for steps and for marks. */
typedef struct {
    PyObject *told; /* owned; a tuple of those of each side so far; NULL: not wanted as objects */
    Words words;
} Shapes;

/* Run the steps on values that belong to no call; shapes: for those that are given some. None, or what Python goes on
   from. */
PyObject *run_on_values(Program *program, const Reader *reader, PyObject *values, Shapes *shapes);
PyObject *told_shapes(Shapes *shapes); /* borrowed; as objects in any case; NULL: an exception */
int add_shapes(const Reader *reader, PyObject **shapes, PyObject *const *values, Py_ssize_t count);
PyObject *program_hook(Program *program, PyObject *args);
PyObject *hand_over(Thread *thread, Call *call, uint64_t key, PyObject *done);

extern PyTypeObject Memo_Type, Program_Type, Hook_Type;
int memo_boot(PyObject *names);

#endif

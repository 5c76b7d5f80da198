/* What is intercepted, and what is in force: sites, their calls, activations. */
#ifndef AMANDA_SITE_H
#define AMANDA_SITE_H
#include "interception/place.h"
#include "interception/above.h"

#define TRANSPARENT 1    /* ops called by the native code of this one are ops of their own */
#define IMPLEMENTATION 2 /* called inside another op, it is a part of that op */
#define ONE_PLACE 4      /* the parameters that it is given do not tell its calls apart */

/* The arguments of a call: an array, and keyword names or a dict, whichever the convention gives. */
typedef struct {
    PyObject *small[3];
    PyObject *const *items;
    Py_ssize_t count;
    PyObject *self, *names, *dict; /* self: NULL unless an argument of its own */
} Arguments;

/* FUNCTION: a builtin function, of any convention. Its own vectorcall pointer is set, because what
   a builtin hashes to includes its ml_meth, and programs keep builtins in dicts. The interpreter
   passes that pointer by where it has specialised a call on the builtin's flags: while it is placed
   its definition is a copy with a flag more, which means nothing to a function of a module. */
typedef enum {
    NOARGS, ONE, VARARGS, KEYWORDS, FAST, FAST_KEYWORDS, GET, SUBSCRIPT, ASSIGN, FUNCTION, PYTHON
} Kind;

typedef struct Site {
    PyObject_HEAD
    uint64_t hash; /* what every call reads comes first */
    PyObject *key;
    void *native;   /* what the stub stands in for */
    PyObject *self; /* FUNCTION: borrowed from the target; what its native code is given first */
    Kind kind;
    int flags;
    int bound; /* `self` is the first argument */
    int index;
    char placed;
    PyObject *op, *handler, *target;
    PyObject *original; /* behaves like the target when nothing is placed */
    Reader *reader;     /* owned; NULL: every op that has a plan goes to its handler */
    PyMethodDef *pristine;
    PyMethodDef marked; /* FUNCTION: what the builtin has while placed */
    PyMethodDef *own;   /* FUNCTION: what it has otherwise */
    PyGetSetDef *pristine_get;
    union {
        PyMethodDef *method;
        PyGetSetDef *get;
        PyWrapperDescrObject *slot;
        PyCFunctionObject *function;
    } where;
} Site;

/* What the context variable holds while a scope is open. */
typedef struct Activation {
    PyObject_HEAD
    int active;
    int memos;        /* whether what memos have learned holds */
    int variant;      /* of what memos have learned, the part that holds */
    PlanTable *table; /* NULL: no plan is kept, every op reaches its handler */
    PyObject *state;
    PyObject *references; /* weak */
} Activation;

/* One call that is being intercepted; its registers are as the site's convention has them. */
typedef struct {
    Site *site;
    PyObject *state; /* of the activation when the call began */
    PyObject *plan; /* None: there is none */
    uint64_t id;
    const Arguments *given;
    PyObject *self, *a, *b, *c;
} Call;

extern PyTypeObject Activation_Type, Site_Type, Detour_Type, Suspension_Type;

Activation *active_activation(Thread *thread); /* new reference or NULL; never an exception */
int stub_boot(PyObject *names);
int extent_boot(PyObject *names);

#endif

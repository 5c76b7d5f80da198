/* Sites (callables that are intercepted), their calls, and activations (the tools that are in force). */
#ifndef AMANDA_SITE_H
#define AMANDA_SITE_H
#include "interception/place.h"

#define TRANSPARENT 1    /* ops called by the native code of this one are ops of their own */
#define IMPLEMENTATION 2 /* called inside another op, it is a part of that op */
#define ONE_PLACE 4      /* parameters among the arguments do not tell its calls apart */

/* FUNCTION: a builtin function, of any convention. Its own vectorcall pointer is set, because what
   a builtin hashes to includes its ml_meth, and programs keep builtins in dicts. The interpreter
   passes that pointer by where it has specialised a call on the builtin's flags: while it is placed
   its definition is a copy with a flag more, which means nothing to a function of a module. */
typedef enum {
    NOARGS, ONE, VARARGS, KEYWORDS, FAST, FAST_KEYWORDS, GET, SUBSCRIPT, ASSIGN, FUNCTION, PYTHON
} Kind;

typedef struct Site {
    PyObject_HEAD
    uint64_t hash; /* this and the next fields are read at every call, so they lie together */
    PyObject *key;
    void *native;   /* what the stub stands in for */
    PyObject *self; /* FUNCTION: borrowed from the target; the first argument of its native code */
    Kind kind;
    int flags;
    int index;
    char placed;
    PyObject *op, *handler, *target;
    PyObject *original; /* behaves like the target when nothing is placed */
    Reader *reader;     /* owned; NULL: every op that has a plan goes to its handler */
    PyMethodDef *pristine;
    PyMethodDef placed_definition; /* FUNCTION: what the builtin has while placed */
    PyMethodDef *definition;       /* FUNCTION: what it has otherwise */
    PyGetSetDef *pristine_get;
    union {
        PyMethodDef *method;
        PyGetSetDef *get;
        PyWrapperDescrObject *slot;
        PyCFunctionObject *function;
    } where;
} Site;

/* Methods, descriptors and slots of a class are called with an object before the arguments. */
static inline int takes_receiver(const Site *site) { return site->kind != FUNCTION && site->kind != PYTHON; }

/* What the context variable holds while a scope is open. */
typedef struct {
    PyObject_HEAD
    int active;
    int caches;       /* whether programs of call caches may run */
    int variant;      /* part of the key of these programs: executions that are recorded or recalled have others */
    PlanTable *table; /* NULL: no plan is stored, every op reaches its handler */
    PyObject *state;
    PyObject *references; /* weak */
} Activation;

/* The arguments of a call, as the convention gives them; all is borrowed from the caller. */
typedef struct {
    PyObject *receiver;        /* the object before the others; NULL: there is none */
    PyObject *const *items;    /* positional ones, then those of `names` */
    Py_ssize_t count;          /* of positional ones */
    PyObject *names, *dict;    /* those by keyword: a tuple of names, or a dict that is not empty; NULL */
} Arguments;

static inline Py_ssize_t named_count(const Arguments *arguments) {
    return arguments->names ? PyTuple_GET_SIZE(arguments->names) : 0;
}

/* One call that is being intercepted; its registers are as the site's convention has them. */
typedef struct {
    Site *site;
    PyObject *state; /* of the activation when the call began */
    PyObject *plan; /* NULL: there is none yet */
    uint64_t id;
    Arguments arguments;
    PyObject *self, *a, *b, *c;
} Call;

extern PyTypeObject Activation_Type, Site_Type, Detour_Type, Suspension_Type;

Activation *active_activation(Thread *thread); /* new reference or NULL; never an exception */
/* Whether a routine runs on the thread, or instrumentation is disabled there; 0 where nothing is in force. */
int is_switched_off(Thread *thread);

/* ---- stubs ---- */

void *stub_of(const Site *site);         /* its index is set */
Site *site_behind(const void *pointer);  /* whose stub it is; NULL: it is a target's own */
int take_stub(Site *site);               /* -1 with an exception: there is none left */

int activation_boot(PyObject *names);
int site_boot(PyObject *names);
int extent_boot(PyObject *names);

/* ---- what interception calls in the folders that lean on it, of which it knows no more ---- */

/* pytorch/tensors.c. A leaf that needs a gradient is trained; Python tells of what is no plain tensor. */
typedef enum { ASK_PYTHON = -1, NOT_TRAINED, TRAINED } Training;

extern PyTypeObject Reader_Type;
Training reader_training(const Reader *reader, PyObject *tensor);

/* execution/run.c: run a call of an op that has a plan, or none yet. The activation is borrowed from the context: it is
   read before any Python runs. */
PyObject *run_call(Thread *thread, const Activation *activation, Call *call);

#endif

/* What the parts of the native interceptor share. CPython only; no framework. */
#ifndef AMANDA_H
#define AMANDA_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "the native interceptor needs the GIL; a free-threaded build is served by the pure-Python one"
#endif
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#define AMANDA_OCCURRENCE_CAP 64

/* ---- table.c: plans by op id, places by count, addresses by ordinal ---- */

typedef struct {
    uint64_t key;
    void *value;
} Cell;

/* Open addressing, power-of-two size, no key 0; a removed cell keeps its key with value NULL. */
typedef struct {
    Cell *cells;
    size_t size, used;
} Map;

static inline size_t map_slot(const Map *map, uint64_t key) {
    size_t i = (size_t)(key * 0x9E3779B97F4A7C15ULL >> 20) & (map->size - 1);
    while (map->cells[i].key && map->cells[i].key != key) i = (i + 1) & (map->size - 1);
    return i;
}

static inline void *map_get(const Map *map, uint64_t key) {
    return map->size ? map->cells[map_slot(map, key)].value : NULL;
}

int map_set(Map *map, uint64_t key, void *value); /* -1: out of memory, no exception set */
int map_reserve(Map *map, size_t more);           /* -1 likewise; else there is room for a few more keys */
void *map_remove(Map *map, uint64_t key);         /* what was there; allocates nothing */
void map_clear(Map *map);

typedef struct {
    PyObject_HEAD
    Map map; /* id -> owned reference; Py_None: nothing is inserted at this op */
} PlanTable;

extern PyTypeObject PlanTable_Type;

typedef struct Reader Reader;

/* ---- place.c: where the program is ---- */

/* The path of an object within another that encloses its calls. */
typedef struct {
    uint64_t owner, hash;
} Path;

/* An object that has an ordinal. */
typedef struct {
    uint64_t ordinal;
    Path path;  /* the first that was asked for; owner 0: none was */
    Path *more; /* the others */
    int more_count;
    int asks;            /* how often it is still asked whether it has come to lie in a slot of an enclosing object */
    PyObject *reference; /* owned; weak, or the object itself where its type has no weak references */
    int is_strong;       /* whether `reference` is the object */
} Named;

#ifdef AMANDA_CHECKED
void disturb(void); /* where Python may run, a build for tests calls what a test has set */
#else
static inline void disturb(void) {}
#endif

#define AMANDA_FIRST_COUNTS 8 /* a power of two */

/* One enclosing call (a module's, say), or the root of a thread. Counts tell repeats apart. */
typedef struct Region {
    PyObject_HEAD
    uint64_t hash;
    struct Region *parent; /* owned */
    void *entry;           /* frame that made the call; the walk of call sites ends here */
    unsigned ends_before, ends_after; /* kinds of code that it ends at besides; ends_after: at the root alone */
    int is_over;           /* the call has returned */
    int tail_length, way_length;
    uint64_t *tail;        /* call sites that a replay adds to those it walks, and then those of the way there */
    PyObject *subject;     /* owned; the object called; NULL at the root and in a replay */
    const Named *named;    /* of the subject, which keeps it; NULL: not looked up, or it has none */
    Map counts;
    Cell first[AMANDA_FIRST_COUNTS]; /* where the counts are while they are few */
} Region;

extern PyTypeObject Region_Type, Snapshot_Type, Enclosure_Type;

static inline void clear_cells(Cell *cells, size_t count) { /* few: no call, and no string instruction */
    for (size_t i = 0; i < count; i++) cells[i] = (Cell){0, NULL};
}

typedef struct {
    int off;       /* > 0: a routine runs, nothing is intercepted */
    PyObject *key; /* borrowed; canonical name of the op whose native code runs */
    Region *top;   /* owned; NULL: the root */
    Region *root;  /* owned by the thread's dict */
    int failed;        /* a tool raised since the last op began, and an operator may drop the exception */
    uint64_t met;      /* number of the watch that was told of this thread */
    char *switches;    /* the framework's, of this thread; NULL: not asked for yet */
    struct {           /* of the op that `run_plan` is about to be called for */
        struct Activation *activation;
        PyObject *plan; /* borrowed; NULL: there is none yet */
        uint64_t id;
    } next;
} Thread;

Thread *thread_state(void);
PyObject *take_failure(Thread *thread); /* new; the exception, which is forgotten; NULL: there is none */
Region *current_region(Thread *thread); /* borrowed; NULL with an exception set */

static inline uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 6364136223846793005ULL + 1442695040888963407ULL;
    return hash ^ (hash >> 32);
}

int place_of(Thread *thread, uint64_t op_hash, uint64_t *place, uint64_t *way); /* way: 0 but at the root */
int mix_identities(uint64_t *hash, PyObject *value);
int mix_leaf(uint64_t *way, const Reader *reader, PyObject *value);
uint64_t occurrence_of(Region *region, uint64_t place, uint64_t way, int *failed);
int ordinal_of(PyObject *object, uint64_t *ordinal);
int place_boot(PyObject *names);

/* Like a tuple, no type here but PlanTable and Memo has tp_clear: its objects are whole for as long as what
   dies in a collection may call them, and every cycle has another object that clears. */

/* ---- wrapped.c: Python methods that are replaced by native ones ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* owned; what is called in the end, attributes included */
    PyObject *site;     /* owned; a detour's site, or whom an enclosure asks for paths */
} Wrapped;

#define WRAPPED_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR)

extern PyTypeObject Wrapped_Type;
PyObject *wrapped_new(PyTypeObject *type, vectorcallfunc call, PyObject *function, PyObject *site);

/* ---- lock.c: one routine of a tool at a time ---- */

typedef struct {
    PyObject_HEAD
    const Thread *owner;
    int depth, waiting, open; /* open: the gate is released and nobody has passed it yet */
    PyThread_type_lock gate; /* NULL until a thread has to wait */
    uint64_t forks;
} Lock;

extern PyTypeObject Lock_Type;
extern uint64_t forks;
int lock_wait(Lock *lock, const Thread *thread);
void lock_open(Lock *lock);
int lock_boot(PyObject *names);

static inline int lock_acquire(Lock *lock, const Thread *thread) { /* -1: an exception */
    if ((lock->depth && lock->owner != thread) || lock->forks != forks) return lock_wait(lock, thread);
    lock->owner = thread;
    lock->depth++;
    return 0;
}

static inline void lock_release(Lock *lock) {
    if (!--lock->depth && lock->waiting) lock_open(lock);
}

/* ---- reader.c: what native code may know of a framework's tensors ---- */

/* The arguments of a call: an array, and keyword names or a dict, whichever the convention gives. */
typedef struct {
    PyObject *small[3];
    PyObject *const *items;
    Py_ssize_t count;
    PyObject *self, *names, *dict; /* self: NULL unless an argument of its own */
} Arguments;

extern PyTypeObject Reader_Type;
/* 0: cannot be told. sized: extents of tensors decide too. */
uint64_t reader_key(const Reader *reader, Thread *thread, const Arguments *given, int sized, int *gradients);
#define UNVERSIONED ((uint64_t)-1)
int reader_is_plain(const Reader *reader, PyObject *value);
int reader_is_kept_out(const Reader *reader); /* a mode is in force that wants Python */
uint64_t reader_clock(const Reader *reader);
int reader_needs_gradient(const Reader *reader, PyObject *tensor);
int reader_is_trained(const Reader *reader, PyObject *tensor); /* a leaf that needs a gradient; -1: cannot be told */
int reader_is_leaf(const Reader *reader, PyObject *tensor); /* of a plain tensor */
const void *reader_memory(const Reader *reader, PyObject *tensor); /* NULL: cannot be told */
PyObject *reader_shapes(const Reader *reader, PyObject *const *values, Py_ssize_t count,
                        PyObject *before); /* new; `before` itself where it equals them; NULL: an exception */
int reader_fits(const Reader *reader, PyObject *original, PyObject *value);
PyObject *reader_placed(const Reader *reader, PyObject *original, PyObject *value, int gradients);

/* ---- graph.c: what executions leave for their backward ops ---- */

extern PyTypeObject Leaving_Type;
int marks_written(PyObject *leaving); /* whether it wants the value that the op wrote */
int leave_mark(PyObject *leaving, uint64_t begin, uint64_t start, uint64_t end, PyObject *outputs, PyObject *written,
               PyObject *shapes);
int graph_boot(PyObject *names);

/* ---- statistics.c: how many calls of ops with plans ran where ---- */

typedef enum { NEW_OP, NEW_FORM, NO_READER, MODE, ARGUMENTS, SWITCHES, RESULT, WRITTEN, REASONS } Reason;

extern struct Counts {
    uint64_t native, learned, handed[REASONS]; /* under the GIL; handed: to Python, by reason */
} counts;

int statistics_boot(PyObject *names);

/* ---- stub.c, call.c: interception ---- */

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
PyObject *hand_over(Thread *thread, Call *call, uint64_t key, PyObject *done);
int call_with(Call *call, Arguments *given, PyObject **flat, PyObject **made);
int stub_boot(PyObject *names);

/* ---- run.c: calls of ops that have plans ---- */

PyObject *run_plan(Thread *thread, Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c);

/* ---- memo.c, program.c, hook.c: what calls of an op come to ---- */

extern PyTypeObject Memo_Type, Program_Type, Hook_Type;
int memo_boot(PyObject *names);

/* ---- extent.c: entered and left as a whole ---- */

int extent_boot(PyObject *names);

/* ---- moments.c: statistics of numbers in memory ---- */

int moments_boot(PyObject *names);

int add_function(PyObject *names, PyMethodDef *def);
int add_type(PyObject *names, const char *name, PyTypeObject *type);

#endif

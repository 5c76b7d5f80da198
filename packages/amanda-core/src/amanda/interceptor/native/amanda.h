/* What the parts of the native interceptor share. CPython only; no framework. */
#ifndef AMANDA_H
#define AMANDA_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "the native interceptor needs the GIL; a free-threaded build is served by the pure-Python one"
#endif
#include <stddef.h>
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

void *map_get(const Map *map, uint64_t key);
int map_set(Map *map, uint64_t key, void *value); /* -1: out of memory, no exception set */
void *map_remove(Map *map, uint64_t key);         /* what was there; allocates nothing */
void map_clear(Map *map);

typedef struct {
    PyObject_HEAD
    Map map; /* id -> owned reference; Py_None: nothing is inserted at this op */
} PlanTable;

extern PyTypeObject PlanTable_Type;

/* ---- place.c: where the program is ---- */

/* One enclosing call (a module's, say), or the root of a thread. Counts tell repeats apart. */
typedef struct Region {
    PyObject_HEAD
    uint64_t hash;
    struct Region *parent; /* owned */
    PyObject *subject;     /* owned; the object called; NULL at the root and in a replay */
    void *entry;           /* frame that made the call; the walk of call sites ends here */
    uint64_t *tail;        /* call sites that a replay adds to those it walks */
    int tail_length;
    Map counts;
} Region;

extern PyTypeObject Region_Type, Snapshot_Type, Enclosure_Type;

typedef struct {
    int off;       /* > 0: a routine runs, nothing is intercepted */
    PyObject *key; /* borrowed; canonical name of the op whose native code runs */
    Region *top;   /* owned; NULL: the root */
    Region *root;  /* owned by the thread's dict */
    PyObject *failure; /* owned; what a tool raised since the last op began, where that may be dropped */
} Thread;

Thread *thread_state(void);
Region *current_region(Thread *thread); /* borrowed; NULL with an exception set */

static inline uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 6364136223846793005ULL + 1442695040888963407ULL;
    return hash ^ (hash >> 32);
}

int place_of(Thread *thread, uint64_t op_hash, uint64_t *place);
int mix_identities(uint64_t *hash, PyObject *value);
uint64_t occurrence_of(Region *region, uint64_t place, int *failed);
int ordinal_of(PyObject *object, uint64_t *ordinal);
int place_boot(PyObject *names);

/* Like a tuple, no type here but PlanTable has tp_clear: its objects are whole for as long as what
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

/* ---- stub.c: interception ---- */

/* What the context variable holds while a scope is open. */
typedef struct {
    PyObject_HEAD
    int active;
    PlanTable *table; /* NULL: no plan is kept, every op reaches its handler */
    PyObject *state;
} Activation;

extern PyTypeObject Activation_Type, Site_Type, Detour_Type, Suspension_Type;

Activation *active_activation(Thread *thread); /* new reference or NULL; never an exception */
int stub_boot(PyObject *names);

int add_function(PyObject *names, PyMethodDef *def);
int add_type(PyObject *names, const char *name, PyTypeObject *type);

#endif

/* Where the program is: enclosing calls, call sites, ordinals of objects; and the state of a thread. */
#ifndef AMANDA_PLACE_H
#define AMANDA_PLACE_H
#include "interception/table.h"

typedef struct Reader Reader; /* what reads the tensors of a call: see site.h */

#define AMANDA_OCCURRENCE_CAP 64
#define AMANDA_ROOT_HASH 0x416D616E6461ULL
#define WALK_LIMIT 128
#define WAY_LIMIT 8 /* call sites of the program beyond the place, which tell apart the ways to a place at the root */
#define AMANDA_FIRST_COUNTS 8 /* a power of two */

/* The path of an object within another that encloses its calls. */
typedef struct {
    uint64_t owner, hash;
} Path;

/* An object that has an ordinal. */
typedef struct {
    uint64_t ordinal;
    Path path;           /* the first that was asked for; owner 0: none was */
    Path *further_paths; /* in other owners */
    int further_path_count;
    int slot_queries_left; /* how often Python is still asked whether the object lies in a slot of an enclosing one */
    PyObject *reference; /* owned; weak, or the object itself where its type has no weak references */
    int is_strong;       /* whether `reference` is the object */
} Named;

/* One enclosing call (a module's, say), or the root of a thread. Counts tell repeats apart. */
typedef struct Region {
    PyObject_HEAD
    uint64_t hash;
    struct Region *parent; /* owned */
    void *entry;           /* frame that made the call; the walk of call sites ends here */
    unsigned ends_before, ends_after; /* kinds of code at which the walk ends too; ends_after: at the root alone */
    int is_over;           /* the call has returned */
    int tail_length, way_length;
    uint64_t *tail;        /* in a replay: call sites beyond the replay's own, and then those of the way to the place */
    PyObject *subject;     /* owned; the object called; NULL at the root and in a replay */
    const Named *named;    /* of the subject, which keeps it; NULL: not looked up, or it has none */
    Map counts;
    Cell first[AMANDA_FIRST_COUNTS]; /* where the counts are while they are few */
} Region;

extern PyTypeObject Region_Type, Snapshot_Type, Enclosure_Type;

static inline int at_root(const Region *region) { return region->hash == AMANDA_ROOT_HASH; }

typedef struct {
    int suspensions; /* > 0: a routine runs, nothing is intercepted */
    PyObject *key; /* borrowed; canonical name of the op whose native code runs */
    Region *top;   /* owned; NULL: the root */
    Region *root;  /* owned by the thread's dict */
    int failed;      /* a tool raised since the last op began, and an operator may drop the exception */
    uint64_t watch_seen; /* number of the last watch that was called on this thread */
    char *switches;  /* the framework's, of this thread; NULL: not asked for yet */
} Thread;

Thread *thread_state(void);
PyObject *take_failure(Thread *thread); /* new; the exception, which is forgotten; NULL: there is none */
Region *current_region(Thread *thread); /* borrowed; NULL with an exception set */

/* Hashes of call sites: `items` from the innermost frame out to the end of a region; `way`, at the root, those of the
   program from the last of `items` on, by which the program has come to the place. */
typedef struct {
    int count, way_count;
    uint64_t items[WALK_LIMIT], way[WAY_LIMIT + 1];
} Sites;

int walk_sites(Thread *thread, Region *region, Sites *sites); /* -1: an exception */
int place_of(Thread *thread, uint64_t op_hash, uint64_t *place, uint64_t *way); /* way: 0 but at the root */
uint64_t occurrence_of(Region *region, uint64_t place, uint64_t way, int *failed);
int mix_identities(uint64_t *hash, PyObject *value);
int mix_leaf(uint64_t *way, const Reader *reader, PyObject *value);
int ordinal_of(PyObject *object, uint64_t *ordinal);
void ordinals_configure(PyObject *on_death, PyObject *adopt); /* adopt: or NULL */
void new_epoch(void); /* drops the caches: code has changed its kind, or types enter ids that did not */
int place_boot(PyObject *names);
int region_boot(PyObject *names);
int ordinal_boot(PyObject *names);
int probe_boot(PyObject *names);

#endif

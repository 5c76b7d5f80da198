/* Fast path of an op whose plan is empty: the id of the op, computed from caches.

   Nothing here runs Python, allocates or raises, and nothing is changed before every lookup has succeeded. After a
   miss the caller starts over on the slow path (place.c, region.c), which computes the same id and fills the caches.
   A cached entry depends on nothing but its key: that of an instruction is dropped when a code object that has one
   dies, that of a type holds for one version tag of the type. */
#ifndef AMANDA_FAST_PATH_H
#define AMANDA_FAST_PATH_H
#include "interception/call.h"
#include "interception/frames.h"

#if AMANDA_INTERNAL_FRAMES
#define Py_BUILD_CORE
#if PY_VERSION_HEX < 0x030C0000
#undef _PyGC_FINALIZED
#include <internal/pycore_pystate.h>
#endif
#include <internal/pycore_context.h>
#include <internal/pycore_hamt.h>
#undef Py_BUILD_CORE
#endif

#if AMANDA_INTERNAL_FRAMES
#define RARE COLD
#else
#define RARE __attribute__((noinline)) /* the way of every op */
#endif

#define FRAMEWORK 1 /* at the root, call sites are walked through such code to the user's */
#define BOUNDARY 2  /* makes an enclosing call: the walk ends before it */
#define SKIPPED 4   /* leaves no mark on a place */
#define USER 8      /* not FRAMEWORK */
#define CACHED_SITES 512
#define CACHED_TYPES 64

typedef struct {
    const void *where; /* the instruction, in its code object */
    uint64_t mark;
    uint64_t kind, unused; /* a power of two long: an entry lies in one line of the cache */
} CachedSite;

typedef struct {
    PyTypeObject *type;
    unsigned version;
    int identity; /* values of the type tell ops apart */
} CachedType;

typedef struct {
    CachedSite sites[CACHED_SITES];
    CachedType types[CACHED_TYPES];
    PyInterpreterState *interpreter; /* in others, whose builtins are the same, nothing is intercepted */
    Map named;                       /* address -> Named */
    PyTypeObject *leaf_type;         /* owned; values of it may be leaves; NULL: none are */
} FastCache;

typedef struct {
    Thread thread;
    uint64_t owner; /* id of the thread state that the rest belongs to, and 1 */
} Local;

/* Who is called on threads that run ops where nothing is in force. */
typedef struct {
    PyObject *function; /* owned; NULL: nobody */
    uint64_t number;    /* of the present watch: a thread that has not seen it calls the function */
} Watch;

#pragma GCC visibility push(hidden)
extern FastCache fast_cache __attribute__((aligned(64)));
extern __thread Local local;
extern Thread other_interpreter;
extern PyObject *activation_variable;
extern Watch watch;
int call_watcher(Thread *thread);
Thread *new_thread(uint64_t owner);
Activation *looked_up_activation(void);
#pragma GCC visibility pop

static inline PyThreadState *running_thread(void) {
#if AMANDA_INTERNAL_FRAMES && PY_VERSION_HEX < 0x030C0000
    return _PyThreadState_GET();
#else
    return PyThreadState_Get();
#endif
}

static inline Thread *thread_of(const PyThreadState *running) {
    if (unlikely(running->interp != fast_cache.interpreter)) return &other_interpreter;
    uint64_t id = running->id + 1; /* unique in one interpreter */
    return likely(local.owner == id) ? &local.thread : new_thread(id);
}

/* Borrowed from the context: as good as long as no Python runs. NULL: nothing is intercepted. */
static inline Activation *activation_of(const PyThreadState *running, const Thread *thread) {
    if (thread->suspensions) return NULL;
#if AMANDA_INTERNAL_FRAMES
    const PyContext *context = (PyContext *)running->context;
    if (!context) return NULL; /* also where a thread ends, and what the variable has cached is gone */
    const struct _pycontextvarobject *variable = (struct _pycontextvarobject *)activation_variable;
    Activation *value = (Activation *)variable->var_cached;
    if (value && variable->var_cached_tsid == running->id && variable->var_cached_tsver == running->context_ver)
        return Py_IS_TYPE(value, &Activation_Type) && value->active ? value : NULL;
    if (!context->ctx_vars->h_count) return NULL;
#else
    (void)running;
#endif
    return looked_up_activation();
}

static inline CachedSite *cached_site(const void *where) {
    uintptr_t number = (uintptr_t)where >> 1;
    return &fast_cache.sites[(number ^ number >> 9) & (CACHED_SITES - 1)];
}

/* Version tag of a type: changes with the type, and no other type gets it when this one is gone; 0: none now. */
static inline unsigned type_version(const PyTypeObject *type, unsigned long flags) {
#if PY_VERSION_HEX < 0x030D0000
    if (!(flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#else
    (void)flags;
#endif
    return type->tp_version_tag;
}

static inline CachedType *cached_type(const PyTypeObject *type) {
    return &fast_cache.types[((uintptr_t)type >> 5) & (CACHED_TYPES - 1)];
}

/* Borrowed; NULL: the thread has met no op yet. */
static inline Region *cached_region(const Thread *thread) { return thread->top ? thread->top : thread->root; }

#if AMANDA_INTERNAL_FRAMES
/* Mix the call sites of the program from a frame outwards into `way`, up to WAY_LIMIT. 0: not all are cached. */
static inline int mix_cached_way(const _PyInterpreterFrame *frame, const Region *region, uint64_t *way) {
    uint64_t mixed = *way;
    for (int left = WAY_LIMIT, most = WALK_LIMIT; left && frame && frame != region->entry; frame = frame->previous) {
        const CachedSite *site = cached_site(frame_instruction(frame));
        if (unlikely(site->where != frame_instruction(frame))) {
            if (_PyFrame_IsIncomplete((_PyInterpreterFrame *)frame)) continue;
            return 0;
        }
        if (!most--) break;
        if ((site->kind & (USER | SKIPPED)) != USER) continue;
        mixed = mix(mixed, site->mark);
        left--;
    }
    *way = mixed;
    return !region->way_length;
}
#endif

/* Mix the call sites from the innermost frame out to the end of the region into `hash`, and at the root those of the
   program beyond into `way`. 0: not all are cached. */
static inline int mix_cached_sites(const PyThreadState *running, const Region *region, uint64_t *hash, uint64_t *way) {
#if AMANDA_INTERNAL_FRAMES
    uint64_t mixed = *hash;
    const _PyInterpreterFrame *frame = current_frame(running);
    for (int left = WALK_LIMIT; frame && frame != region->entry; frame = frame->previous) {
        const CachedSite *site = cached_site(frame_instruction(frame));
        if (unlikely(site->where != frame_instruction(frame))) {
            if (_PyFrame_IsIncomplete((_PyInterpreterFrame *)frame)) continue;
            return 0;
        }
        if (site->kind & region->ends_before) break;
        if (site->kind & SKIPPED) continue;
        if (unlikely(!--left)) return 0;
        mixed = mix(mixed, site->mark);
        if (site->kind & region->ends_after) return mix_cached_way(frame->previous, region, way) && (*hash = mixed, 1);
    }
    *hash = mixed;
    return !region->tail_length;
#else
    (void)running, (void)region, (void)hash, (void)way;
    return 0;
#endif
}

static inline const Named *named_at(const void *address) {
    return map_get(&fast_cache.named, (uint64_t)(uintptr_t)address);
}

/* Mix the ordinal of a value into `hash`, if its type enters ids. 0: the type or the ordinal is not cached. */
static inline int mix_cached_identity(PyObject *value, PyTypeObject *type, unsigned long flags, uint64_t *hash) {
    const CachedType *entry = cached_type(type);
    if (unlikely(entry->type != type || entry->version != type_version(type, flags))) return 0;
    if (!entry->identity) return 1;
    const Named *named = named_at(value);
    if (unlikely(!named || named->slot_queries_left)) return 0;
    *hash = mix(*hash, named->ordinal);
    return 1;
}

static inline int mix_cached_items(PyObject *sequence, uint64_t *hash) {
    PyObject *const *items = PySequence_Fast_ITEMS(sequence);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); i++) {
        PyTypeObject *type = Py_TYPE(items[i]);
        if (type->tp_flags & Py_TPFLAGS_HEAPTYPE && !mix_cached_identity(items[i], type, type->tp_flags, hash)) return 0;
    }
    return 1;
}

/* Mix the ordinals of a value, if there is one, and of others into `hash`, of types that enter ids. 0: not all are
   cached. */
static inline int mix_cached_values(PyObject *value, PyObject *const *others, Py_ssize_t count, uint64_t *hash) {
    uint64_t mixed = *hash;
    if (!value) {
        if (!count) return 1;
        value = *others++;
        count--;
    }
    for (;; value = *others++, count--) {
        PyTypeObject *type = Py_TYPE(value);
        unsigned long flags = type->tp_flags;
        if (flags & Py_TPFLAGS_HEAPTYPE) {
            if (!mix_cached_identity(value, type, flags, &mixed)) return 0;
        } else if (unlikely(flags & (Py_TPFLAGS_TUPLE_SUBCLASS | Py_TPFLAGS_LIST_SUBCLASS)) &&
                   (type == &PyTuple_Type || type == &PyList_Type) && !mix_cached_items(value, &mixed))
            return 0;
        if (!count) break;
    }
    *hash = mixed;
    return 1;
}

/* Mix the ordinal of a value into the way to a place at the root, if the value is a leaf that needs a gradient. 0: its
   ordinal is not cached, or only Python can tell. */
static inline int mix_cached_leaf(const Reader *reader, PyObject *value, uint64_t *way) {
    PyTypeObject *type = Py_TYPE(value);
    if (type != fast_cache.leaf_type)
        return !(type->tp_flags & Py_TPFLAGS_HEAPTYPE) || cached_type(type)->identity ||
               !PyType_IsSubtype(type, fast_cache.leaf_type); /* Python tells whether a value of a subclass is a leaf */
    Training training = reader ? reader_training(reader, value) : ASK_PYTHON;
    if (likely(training == NOT_TRAINED)) return 1;
    const Named *named = training == TRAINED ? named_at(value) : NULL;
    if (!named) return 0;
    *way = mix(*way, named->ordinal);
    return 1;
}

/* Set `repeats` to the number of a way to a place at the root, in the order in which the ways came; all rounds of a loop
   come by one way.  The counts map the place to its first way, each later way to its number, and a third key to the
   number of later ways.  0: the map is full; the slow path makes room. */
static inline int count_way(Region *region, uint64_t place, uint64_t way, uint64_t *repeats) {
    Map *counts = &region->counts;
    uint64_t later_ways_key = mix(place, 1) | 1;
    place = place ? place : 1;
    way = mix(place, way) | 1;
    Cell *cell = &counts->cells[map_slot(counts, place)];
    if ((counts->used + 3) * 3 > counts->size * 2) return 0;
    if (!cell->key) {
        *cell = (Cell){place, (void *)(uintptr_t)way};
        counts->used++;
    }
    *repeats = 0;
    if (likely((uintptr_t)cell->value == way)) return 1;
    cell = &counts->cells[map_slot(counts, way)];
    if (!cell->key) {
        Cell *later_ways = &counts->cells[map_slot(counts, later_ways_key)];
        counts->used += !later_ways->key;
        later_ways->key = later_ways_key;
        uint64_t number = (uint64_t)(uintptr_t)later_ways->value + 1;
        *repeats = AMANDA_OCCURRENCE_CAP - 1; /* ways beyond the cap share a number */
        if (number >= AMANDA_OCCURRENCE_CAP) return 1;
        later_ways->value = (void *)(uintptr_t)number;
        cell = &counts->cells[map_slot(counts, way)]; /* again: the key above may have taken its place */
        *cell = (Cell){way, (void *)(uintptr_t)number};
        counts->used++;
    }
    *repeats = (uint64_t)(uintptr_t)cell->value;
    return 1;
}

/* Count a place once more, and set `repeats` to how often it came before, below the cap.  0: the map is full. */
static inline int count_place(Region *region, uint64_t place, uint64_t *repeats) {
    Map *counts = &region->counts;
    Cell *cell = &counts->cells[map_slot(counts, place ? place : 1)];
    if (!cell->key) {
        if ((counts->used + 1) * 3 > counts->size * 2) return 0;
        cell->key = place ? place : 1;
        counts->used++;
    }
    *repeats = (uint64_t)(uintptr_t)cell->value;
    if (likely(*repeats < AMANDA_OCCURRENCE_CAP)) cell->value = (void *)(uintptr_t)(*repeats + 1);
    else *repeats = AMANDA_OCCURRENCE_CAP - 1;
    return 1;
}

#endif

/* Identity: the place of an op in the program, and which repeat of that place it is. */
#include "interception/fast_path.h"
#include "interception/wrapped.h"

#define TYPE_LIMIT 16
#define IDLE_REGIONS 32
#define KEPT_COUNTS 64
#define SLOT_QUERIES 8
#define FIRST_SWEEP 64
#define ROOT_HASH 0x416D616E6461ULL

#if PY_VERSION_HEX >= 0x030C0000
#define code_index PyUnstable_Eval_RequestCodeExtraIndex
#define code_get PyUnstable_Code_GetExtra
#define code_set PyUnstable_Code_SetExtra
#else
#define code_index _PyEval_RequestCodeExtraIndex
#define code_get _PyCode_GetExtra
#define code_set _PyCode_SetExtra
#endif

/* What is kept with a code object: its hash, and for each instruction word the first word of
   the call it belongs to (an interpreter that specialises a call moves within it). */
typedef struct {
    uint64_t hash;
    unsigned epoch, length;
    int flags;
    uint32_t first[];
} CodeNote;

static struct {
    Py_ssize_t index;
    unsigned epoch;
    PyObject *describe, *on_death, *adopt, *is_leaf;
    PyTypeObject *types[TYPE_LIMIT];
    int type_count;
    uint64_t ordinals;
    size_t strong, strong_limit; /* objects that are held strongly, and how many lead to a sweep */
    Region *idle; /* freed and not given back, linked by their parents */
    int idle_count;
} place_state = {.index = -1, .epoch = 1, .strong_limit = FIRST_SWEEP};

FastCache fast_cache;
__thread Local local;
Thread other_interpreter = {.suspensions = 1};

Thread *new_thread(uint64_t owner) {
    local.thread = (Thread){0};
    local.owner = owner;
    return &local.thread;
}

Thread *thread_state(void) { return thread_of(running_thread()); }

/* Where code changes its kind, or types come to tell ops apart. */
static void new_epoch(void) {
    place_state.epoch++;
    memset(fast_cache.types, 0, sizeof fast_cache.types);
    memset(fast_cache.sites, 0, sizeof fast_cache.sites);
}

/* ---- regions ---- */

HOT static Region *new_region(uint64_t hash, Region *parent, PyObject *subject) {
    Region *region = place_state.idle;
    if (region) {
        place_state.idle = region->parent;
        place_state.idle_count--;
        _Py_NewReference((PyObject *)region);
    } else if (!(region = PyObject_New(Region, &Region_Type)))
        return NULL;
    region->hash = hash;
    region->parent = (Region *)Py_XNewRef(parent);
    region->subject = Py_XNewRef(subject);
    region->named = NULL;
    region->entry = NULL;
    region->ends_before = hash == ROOT_HASH ? 0 : BOUNDARY;
    region->ends_after = hash == ROOT_HASH ? USER : 0;
    region->is_over = 0;
    region->tail = NULL;
    region->tail_length = region->way_length = 0;
    clear_cells(region->first, AMANDA_FIRST_COUNTS);
    region->counts = (Map){region->first, AMANDA_FIRST_COUNTS, 0};
    return region;
}

HOT static void region_dealloc(Region *region) {
    int ends = local.thread.root == region;
    if (ends) local.thread.root = NULL; /* the thread ends; what still dies may call ops */
    Region *parent = region->parent;
    PyObject *subject = region->subject;
    if (region->tail) PyMem_RawFree(region->tail);
    if (region->counts.cells != region->first) map_clear(&region->counts);
    if (place_state.idle_count < IDLE_REGIONS) {
        region->parent = place_state.idle;
        place_state.idle = region;
        place_state.idle_count++;
    } else
        PyObject_Free(region);
    Py_XDECREF(parent);
    Py_XDECREF(subject);
    if (unlikely(ends)) Py_XDECREF(take_failure(&local.thread));
}

PyTypeObject Region_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Region",
    .tp_basicsize = sizeof(Region),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)region_dealloc,
};

Region *current_region(Thread *thread) {
    if (thread->top) return thread->top;
    if (!thread->root) {
        PyObject *dict = PyThreadState_GetDict(); /* dies with the thread, and the root with it */
        Region *root = dict ? new_region(ROOT_HASH, NULL, NULL) : NULL;
        if (!root || PyDict_SetItemString(dict, "amanda.root", (PyObject *)root)) {
            Py_XDECREF(root);
            return PyErr_Occurred() ? NULL : (Region *)PyErr_NoMemory();
        }
        Py_DECREF(root);
        thread->root = root;
    }
    return thread->root;
}

static inline int at_root(const Region *region) { return region->hash == ROOT_HASH; }

static int grow_counts(Region *region) {
    Map grown = {NULL, 0, 0};
    for (size_t i = 0; i < region->counts.size; i++) {
        Cell cell = region->counts.cells[i];
        if (cell.key && map_set(&grown, cell.key, cell.value)) {
            map_clear(&grown);
            return -1;
        }
    }
    region->counts = grown;
    return 0;
}

static int set_count(Region *region, uint64_t place, void *count) {
    Map *counts = &region->counts;
    if (counts->cells == region->first && (counts->used + 1) * 3 > counts->size * 2 && grow_counts(region)) return -1;
    return map_set(counts, place, count);
}

static void forget_counts(Region *region) {
    if (!region->counts.used) return;
    if (region->counts.size > KEPT_COUNTS) {
        map_clear(&region->counts);
        region->counts = (Map){region->first, AMANDA_FIRST_COUNTS, 0};
    }
    clear_cells(region->counts.cells, region->counts.size);
    region->counts.used = 0;
}

uint64_t occurrence_of(Region *region, uint64_t place, uint64_t way, int *failed) {
    uint64_t repeats = 0;
    *failed = 0;
    if (at_root(region)) {
        if (count_way(region, place, way, &repeats)) return repeats;
        *failed = (region->counts.cells == region->first && grow_counts(region)) || map_reserve(&region->counts, 3);
        if (*failed) PyErr_NoMemory();
        else count_way(region, place, way, &repeats);
        return repeats;
    }
    if (!count_place(region, place, &repeats) && set_count(region, place ? place : 1, (void *)(uintptr_t)1)) {
        PyErr_NoMemory();
        *failed = 1;
    }
    return repeats;
}

/* ---- code ---- */

static CodeNote *describe(Thread *thread, PyCodeObject *code, CodeNote *old) {
    if (!place_state.describe) {
        PyErr_SetString(PyExc_RuntimeError, "the interceptor is not configured");
        return NULL;
    }
    unsigned epoch = place_state.epoch;
    disturb();
    PyObject *describe_code = Py_NewRef(place_state.describe);
    thread->suspensions++;
    PyObject *told = PyObject_CallOneArg(describe_code, (PyObject *)code);
    thread->suspensions--;
    Py_DECREF(describe_code);
    if (!told) return NULL;
    unsigned long long hash;
    int flags;
    Py_buffer first;
    if (!PyArg_ParseTuple(told, "Kiy*", &hash, &flags, &first)) {
        Py_DECREF(told);
        return NULL;
    }
    if (!old) code_get((PyObject *)code, place_state.index, (void **)&old); /* what was called may have described it too */
    CodeNote *note = old ? old : PyMem_RawMalloc(sizeof(CodeNote) + (size_t)first.len);
    if (note && !old) {
        note->length = (unsigned)(first.len / sizeof(uint32_t));
        memcpy(note->first, first.buf, (size_t)first.len);
    }
    PyBuffer_Release(&first);
    Py_DECREF(told);
    if (!note) return (CodeNote *)PyErr_NoMemory();
    note->hash = hash;
    note->flags = flags;
    note->epoch = epoch;
    if (!old && code_set((PyObject *)code, place_state.index, note)) {
        PyMem_RawFree(note);
        return PyErr_Occurred() ? NULL : (CodeNote *)PyErr_NoMemory(); /* it may fail and not say so */
    }
    return note;
}

static inline CodeNote *note_of(Thread *thread, PyCodeObject *code) {
    void *note = NULL;
    if (code_get((PyObject *)code, place_state.index, &note)) return NULL;
    if (note && ((CodeNote *)note)->epoch == place_state.epoch) return note;
    return describe(thread, code, note);
}

static inline uint64_t site_hash(const CodeNote *note, int instruction) {
    if (instruction >= 0 && (unsigned)instruction < note->length)
        instruction = (int)note->first[instruction];
    return note->hash + (uint64_t)(instruction + 1) * 0x9E3779B97F4A7C15ULL;
}

/* A frame is found complete or not by where it is, unless it is a generator's: that is no place to remember. */
static inline void remember_instruction(const Walk *walk, const CodeNote *note, uint64_t mark) {
#if AMANDA_INTERNAL_FRAMES
    const void *where = frame_instruction(walk->frame);
    PyCodeObject *code = walk_code((Walk *)walk);
    if (note->epoch != place_state.epoch || where < (const void *)(_PyCode_CODE(code) + code->_co_firsttraceable)) return;
    unsigned kind = (unsigned)note->flags & (FRAMEWORK | BOUNDARY | SKIPPED);
    *cached_site(where) = (CachedSite){where, mark, kind & FRAMEWORK ? kind : kind | USER, 0};
#endif
}

/* A code object dies: another may come to lie there. */
static void free_note(void *note) {
    memset(fast_cache.sites, 0, sizeof fast_cache.sites);
    PyMem_RawFree(note);
}

/* `mark`s of call sites: from the innermost frame out to the end of a region, and at the root those of the program
   from there on, the last of the others included, which are the way to the place. */
typedef struct {
    int count, way_count;
    uint64_t items[WALK_LIMIT], way[WAY_LIMIT + 1];
} Sites;

static int walk_sites(Thread *thread, Region *region, Sites *sites) { /* -1: an exception */
    Walk walk;
    int rooted = at_root(region), most = WALK_LIMIT;
    sites->count = sites->way_count = 0;
    for (walk_start(&walk); walk_frame(&walk) && walk_frame(&walk) != region->entry; walk_next(&walk)) {
        if (sites->count == WALK_LIMIT || sites->way_count > WAY_LIMIT || (sites->way_count && !most--)) break;
        CodeNote *note = note_of(thread, walk_code(&walk));
        if (!note) {
            walk_end(&walk);
            return -1;
        }
        uint64_t site = site_hash(note, walk_instruction(&walk));
        remember_instruction(&walk, note, site);
        if (!rooted && note->flags & BOUNDARY) break;
        if (note->flags & SKIPPED) continue;
        if (!sites->way_count) sites->items[sites->count++] = site;
        if (rooted && !(note->flags & FRAMEWORK)) sites->way[sites->way_count++] = site;
    }
    walk_end(&walk);
    const uint64_t *way = region->tail + region->tail_length;
    for (int i = 0; !sites->way_count && i < region->tail_length && sites->count < WALK_LIMIT; i++)
        sites->items[sites->count++] = region->tail[i];
    for (int i = 0; i < region->way_length && sites->way_count <= WAY_LIMIT; i++)
        sites->way[sites->way_count++] = way[i];
    return 0;
}

int place_of(Thread *thread, uint64_t op_hash, uint64_t *place, uint64_t *way) {
    Region *region = current_region(thread);
    Sites sites;
    if (!region || walk_sites(thread, region, &sites)) return -1;
    *place = mix(region->hash, op_hash);
    *way = 0;
    for (int i = 0; i < sites.count; i++) *place = mix(*place, sites.items[i]);
    for (int i = 1; i < sites.way_count; i++) *way = mix(*way, sites.way[i]);
    return 0;
}

/* ---- ordinals ---- */

/* Whether values of a type tell ops apart. */
static inline int is_identity_type(PyTypeObject *type) {
    CachedType *answer = cached_type(type);
    unsigned version = type_version(type, type->tp_flags);
    if (version && answer->type == type && answer->version == version) return answer->identity;
    int identity = 0;
    for (int i = 0; !identity && i < place_state.type_count; i++) identity = PyType_IsSubtype(type, place_state.types[i]);
    if (version) *answer = (CachedType){type, version, identity};
    return identity;
}

static int ends(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* Drop the ordinal of an object that has died, and report it. */
static int drop_named(uint64_t key) {
    Named *named = map_remove(&fast_cache.named, key);
    if (!named) return 0;
    uint64_t ordinal = named->ordinal;
    place_state.strong -= named->is_strong;
    Py_DECREF(named->reference);
    PyMem_RawFree(named->more);
    PyMem_RawFree(named);
    if (!place_state.on_death || ends()) return 0; /* what hears of it has been taken apart as the process ends */
    PyObject *on_death = Py_NewRef(place_state.on_death), *told = PyObject_CallFunction(on_death, "K", ordinal);
    Py_DECREF(on_death);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

static PyObject *forget(PyObject *address, PyObject *Py_UNUSED(reference)) {
    if (drop_named(PyLong_AsUnsignedLongLong(address))) return NULL;
    Py_RETURN_NONE;
}

/* Drop the objects that nothing but their ordinal holds.  Their types have no weak references, so nobody reports
   their death; the next sweep waits until there are twice as many as survive. */
static int sweep_strong(void) {
    size_t count = 0, room = place_state.strong;
    uint64_t *dead = PyMem_RawMalloc((room + 1) * sizeof *dead);
    if (!dead) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < fast_cache.named.size && count < room; i++) {
        Named *named = fast_cache.named.cells[i].value;
        if (named && named->is_strong && Py_REFCNT(named->reference) == 1) dead[count++] = fast_cache.named.cells[i].key;
    }
    int failed = 0;
    for (size_t i = 0; i < count; i++) failed |= drop_named(dead[i]);
    PyMem_RawFree(dead);
    place_state.strong_limit = place_state.strong > FIRST_SWEEP / 2 ? 2 * place_state.strong : FIRST_SWEEP;
    return failed ? -1 : 0;
}

static PyMethodDef forget_def = {"forget", forget, METH_O, NULL};

/* Ask whether an argument lies in a slot of the object that encloses the call: it has the ordinal of what lay
   there first, then.  `adopt(owner, object, ordinal)` returns that, and whether it is settled. */
static int query_slot(PyObject *object, Named *named) {
    Thread *thread = thread_state();
    PyObject *owner = thread->top ? thread->top->subject : NULL;
    if (thread->suspensions) return 0;
    if (!place_state.adopt || !owner) {
        named->slot_queries_left--;
        return 0;
    }
    PyObject *adopt = Py_NewRef(place_state.adopt);
    thread->suspensions++;
    PyObject *told = PyObject_CallFunction(adopt, "OOK", owner, object, named->ordinal);
    thread->suspensions--;
    Py_DECREF(adopt);
    unsigned long long ordinal;
    int settled, failed = !told || !PyArg_ParseTuple(told, "Kp", &ordinal, &settled);
    Py_XDECREF(told);
    if (failed) return -1;
    named->ordinal = ordinal;
    named->slot_queries_left = settled ? 0 : named->slot_queries_left - 1;
    return 0;
}

static int keep_ordinal(PyObject *object, uint64_t key, uint64_t *ordinal) {
    PyObject *address = PyLong_FromUnsignedLongLong(key);
    PyObject *callback = address ? PyCFunction_New(&forget_def, address) : NULL;
    PyObject *reference = callback ? PyWeakref_NewRef(object, callback) : NULL;
    Py_XDECREF(address);
    Py_XDECREF(callback);
    if (!reference) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
        PyErr_Clear(); /* it cannot be held weakly, and another object at its address would have its ordinal */
        if (place_state.strong >= place_state.strong_limit && sweep_strong()) return -1;
        reference = Py_NewRef(object);
    }
    Named *named = map_get(&fast_cache.named, key);
    if (named) { /* what a collection ran has asked for it in the meantime */
        Py_DECREF(reference);
        *ordinal = named->ordinal;
        return 0;
    }
    named = PyMem_RawMalloc(sizeof(Named));
    if (!named || map_set(&fast_cache.named, key, named)) {
        PyMem_RawFree(named);
        Py_DECREF(reference);
        PyErr_NoMemory();
        return -1;
    }
    int slot_queries_left = place_state.adopt && is_identity_type(Py_TYPE(object)) ? SLOT_QUERIES : 0;
    int is_strong = reference == object;
    place_state.strong += is_strong;
    *named = (Named){.ordinal = ++place_state.ordinals, .reference = reference, .is_strong = is_strong, .slot_queries_left = slot_queries_left};
    *ordinal = named->ordinal;
    return 0;
}

int ordinal_of(PyObject *object, uint64_t *ordinal) {
    uint64_t key = (uint64_t)(uintptr_t)object;
    Named *named = map_get(&fast_cache.named, key);
    if (named && !named->slot_queries_left) {
        *ordinal = named->ordinal;
        return 0;
    }
    Py_INCREF(object); /* a collection may run, and drop it from the list it was found in */
    int failed = named ? 0 : keep_ordinal(object, key, ordinal);
    if (!failed && (named = map_get(&fast_cache.named, key))) {
        if (named->slot_queries_left) failed = query_slot(object, named);
        *ordinal = named->ordinal;
    }
    Py_DECREF(object);
    return failed;
}

static int mix_identity(uint64_t *hash, PyObject *value) {
    uint64_t ordinal;
    if (!is_identity_type(Py_TYPE(value))) return 0;
    if (ordinal_of(value, &ordinal)) return -1;
    *hash = mix(*hash, ordinal);
    return 0;
}

/* A leaf that needs a gradient is what another execution of the place may train: it takes part in the way there. */
int mix_leaf(uint64_t *way, const Reader *reader, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    int is_exact = type == fast_cache.leaf_type;
    if (!is_exact && (!fast_cache.leaf_type || !PyType_IsSubtype(type, fast_cache.leaf_type) || is_identity_type(type))) return 0;
    Thread *thread = thread_state();
    Training training = is_exact && reader ? reader_training(reader, value) : ASK_PYTHON;
    if (training == ASK_PYTHON) {
        PyObject *is_leaf = Py_NewRef(place_state.is_leaf);
        thread->suspensions++;
        PyObject *answer = PyObject_CallOneArg(is_leaf, value);
        thread->suspensions--;
        int leaf = answer ? PyObject_IsTrue(answer) : -1;
        Py_DECREF(is_leaf);
        Py_XDECREF(answer);
        if (leaf < 0) return -1;
        training = leaf ? TRAINED : NOT_TRAINED;
    }
    uint64_t ordinal;
    if (training == NOT_TRAINED) return 0;
    if (ordinal_of(value, &ordinal)) return -1;
    *way = mix(*way, ordinal);
    return 0;
}

int mix_identities(uint64_t *hash, PyObject *value) {
    unsigned long flags = PyType_GetFlags(Py_TYPE(value));
    if (flags & Py_TPFLAGS_HEAPTYPE) return mix_identity(hash, value);
    if (PyTuple_CheckExact(value) || PyList_CheckExact(value))
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = PySequence_Fast_GET_ITEM(value, i);
            if (PyType_HasFeature(Py_TYPE(item), Py_TPFLAGS_HEAPTYPE) && mix_identity(hash, item)) return -1;
        }
    return 0;
}

/* ---- enclosing calls ---- */

static void *running_frame(void) {
    Walk walk;
    walk_start(&walk);
    void *frame = walk_frame(&walk);
    walk_end(&walk); /* the running frame outlives the call it makes */
    return frame;
}

static inline const Path *cached_path(Region *owner, const Named *named) {
    if (!named) return NULL;
    if (!owner->named) owner->named = named_at(owner->subject);
    if (!owner->named) return NULL;
    if (likely(named->path.owner == owner->named->ordinal)) return &named->path;
    for (int i = 0; i < named->more_count; i++)
        if (named->more[i].owner == owner->named->ordinal) return &named->more[i];
    return NULL;
}

static int keep_path(PyObject *owner, PyObject *subject, uint64_t hash) {
    uint64_t inner, outer;
    if (ordinal_of(subject, &inner) || ordinal_of(owner, &outer)) return -1;
    Named *named = map_get(&fast_cache.named, (uint64_t)(uintptr_t)subject);
    if (!named || !outer) return 0;
    if (!named->path.owner) {
        named->path = (Path){outer, hash};
        return 0;
    }
    Path *more = PyMem_RawRealloc(named->more, (size_t)(named->more_count + 1) * sizeof(Path));
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    more[named->more_count++] = (Path){outer, hash};
    named->more = more;
    return 0;
}

/* Hash of where `subject` lies in `owner`: asked of Python once, unless it is there for a while only. */
static int path_hash(Thread *thread, PyObject *ask, PyObject *owner, PyObject *subject, uint64_t *hash) {
    thread->suspensions++;
    PyObject *told = PyObject_CallFunctionObjArgs(ask, owner, subject, NULL);
    thread->suspensions--;
    unsigned long long answer;
    int lasting, failed = !told || !PyArg_ParseTuple(told, "Kp", &answer, &lasting);
    Py_XDECREF(told);
    if (failed || (lasting && keep_path(owner, subject, answer))) return -1;
    *hash = answer;
    return 0;
}

static Region *enter_region(Thread *thread, PyObject *ask, PyObject *subject) {
    Region *parent = cached_region(thread);
    if (unlikely(!parent) && !(parent = current_region(thread))) return NULL;
    const Named *named = named_at(subject);
    uint64_t name, repeats;
    if (at_root(parent) || !parent->subject || !ask) {
        if (named) name = named->ordinal;
        else if (ordinal_of(subject, &name)) return NULL;
    } else {
        const Path *path = cached_path(parent, named);
        if (path) name = path->hash;
        else if (path_hash(thread, ask, parent->subject, subject, &name)) return NULL;
    }
    uint64_t hash = mix(parent->hash, name);
    if (!at_root(parent)) {
        if (!count_place(parent, hash, &repeats)) {
            int failed;
            repeats = occurrence_of(parent, hash, 0, &failed);
            if (failed) return NULL;
        }
        hash = mix(hash, repeats);
    }
    Region *region = new_region(hash, parent, subject);
    if (region) region->named = named;
    return region;
}

/* Go back to the region around one. Where stacks are switched, as greenlets are, calls do not end in the order in
   which they nest: the region around may be over, and nothing but this one hold it. */
static inline void leave_region(Thread *thread, Region *region, Region *outer) {
    region->is_over = 1;
    while (unlikely(outer && outer->is_over)) outer = outer->parent && outer->parent != thread->root ? outer->parent : NULL;
    thread->top = outer;
}

static inline PyObject *call_function(PyObject *function, PyObject *const *args, size_t nargsf, PyObject *names) {
    if (Py_IS_TYPE(function, &PyFunction_Type))
        return ((PyFunctionObject *)function)->vectorcall(function, args, nargsf, names);
    return PyObject_Vectorcall(function, args, nargsf, names);
}

HOT static PyObject *enclosure_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
    PyObject *function = ((Wrapped *)self)->function;
    PyThreadState *running = running_thread();
    Thread *thread = thread_of(running);
    if (!PyVectorcall_NARGS(nargsf) || !activation_of(running, thread))
        return call_function(function, args, nargsf, names);
    Region *region = enter_region(thread, ((Wrapped *)self)->site, args[0]), *outer = thread->top;
    if (!region) return NULL;
#if AMANDA_INTERNAL_FRAMES
    region->entry = complete(current_frame(running));
#else
    region->entry = running_frame();
#endif
    thread->top = region;
    PyObject *result = call_function(function, args, nargsf, names);
    leave_region(thread, region, outer);
    if (!outer && thread->root) forget_counts(thread->root);
    Py_DECREF(region);
    return result;
}

static PyObject *enclosure_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *function, *ask = NULL;
    if (!PyArg_ParseTuple(args, "O|O", &function, &ask)) return NULL;
    return wrapped_new(type, enclosure_call, function, ask);
}

PyTypeObject Enclosure_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Enclosure",
    .tp_doc = "Enclosure(function, path=None): a method whose calls are regions, to which the ops in them belong.\n\n"
              "path(owner, subject): 64 bits for where `subject` lies in `owner`, and whether it lies there to stay;\n"
              "without it, objects are told apart by the order of their first use.",
    .tp_base = &Wrapped_Type,
    .tp_flags = WRAPPED_FLAGS,
    .tp_new = enclosure_new,
};

/* ---- replays ---- */

typedef struct {
    PyObject_HEAD
    Region *region; /* as it was: never on a stack itself */
} Snapshot;

static Region *copy_region(const Region *region, const uint64_t *tail, int tail_length, int way_length) {
    Region *copy = new_region(region->hash, region->parent, region->subject);
    if (!copy) return NULL;
    if (tail_length + way_length) {
        copy->tail = PyMem_RawMalloc((size_t)(tail_length + way_length) * sizeof(uint64_t));
        if (!copy->tail) goto no_memory;
        memcpy(copy->tail, tail, (size_t)(tail_length + way_length) * sizeof(uint64_t));
        copy->tail_length = tail_length;
        copy->way_length = way_length;
    }
    for (size_t i = 0; i < region->counts.size; i++)
        if (region->counts.cells[i].value &&
            set_count(copy, region->counts.cells[i].key, region->counts.cells[i].value))
            goto no_memory;
    return copy;
no_memory:
    Py_DECREF(copy);
    return (Region *)PyErr_NoMemory();
}

static PyObject *take_snapshot(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    Thread *thread = thread_state();
    Region *region = current_region(thread);
    Sites sites;
    uint64_t tail[WALK_LIMIT + WAY_LIMIT + 1];
    if (!region || walk_sites(thread, region, &sites)) return NULL;
    memcpy(tail, sites.items, (size_t)sites.count * sizeof *tail);
    memcpy(tail + sites.count, sites.way, (size_t)sites.way_count * sizeof *tail);
    Snapshot *snapshot = PyObject_New(Snapshot, &Snapshot_Type);
    if (!snapshot) return NULL;
    snapshot->region = copy_region(region, tail, sites.count, sites.way_count);
    if (!snapshot->region) Py_CLEAR(snapshot);
    return (PyObject *)snapshot;
}

static PyObject *snapshot_replay(Snapshot *self, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) < 1) {
        PyErr_SetString(PyExc_TypeError, "replay() takes a callable and its arguments");
        return NULL;
    }
    Thread *thread = thread_state();
    const Region *place = self->region;
    Region *region = copy_region(place, place->tail, place->tail_length, place->way_length);
    if (!region) return NULL;
    PyObject *rest = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)), *result = NULL;
    if (rest) {
        PyObject *key = thread->key;
        Region *outer = thread->top;
        region->entry = running_frame();
        thread->top = region;
        thread->key = NULL;
        result = PyObject_Call(PyTuple_GET_ITEM(args, 0), rest, kwargs);
        leave_region(thread, region, outer);
        thread->key = key;
        Py_DECREF(rest);
    }
    Py_DECREF(region);
    return result;
}

static void snapshot_dealloc(Snapshot *self) {
    Py_XDECREF(self->region);
    PyObject_Free(self);
}

static PyMethodDef snapshot_methods[] = {
    {"replay", (PyCFunction)(void (*)(void))snapshot_replay, METH_VARARGS | METH_KEYWORDS,
     "replay(function, *args, **kwargs): call it as if at the place of the snapshot."},
    {0}};

PyTypeObject Snapshot_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Snapshot",
    .tp_basicsize = sizeof(Snapshot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "The place and the counts of repeats at one moment, for a later replay.",
    .tp_dealloc = (destructor)snapshot_dealloc,
    .tp_methods = snapshot_methods,
};

/* ---- functions ---- */

static PyObject *reset_root(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    Thread *thread = thread_state();
    if (thread->root) forget_counts(thread->root);
    Py_RETURN_NONE;
}

static PyObject *subjects(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    for (Region *region = thread_state()->top; list && region; region = region->parent)
        if (region->subject && PyList_Append(list, region->subject)) Py_CLEAR(list);
    if (list && PyList_Reverse(list)) Py_CLEAR(list);
    return list;
}

static PyObject *add_identity_type(PyObject *Py_UNUSED(module), PyObject *type) {
    if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a type is wanted, not %R", type);
    for (int i = 0; i < place_state.type_count; i++)
        if (place_state.types[i] == (PyTypeObject *)type) Py_RETURN_NONE;
    if (place_state.type_count == TYPE_LIMIT)
        return PyErr_Format(PyExc_ValueError, "no more than %d types can tell ops apart", TYPE_LIMIT);
    place_state.types[place_state.type_count++] = (PyTypeObject *)Py_NewRef(type);
    new_epoch();
    Py_RETURN_NONE;
}

static PyObject *set_leaf_type(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *type, *is_leaf;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &is_leaf)) return NULL;
    Py_XSETREF(place_state.is_leaf, Py_NewRef(is_leaf));
    Py_XSETREF(fast_cache.leaf_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyObject *ordinal(PyObject *Py_UNUSED(module), PyObject *object) {
    uint64_t value;
    return ordinal_of(object, &value) ? NULL : PyLong_FromUnsignedLongLong(value);
}

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *describe, *on_death, *adopt = NULL;
    if (!PyArg_ParseTuple(args, "OO|O", &describe, &on_death, &adopt)) return NULL;
    Py_XSETREF(place_state.describe, Py_NewRef(describe));
    Py_XSETREF(place_state.on_death, Py_NewRef(on_death));
    Py_XSETREF(place_state.adopt, Py_XNewRef(adopt));
    new_epoch();
    Py_RETURN_NONE;
}

static PyObject *forget_code(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    new_epoch();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS, "configure(describe, on_death, adopt=None)"},
    {"forget_code", forget_code, METH_NOARGS, "Describe code again where its kind may have changed."},
    {"snapshot", take_snapshot, METH_NOARGS, "The present place, to be replayed."},
    {"reset_root", reset_root, METH_NOARGS, "Count repeats outside enclosing calls from zero."},
    {"subjects", subjects, METH_NOARGS, "Objects of the enclosing calls, outermost first."},
    {"add_identity_type", add_identity_type, METH_O, "Arguments of this type tell ops apart."},
    {"set_leaf_type", set_leaf_type, METH_VARARGS,
     "set_leaf_type(type, is_leaf): where is_leaf(value) is true of an argument of the type, it tells rounds of a loop apart."},
    {"ordinal", ordinal, METH_O, "Number of an object, in the order of first use."},
    {0}};

int place_boot(PyObject *names) {
    fast_cache.interpreter = PyInterpreterState_Get();
    if (place_state.index < 0) place_state.index = code_index(free_note); /* a reload keeps what there is */
    if (place_state.index < 0) {
        PyErr_SetString(PyExc_RuntimeError, "no room for notes on code objects");
        return -1;
    }
    for (PyMethodDef *def = functions; def->ml_name; def++)
        if (add_function(names, def)) return -1;
    PyObject *cap = PyLong_FromLong(AMANDA_OCCURRENCE_CAP);
    int failed = !cap || PyDict_SetItemString(names, "OCCURRENCE_CAP", cap);
    Py_XDECREF(cap);
    return failed || PyType_Ready(&Region_Type) || add_type(names, "Snapshot", &Snapshot_Type) ||
                   add_type(names, "Enclosure", &Enclosure_Type)
               ? -1
               : 0;
}

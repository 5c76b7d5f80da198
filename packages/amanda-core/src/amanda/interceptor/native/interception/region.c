/* Regions: the calls of objects that enclose ops, such as those of modules, and snapshots of a place. */
#include "interception/fast_path.h"
#include "interception/wrapped.h"

#define FREE_REGION_LIMIT 32
#define KEPT_COUNTS_LIMIT 64

/* Freed regions for reuse, linked by their parents, since each call of a module makes one. */
static struct {
    Region *first;
    int count;
} free_regions;

/* ---- regions ---- */

HOT static Region *new_region(uint64_t hash, Region *parent, PyObject *subject) {
    Region *region = free_regions.first;
    if (region) {
        free_regions.first = region->parent;
        free_regions.count--;
        _Py_NewReference((PyObject *)region);
    } else if (!(region = PyObject_New(Region, &Region_Type)))
        return NULL;
    region->hash = hash;
    region->parent = (Region *)Py_XNewRef(parent);
    region->subject = Py_XNewRef(subject);
    region->named = NULL;
    region->entry = NULL;
    region->ends_before = hash == AMANDA_ROOT_HASH ? 0 : BOUNDARY;
    region->ends_after = hash == AMANDA_ROOT_HASH ? USER : 0;
    region->is_over = 0;
    region->tail = NULL;
    region->tail_length = region->way_length = 0;
    clear_cells(region->first, AMANDA_FIRST_COUNTS);
    region->counts = (Map){region->first, AMANDA_FIRST_COUNTS, 0};
    return region;
}

/* Free a region; its parent, of which the caller gets the reference. */
static inline Region *free_region(Region *region) {
    Region *parent = region->parent;
    PyObject *subject = region->subject;
    if (region->tail) PyMem_RawFree(region->tail);
    if (region->counts.cells != region->first) map_clear(&region->counts);
    if (free_regions.count < FREE_REGION_LIMIT) {
        region->parent = free_regions.first;
        free_regions.first = region;
        free_regions.count++;
    } else
        PyObject_Free(region);
    Py_XDECREF(subject);
    return parent;
}

/* Regions nest as deep as snapshots are replayed in each other. The stack would not hold that, and CPython's trashcan
   serves the collector's objects alone, so parents that nothing else holds are freed in a loop. */
HOT static void region_dealloc(Region *region) {
    int thread_ends = local.thread.root == region;
    if (thread_ends) local.thread.root = NULL; /* the thread ends; what still dies may call ops */
    Region *parent = free_region(region);
    while (unlikely(parent && parent != local.thread.root && Py_REFCNT(parent) == 1)) parent = free_region(parent);
    Py_XDECREF(parent);
    if (unlikely(thread_ends)) Py_XDECREF(take_failure(&local.thread));
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
        Region *root = dict ? new_region(AMANDA_ROOT_HASH, NULL, NULL) : NULL;
        if (!root || PyDict_SetItemString(dict, "amanda.root", (PyObject *)root)) {
            Py_XDECREF(root);
            return PyErr_Occurred() ? NULL : (Region *)PyErr_NoMemory();
        }
        Py_DECREF(root);
        thread->root = root;
    }
    return thread->root;
}

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
    if (region->counts.size > KEPT_COUNTS_LIMIT) {
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
    for (int i = 0; i < named->further_path_count; i++)
        if (named->further_paths[i].owner == owner->named->ordinal) return &named->further_paths[i];
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
    Path *more = PyMem_RawRealloc(named->further_paths, (size_t)(named->further_path_count + 1) * sizeof(Path));
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    more[named->further_path_count++] = (Path){outer, hash};
    named->further_paths = more;
    return 0;
}

/* The hash of the path of `subject` in `owner`, as Python's `path_of` returns it; cached unless the subject lies there for
   this call alone. */
static int path_hash(Thread *thread, PyObject *path_of, PyObject *owner, PyObject *subject, uint64_t *hash) {
    thread->suspensions++;
    PyObject *reply = PyObject_CallFunctionObjArgs(path_of, owner, subject, NULL);
    thread->suspensions--;
    unsigned long long answer;
    int lasting, failed = !reply || !PyArg_ParseTuple(reply, "Kp", &answer, &lasting);
    Py_XDECREF(reply);
    if (failed || (lasting && keep_path(owner, subject, answer))) return -1;
    *hash = answer;
    return 0;
}

/* Make the region of a call of `subject`. Its hash is of the region around, of the subject's path there, and of the number
   of earlier calls of the same. */
static Region *enter_region(Thread *thread, PyObject *path_of, PyObject *subject) {
    Region *parent = cached_region(thread);
    if (unlikely(!parent) && !(parent = current_region(thread))) return NULL;
    const Named *named = named_at(subject);
    uint64_t name, repeats;
    if (at_root(parent) || !parent->subject || !path_of) {
        if (named) name = named->ordinal;
        else if (ordinal_of(subject, &name)) return NULL;
    } else {
        const Path *path = cached_path(parent, named);
        if (path) name = path->hash;
        else if (path_hash(thread, path_of, parent->subject, subject, &name)) return NULL;
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

/* Go back from a region to the region around it. Where stacks are switched, as greenlets do, calls do not end in the
   order in which they nest: the region around may be over, and be held by this region alone. */
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
    PyObject *function, *path_of = NULL;
    if (!PyArg_ParseTuple(args, "O|O", &function, &path_of)) return NULL;
    return wrapped_new(type, enclosure_call, function, path_of);
}

PyTypeObject Enclosure_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Enclosure",
    .tp_doc = "Enclosure(function, path=None): a method whose calls are regions, to which the ops in them belong.\n\n"
              "path(owner, subject): returns a hash of the path of `subject` in `owner`, and whether it lies there to stay;\n"
              "without this function, objects are known by the order of their first use.",
    .tp_base = &Wrapped_Type,
    .tp_flags = WRAPPED_FLAGS,
    .tp_new = enclosure_new,
};

/* ---- replays ---- */

typedef struct {
    PyObject_HEAD
    Region *region; /* a copy from the moment of the snapshot, which is on no thread's stack */
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
    PyObject *arguments = PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)), *result = NULL;
    if (arguments) {
        PyObject *key = thread->key;
        Region *outer = thread->top;
        region->entry = running_frame();
        thread->top = region;
        thread->key = NULL;
        result = PyObject_Call(PyTuple_GET_ITEM(args, 0), arguments, kwargs);
        leave_region(thread, region, outer);
        thread->key = key;
        Py_DECREF(arguments);
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
     "replay(function, *args, **kwargs): call a function as if at the place of the snapshot."},
    {0}};

PyTypeObject Snapshot_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Snapshot",
    .tp_basicsize = sizeof(Snapshot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A place in the program, and the counts of repeats there, at one moment, for a later replay.",
    .tp_dealloc = (destructor)snapshot_dealloc,
    .tp_methods = snapshot_methods,
};

/* ---- functions ---- */

static PyObject *reset_root(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    Thread *thread = thread_state();
    if (thread->root && !thread->suspensions) forget_counts(thread->root);
    Py_RETURN_NONE;
}

static PyObject *subjects(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *list = PyList_New(0);
    for (Region *region = thread_state()->top; list && region; region = region->parent)
        if (region->subject && PyList_Append(list, region->subject)) Py_CLEAR(list);
    if (list && PyList_Reverse(list)) Py_CLEAR(list);
    return list;
}

static PyMethodDef functions[] = {
    {"snapshot", take_snapshot, METH_NOARGS, "Return a snapshot of the present place, for a replay."},
    {"reset_root", reset_root, METH_NOARGS, "Count repeats outside enclosing calls from zero, but not within a Suspension."},
    {"subjects", subjects, METH_NOARGS, "Return the objects of the enclosing calls, the outermost first."},
    {0}};

int region_boot(PyObject *names) {
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

/* Interception: native stubs that stand in for builtins, descriptors and slots. */
#include "interception/fast_path.h"
#include "interception/wrapped.h"

#define STUB_COUNT 3072

static Site *sites[STUB_COUNT]; /* owned: a stub may run at any time after it was placed */
static int site_count;

/* ---- which op a call is ---- */

/* Mix the ordinals by which an argument tells ops apart into a place, and at the root those of leaves into the way. */
static int mix_argument(Thread *thread, const Site *site, PyObject *value, uint64_t *place, uint64_t *way) {
    const Region *region = cached_region(thread);
    return mix_identities(place, value) || (region->ends_after && mix_leaf(way, site->reader, value));
}

static int place_of_call(Thread *thread, const Site *site, const Arguments *arguments, uint64_t *place, uint64_t *way) {
    if (place_of(thread, site->hash, place, way)) return -1;
    if (site->flags & ONE_PLACE) return 0;
    if (arguments->receiver && mix_argument(thread, site, arguments->receiver, place, way)) return -1;
    for (Py_ssize_t i = 0; i < arguments->count + named_count(arguments); i++)
        if (mix_argument(thread, site, arguments->items[i], place, way)) return -1;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (arguments->dict && PyDict_Next(arguments->dict, &position, &name, &value))
        if (mix_argument(thread, site, value, place, way)) return -1;
    return 0;
}

static int identify(Thread *thread, const Site *site, const Arguments *arguments, uint64_t *id) {
    uint64_t place, way;
    if (place_of_call(thread, site, arguments, &place, &way)) return -1;
    int failed;
    *id = mix(place, occurrence_of(current_region(thread), place, way, &failed));
    if (!*id) *id = 1;
    return failed ? -1 : 0;
}

/* Borrowed; None: nothing is inserted; NULL: there is no plan yet. */
static inline PyObject *plan_of(const Activation *activation, uint64_t id) {
    return activation->table ? map_get(&activation->table->map, id) : NULL;
}

/* Run a call whose id the caches do not give, such as the first of each op: compute the id, and fill the caches. */
RARE static PyObject *run_unknown(Thread *thread, Activation *activation, Call *call) {
    PyObject *result = NULL;
    Py_INCREF(activation);
    if (!identify(thread, call->site, &call->arguments, &call->id)) { /* which may run anything */
        call->state = activation->state;
        call->plan = plan_of(activation, call->id);
        result = activation->active ? run_call(thread, activation, call)
                                    : vanilla(call->site, call->self, call->a, call->b, call->c);
    }
    Py_DECREF(activation);
    return result;
}

HOT __attribute__((noinline)) static int mix_cached_dict(PyObject *dict, uint64_t *hash) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &name, &value))
        if (!mix_cached_values(value, NULL, 0, hash)) return 0;
    return 1;
}

FLAT int mix_cached_arguments(const Site *site, const Arguments *arguments, uint64_t *hash) {
    if (unlikely(site->flags & ONE_PLACE)) return 1;
    if (!mix_cached_values(arguments->receiver, arguments->items, arguments->count + named_count(arguments), hash))
        return 0;
    return likely(!arguments->dict) || mix_cached_dict(arguments->dict, hash);
}

FLAT int mix_cached_leaves(const Site *site, const Arguments *arguments, uint64_t *way) {
    if (unlikely(site->flags & ONE_PLACE)) return 1;
    if (arguments->receiver && !mix_cached_leaf(site->reader, arguments->receiver, way)) return 0;
    for (Py_ssize_t i = 0; i < arguments->count + named_count(arguments); i++)
        if (!mix_cached_leaf(site->reader, arguments->items[i], way)) return 0;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (arguments->dict && PyDict_Next(arguments->dict, &position, &name, &value))
        if (!mix_cached_leaf(site->reader, value, way)) return 0;
    return 1;
}

#ifdef AMANDA_CHECKED
/* End the process where the slow path computes another place than the fast one: such a build is for tests. */
static void check_place(Thread *thread, const Site *site, Arguments arguments, uint64_t cached_place, uint64_t cached_way) {
    uint64_t place, way;
    if (place_of_call(thread, site, &arguments, &place, &way) || place != cached_place || way != cached_way)
        Py_FatalError("an op was taken for another");
}
#endif

/* The id of the op, which is counted as one more of its place; 0: the caches lack something that the call takes. */
FLAT uint64_t cached_id(const PyThreadState *running, Thread *thread, const Site *site, const Arguments *arguments) {
    Region *region = cached_region(thread);
    if (unlikely(!region)) return 0;
    uint64_t repeats = 0, place = mix(region->hash, site->hash), way = 0;
    if (!mix_cached_sites(running, region, &place, &way) || !mix_cached_arguments(site, arguments, &place)) return 0;
    int rooted = region->ends_after;
    if (rooted && fast_cache.leaf_type && !mix_cached_leaves(site, arguments, &way)) return 0;
#ifdef AMANDA_CHECKED
    check_place(thread, site, *arguments, place, way);
#endif
    if (!(rooted ? count_way(region, place, way, &repeats) : count_place(region, place, &repeats))) return 0;
    uint64_t id = mix(place, repeats);
    return id ? id : 1;
}

/* ---- dispatch ---- */

/* The activation in force once a failure is let go of, which may run anything. */
COLD static Activation *without_failure(const PyThreadState *running, Thread *thread) {
    Py_XDECREF(take_failure(thread));
    return activation_of(running, thread);
}

/* Every call of a placed target comes here. The order of the questions is that of their cost; an op whose plan is empty
   leaves by the last lines, and nothing on its way allocates, raises or runs Python. */
HOT __attribute__((noinline)) static PyObject *dispatch(Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    PyThreadState *running = running_thread();
    Thread *thread = thread_of(running);
    Activation *activation = activation_of(running, thread);
    if (!activation)
        return unlikely(thread->watch_seen != watch.number) && call_watcher(thread) ? NULL : vanilla(site, self, a, b, c);
    if (unlikely(thread->failed) && !(activation = without_failure(running, thread)))
        return vanilla(site, self, a, b, c);
    PyObject *key = thread->key;
    if (unlikely(key != NULL) && (key == site->key || site->flags & IMPLEMENTATION))
        return vanilla(site, self, a, b, c);
    PyObject *room[2];
    const Arguments arguments = read_arguments(site, room, self, a, b, c);
    uint64_t id = cached_id(running, thread, site, &arguments);
    PyObject *plan = likely(id) ? plan_of(activation, id) : NULL;
    if (plan != Py_None) {
        /* The call is put into memory here, not before: above, its parts lie in registers. */
        Call call = {site, activation->state, plan, id, arguments, self, a, b, c};
        return likely(id) ? run_call(thread, activation, &call) : run_unknown(thread, activation, &call);
    }
    thread->key = site->flags & TRANSPARENT ? NULL : site->key;
    PyObject *result = vanilla(site, self, a, b, c);
    thread->key = key;
    return reraise_kept_failure(thread, result);
}

/* One stub an index. A stub takes the most arguments that any calling convention passes; under
   a shorter one the rest is noise in registers, which `dispatch` never reads. */
#define STUB(n)                                                                                       \
    static PyObject *stub_##n(PyObject *self, PyObject *a, PyObject *b, PyObject *c) {                \
        return dispatch(sites[0x##n], self, a, b, c);                                                 \
    }
#define NAME(n) (void *)stub_##n,
#define TIMES_16(m, p)                                                                                \
    m(p##0) m(p##1) m(p##2) m(p##3) m(p##4) m(p##5) m(p##6) m(p##7) m(p##8) m(p##9) m(p##a) m(p##b)    \
        m(p##c) m(p##d) m(p##e) m(p##f)
#define TIMES_256(m, p)                                                                               \
    m(p##0) m(p##1) m(p##2) m(p##3) m(p##4) m(p##5) m(p##6) m(p##7) m(p##8) m(p##9) m(p##a) m(p##b)    \
        m(p##c) m(p##d) m(p##e) m(p##f)
#define STUB_16(p) TIMES_16(STUB, p)
#define NAME_16(p) TIMES_16(NAME, p)
#define STUB_256(p) TIMES_256(STUB_16, p)
#define NAME_256(p) TIMES_256(NAME_16, p)
#define TIMES_3072(m) m(0) m(1) m(2) m(3) m(4) m(5) m(6) m(7) m(8) m(9) m(a) m(b)

TIMES_3072(STUB_256)
static void *const stubs[STUB_COUNT] = {TIMES_3072(NAME_256)};

static Site *assign_site; /* a slot that assigns gives an int, so its stub is one of its own */

static int assign_stub(PyObject *self, PyObject *key, PyObject *value) {
    if (!value) return ((objobjargproc)assign_site->native)(self, key, value); /* del x[key] */
    PyObject *result = dispatch(assign_site, self, key, value, NULL);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static PyObject *detour_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
    Wrapped *wrapped = (Wrapped *)self;
    return dispatch((Site *)wrapped->site, wrapped->function, (PyObject *)args, (PyObject *)nargsf, names);
}

static PyObject *detour_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    Site *site;
    if (!PyArg_ParseTuple(args, "O!", &Site_Type, &site)) return NULL;
    if (site->kind != PYTHON) return PyErr_Format(PyExc_TypeError, "%R is placed, not detoured", site->op);
    return wrapped_new(type, detour_call, site->original, (PyObject *)site);
}

PyTypeObject Detour_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Detour",
    .tp_doc = "Detour(site): takes the place of a Python callable and brings its calls to the site.",
    .tp_base = &Wrapped_Type,
    .tp_flags = WRAPPED_FLAGS,
    .tp_new = detour_new,
};

/* ---- which site has which stub ---- */

void *stub_of(const Site *site) { return site->kind == ASSIGN ? (void *)assign_stub : stubs[site->index]; }

Site *site_behind(const void *pointer) {
    if (pointer == (void *)assign_stub) return assign_site;
    for (int i = 0; pointer && i < site_count; i++)
        if (stubs[i] == pointer) return sites[i];
    return NULL;
}

int take_stub(Site *site) {
    if (site->index >= 0) return 0;
    if (site->kind == ASSIGN) {
        if (assign_site) {
            PyErr_SetString(PyExc_RuntimeError, "one slot that assigns can be intercepted");
            return -1;
        }
        assign_site = (Site *)Py_NewRef(site);
        site->index = STUB_COUNT;
        return 0;
    }
    if (site_count == STUB_COUNT) {
        PyErr_Format(PyExc_RuntimeError, "no more than %d callables can be intercepted", STUB_COUNT);
        return -1;
    }
    site->index = site_count;
    sites[site_count++] = (Site *)Py_NewRef(site);
    return 0;
}

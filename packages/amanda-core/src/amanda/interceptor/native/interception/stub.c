/* Interception: native stubs that stand in for builtins, descriptors and slots. */
#include "interception/fast_path.h"
#include "interception/wrapped.h"
#include <structmember.h>

#define STUB_COUNT 3072

static Site *sites[STUB_COUNT]; /* owned: a stub may run at any time after it was placed */
static int site_count;
PyObject *activation_variable;

/* ---- activation ---- */

Activation *looked_up_activation(void) {
    PyObject *value = NULL;
    if (PyContextVar_Get(activation_variable, NULL, &value)) {
        PyErr_Clear();
        return NULL;
    }
    if (!value) return NULL;
    Py_DECREF(value); /* the context keeps it */
    return Py_IS_TYPE(value, &Activation_Type) && ((Activation *)value)->active ? (Activation *)value : NULL;
}

Activation *active_activation(Thread *thread) {
    return (Activation *)Py_XNewRef((PyObject *)activation_of(running_thread(), thread));
}

static PyObject *activation_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *table, *state;
    int active = 1, memos = 1, variant = 0;
    if (!PyArg_ParseTuple(args, "OO|ppi", &table, &state, &active, &memos, &variant)) return NULL;
    if (table != Py_None && !Py_IS_TYPE(table, &PlanTable_Type))
        return PyErr_Format(PyExc_TypeError, "a PlanTable or None is wanted, not %R", table);
    Activation *self = (Activation *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->active = active;
    self->memos = memos;
    self->variant = variant;
    self->table = table == Py_None ? NULL : (PlanTable *)Py_NewRef(table);
    self->state = Py_NewRef(state);
    return (PyObject *)self;
}

static int activation_traverse(Activation *self, visitproc visit, void *arg) {
    Py_VISIT(self->table);
    Py_VISIT(self->state);
    return 0;
}

static void activation_dealloc(Activation *self) {
    PyObject_GC_UnTrack(self);
    if (self->references) PyObject_ClearWeakRefs((PyObject *)self);
    Py_CLEAR(self->table);
    Py_CLEAR(self->state);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *activation_become(Activation *self, PyObject *value) {
    if (!Py_IS_TYPE(value, &Activation_Type))
        return PyErr_Format(PyExc_TypeError, "an Activation is wanted, not %R", value);
    Activation *other = (Activation *)value;
    PyObject *table = (PyObject *)self->table, *state = self->state;
    self->active = other->active;
    self->memos = other->memos;
    self->variant = other->variant;
    self->table = (PlanTable *)Py_XNewRef((PyObject *)other->table);
    self->state = Py_NewRef(other->state);
    Py_XDECREF(table);
    Py_DECREF(state);
    Py_RETURN_NONE;
}

static PyMethodDef activation_methods[] = {
    {"become", (PyCFunction)activation_become, METH_O,
     "Put in force what another activation holds, in every context that has this one; ops under way go on as they "
     "began."},
    {0}};

static PyMemberDef activation_members[] = {
    {"active", T_INT, offsetof(Activation, active), 0, "Whether ops are intercepted."},
    {"state", T_OBJECT, offsetof(Activation, state), READONLY, "What handlers are given."},
    {0}};

PyTypeObject Activation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Activation",
    .tp_basicsize = sizeof(Activation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Activation(table, state, active=True, memos=True, variant=0): what is in force in an execution context.\n\n"
              "memos: whether what memos have learned holds.  variant: memos learn for each of these numbers apart.",
    .tp_new = activation_new,
    .tp_dealloc = (destructor)activation_dealloc,
    .tp_traverse = (traverseproc)activation_traverse,
    .tp_methods = activation_methods,
    .tp_members = activation_members,
    .tp_weaklistoffset = offsetof(Activation, references),
};

/* ---- calls ---- */

static int mix_argument(Thread *thread, const Site *site, PyObject *value, uint64_t *place, uint64_t *way) {
    const Region *region = known_region(thread);
    return mix_identities(place, value) || (region->ends_after && mix_leaf(way, site->reader, value));
}

static int place_of_call(Thread *thread, const Site *site, const Arguments *given, uint64_t *place, uint64_t *way) {
    if (place_of(thread, site->hash, place, way)) return -1;
    if (site->flags & ONE_PLACE) return 0;
    if (given->self && mix_argument(thread, site, given->self, place, way)) return -1;
    Py_ssize_t named = given->names ? PyTuple_GET_SIZE(given->names) : 0;
    for (Py_ssize_t i = 0; i < given->count + named; i++)
        if (mix_argument(thread, site, given->items[i], place, way)) return -1;
    if (given->dict) {
        PyObject *key, *value;
        Py_ssize_t position = 0;
        while (PyDict_Next(given->dict, &position, &key, &value))
            if (mix_argument(thread, site, value, place, way)) return -1;
    }
    return 0;
}

static int identify(Thread *thread, Site *site, const Arguments *given, uint64_t *id) {
    uint64_t place, way;
    if (place_of_call(thread, site, given, &place, &way)) return -1;
    int failed;
    *id = mix(place, occurrence_of(current_region(thread), place, way, &failed));
    if (!*id) *id = 1;
    return failed ? -1 : 0;
}

/* Borrowed; None: nothing is inserted; NULL: it has none yet. */
static inline PyObject *plan_of(const Activation *activation, uint64_t id) {
    return activation->table ? map_get(&activation->table->map, id) : NULL;
}

static inline PyObject *run_next(Thread *thread, Activation *activation, PyObject *plan, uint64_t id, Site *site,
                                 PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    thread->next.activation = activation;
    thread->next.plan = plan;
    thread->next.id = id;
    return run_plan(thread, site, self, a, b, c);
}

/* An op of which something is met for the first time. */
RARE static PyObject *run_unknown(Thread *thread, Activation *activation, Site *site, PyObject *self, PyObject *a,
                                  PyObject *b, PyObject *c) {
    Arguments given;
    PyObject *result = NULL;
    uint64_t id;
    read_arguments(site, &given, self, a, b, c);
    Py_INCREF(activation);
    if (!identify(thread, site, &given, &id)) /* which may run anything */
        result = activation->active ? run_next(thread, activation, plan_of(activation, id), id, site, self, a, b, c)
                                    : vanilla(site, self, a, b, c);
    Py_DECREF(activation);
    return result;
}

HOT __attribute__((noinline)) static int mix_known_keywords(PyObject *self, PyObject *args, PyObject *keywords, uint64_t *hash) {
    if (!mix_known_values(self, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), hash)) return 0;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(keywords, &position, &name, &value))
        if (!mix_known_values(value, NULL, 0, hash)) return 0;
    return 1;
}

static inline int mix_known_arguments(const Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c,
                                      uint64_t *hash) {
    PyObject *const *items = (PyObject *const *)a, *few[2];
    Py_ssize_t count = 0;
    if (unlikely(site->flags & ONE_PLACE)) return 1;
    switch (site->kind) {
    case FUNCTION: case PYTHON:
        self = NULL;
        count = PyVectorcall_NARGS((size_t)b) + (c ? PyTuple_GET_SIZE(c) : 0);
        break;
    case KEYWORDS:
        if (b && PyDict_GET_SIZE(b)) return mix_known_keywords(self, a, b, hash); /* fall through */
    case VARARGS:
        items = ((PyTupleObject *)a)->ob_item;
        count = PyTuple_GET_SIZE(a);
        break;
    case FAST_KEYWORDS:
        count = c ? PyTuple_GET_SIZE(c) : 0; /* fall through */
    case FAST:
        count += (Py_ssize_t)b;
        break;
    case NOARGS: case GET:
        break;
    default:
        few[0] = a;
        few[1] = b;
        items = few;
        count = site->kind == ASSIGN ? 2 : 1;
    }
    return mix_known_values(self, items, count, hash);
}

static inline int mix_known_leaves(Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c, uint64_t *way) {
    Arguments given;
    if (unlikely(site->flags & ONE_PLACE)) return 1;
    read_arguments(site, &given, self, a, b, c);
    if (given.self && !mix_known_leaf(site->reader, given.self, way)) return 0;
    Py_ssize_t named = given.names ? PyTuple_GET_SIZE(given.names) : 0;
    for (Py_ssize_t i = 0; i < given.count + named; i++)
        if (!mix_known_leaf(site->reader, given.items[i], way)) return 0;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (given.dict && PyDict_Next(given.dict, &position, &name, &value))
        if (!mix_known_leaf(site->reader, value, way)) return 0;
    return 1;
}

#ifdef AMANDA_CHECKED
/* Ends the process where the long way comes to another place than the short one: such a build is for tests. */
static void check_place(Thread *thread, Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c,
                        uint64_t known_place, uint64_t known_way) {
    Arguments given;
    uint64_t place, way;
    read_arguments(site, &given, self, a, b, c);
    if (place_of_call(thread, site, &given, &place, &way) || place != known_place || way != known_way)
        Py_FatalError("an op was taken for another");
}
#endif

/* The id of the op, which is counted as one more of its place; 0: not all that it takes is known. */
static inline uint64_t known_id(const PyThreadState *running, Thread *thread, Site *site, PyObject *self, PyObject *a,
                                PyObject *b, PyObject *c) {
    Region *region = known_region(thread);
    if (unlikely(!region)) return 0;
    uint64_t seen, place = mix(region->hash, site->hash), way = 0;
    if (!mix_known_sites(running, region, &place, &way) || !mix_known_arguments(site, self, a, b, c, &place)) return 0;
    int rooted = region->ends_after;
    if (rooted && known.leaf_type && !mix_known_leaves(site, self, a, b, c, &way)) return 0;
#ifdef AMANDA_CHECKED
    check_place(thread, site, self, a, b, c, place, way);
#endif
    if (!(rooted ? count_way(region, place, way, &seen) : count_known(region, place, &seen))) return 0;
    uint64_t id = mix(place, seen);
    return id ? id : 1;
}

/* ---- threads where nothing is in force ---- */

static struct {
    PyObject *function; /* owned; NULL: nobody asks */
    uint64_t number;    /* of the last time that somebody asked */
} watch;

/* Tells that this thread runs ops where nothing is in force, until the watcher has heard enough; -1: it raised. */
COLD static int tell_watcher(Thread *thread) {
    if (thread->off) return 0;
    uint64_t number = watch.number;
    if (!watch.function) {
        thread->met = number;
        return 0;
    }
    PyObject *function = Py_NewRef(watch.function);
    thread->off++;
    PyObject *enough = PyObject_CallNoArgs(function);
    thread->off--;
    Py_DECREF(function);
    if (!enough) return -1;
    if (enough == Py_True) thread->met = number;
    Py_DECREF(enough);
    return 0;
}

static PyObject *watch_outside(PyObject *Py_UNUSED(module), PyObject *function) {
    watch.number++;
    Py_XSETREF(watch.function, function == Py_None ? NULL : Py_NewRef(function));
    Py_RETURN_NONE;
}

#ifdef AMANDA_CHECKED
static PyObject *disturber; /* owned */

void disturb(void) {
    static int disturbs;
    if (!disturber || disturbs) return;
    PyObject *kind, *raised, *trace, *function = Py_NewRef(disturber);
    PyErr_Fetch(&kind, &raised, &trace);
    disturbs = 1;
    PyObject *answer = PyObject_CallNoArgs(function);
    disturbs = 0;
    if (!answer) PyErr_WriteUnraisable(function);
    Py_XDECREF(answer);
    Py_DECREF(function);
    PyErr_Restore(kind, raised, trace);
}

static PyObject *disturb_with(PyObject *Py_UNUSED(module), PyObject *function) {
    Py_XSETREF(disturber, function == Py_None ? NULL : Py_NewRef(function));
    Py_RETURN_NONE;
}

static PyMethodDef disturb_with_def = {"disturb_with", disturb_with, METH_O,
                                       "Call a function wherever native code has Python run; a build for tests has this."};
#endif

/* ---- failures ---- */

/* By number of the thread: what a tool raised since the last op there began. Threads do not own it, because a thread
   may end, or wait for ever, and the exception holds the frames and the tensors of its routine. */
static PyObject *failures; /* owned dict */

PyObject *take_failure(Thread *thread) {
    if (!thread->failed) return NULL;
    thread->failed = 0;
    PyObject *kind, *raised, *trace;
    PyErr_Fetch(&kind, &raised, &trace);
    PyObject *number = PyLong_FromUnsignedLongLong(local.owner);
    PyObject *error = number ? Py_XNewRef(PyDict_GetItemWithError(failures, number)) : NULL;
    if (error) PyDict_DelItem(failures, number);
    Py_XDECREF(number);
    PyErr_Restore(kind, raised, trace);
    return error;
}

/* The activation in force once a failure is let go of, which may run anything. */
COLD static Activation *without_failure(const PyThreadState *running, Thread *thread) {
    Py_XDECREF(take_failure(thread));
    return activation_of(running, thread);
}

HOT __attribute__((noinline)) static PyObject *dispatch(Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    PyThreadState *running = running_thread();
    Thread *thread = thread_of(running);
    Activation *activation = activation_of(running, thread);
    if (!activation)
        return unlikely(thread->met != watch.number) && tell_watcher(thread) ? NULL : vanilla(site, self, a, b, c);
    if (unlikely(thread->failed) && !(activation = without_failure(running, thread)))
        return vanilla(site, self, a, b, c);
    PyObject *key = thread->key;
    if (unlikely(key != NULL) && (key == site->key || site->flags & IMPLEMENTATION))
        return vanilla(site, self, a, b, c);
    uint64_t id = known_id(running, thread, site, self, a, b, c);
    if (unlikely(!id)) return run_unknown(thread, activation, site, self, a, b, c);
    PyObject *plan = plan_of(activation, id);
    if (plan != Py_None) return run_next(thread, activation, plan, id, site, self, a, b, c);
    thread->key = site->flags & TRANSPARENT ? NULL : site->key;
    PyObject *result = vanilla(site, self, a, b, c);
    thread->key = key;
    return checked(thread, result);
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

/* ---- sites ---- */

static int kind_of_method(int flags, Kind *kind) {
    switch (flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL | METH_METHOD)) {
    case METH_NOARGS: *kind = NOARGS; return 0;
    case METH_O: *kind = ONE; return 0;
    case METH_VARARGS: *kind = VARARGS; return 0;
    case METH_VARARGS | METH_KEYWORDS: *kind = KEYWORDS; return 0;
    case METH_FASTCALL: *kind = FAST; return 0;
    case METH_FASTCALL | METH_KEYWORDS: *kind = FAST_KEYWORDS; return 0;
    }
    return -1;
}

static int slot_kind(PyWrapperDescrObject *descriptor, Kind *kind) {
    int offset = descriptor->d_base->offset;
    if (strcmp(descriptor->d_base->name, "__delitem__") == 0) return -1; /* shares the slot of __setitem__ */
    if (offset == (int)offsetof(PyHeapTypeObject, as_mapping.mp_subscript)) *kind = SUBSCRIPT;
    else if (offset == (int)offsetof(PyHeapTypeObject, as_mapping.mp_ass_subscript)) *kind = ASSIGN;
    else return -1;
    return 0;
}

/* A copy of a definition as it is now. It lasts: a callable made from it may outlive the site. */
static void *lasting_copy(const void *definition, size_t size) {
    static Map copies; /* address -> the last copy of what lies there */
    uint64_t key = (uint64_t)(uintptr_t)definition;
    void *copy = map_get(&copies, key);
    if (copy && memcmp(copy, definition, size) == 0) return copy;
    copy = PyMem_RawMalloc(size);
    if (!copy || map_set(&copies, key, copy)) {
        PyMem_RawFree(copy);
        return PyErr_NoMemory();
    }
    return memcpy(copy, definition, size);
}

/* The site whose stub it is; NULL: it is a target's own. */
static Site *site_behind(const void *pointer) {
    if (pointer == (void *)assign_stub) return assign_site;
    for (int i = 0; pointer && i < site_count; i++)
        if (stubs[i] == pointer) return sites[i];
    return NULL;
}

/* Reads what `target` is, past a site that is placed on it: kind, where its native pointer lies, and a callable that keeps it. */
static int read_target(Site *site, PyObject *target) {
    PyTypeObject *type = NULL;
    if (Py_IS_TYPE(target, &PyMethodDescr_Type) || Py_IS_TYPE(target, &PyClassMethodDescr_Type) ||
        Py_IS_TYPE(target, &PyGetSetDescr_Type) || Py_IS_TYPE(target, &PyWrapperDescr_Type))
        type = PyDescr_TYPE((PyDescrObject *)target);
    site->bound = 1;
    if (PyCFunction_Check(target)) {
        PyCFunctionObject *function = (PyCFunctionObject *)target;
        Site *there = site_behind((void *)function->vectorcall);
        site->bound = 0;
        site->own = there ? there->own : function->m_ml;
        site->marked = *site->own;
        site->marked.ml_flags |= METH_COEXIST;
        if (!(site->pristine = lasting_copy(site->own, sizeof(PyMethodDef)))) return -1;
        if (kind_of_method(site->pristine->ml_flags, &site->kind)) goto unknown;
        site->original = PyCFunction_NewEx(site->pristine, function->m_self, function->m_module);
        site->kind = FUNCTION;
        site->where.function = function;
        site->self = PyCFunction_GET_SELF(function);
        site->native = there ? there->native : (void *)function->vectorcall;
        return site->original ? 0 : -1;
    } else if (Py_IS_TYPE(target, &PyMethodDescr_Type) || Py_IS_TYPE(target, &PyClassMethodDescr_Type)) {
        site->where.method = ((PyMethodDescrObject *)target)->d_method;
        Site *there = site_behind((void *)site->where.method->ml_meth);
        site->pristine = there ? there->pristine : lasting_copy(site->where.method, sizeof(PyMethodDef));
        if (!site->pristine) return -1;
        if (kind_of_method(site->pristine->ml_flags, &site->kind)) goto unknown;
        site->original = Py_IS_TYPE(target, &PyMethodDescr_Type) ? PyDescr_NewMethod(type, site->pristine)
                                                                 : PyDescr_NewClassMethod(type, site->pristine);
    } else if (Py_IS_TYPE(target, &PyGetSetDescr_Type)) {
        site->where.get = ((PyGetSetDescrObject *)target)->d_getset;
        Site *there = site_behind((void *)site->where.get->get);
        site->pristine_get = there ? there->pristine_get : lasting_copy(site->where.get, sizeof(PyGetSetDef));
        if (!site->pristine_get) return -1;
        site->kind = GET;
        site->native = (void *)site->pristine_get->get;
        PyObject *descriptor = PyDescr_NewGetSet(type, site->pristine_get);
        site->original = descriptor ? PyObject_GetAttrString(descriptor, "__get__") : NULL;
        Py_XDECREF(descriptor);
        return site->original && site->native ? 0 : -1;
    } else if (Py_IS_TYPE(target, &PyWrapperDescr_Type)) {
        PyWrapperDescrObject *slot = (PyWrapperDescrObject *)target;
        if (slot_kind(slot, &site->kind)) goto unknown;
        Site *there = site_behind(slot->d_wrapped);
        site->where.slot = slot;
        site->native = there ? there->native : slot->d_wrapped;
        site->original = PyDescr_NewWrapper(type, slot->d_base, site->native);
        return site->original ? 0 : -1;
    } else if (PyCallable_Check(target)) {
        site->bound = 0;
        site->kind = PYTHON;
        site->original = Py_NewRef(target);
        return 0;
    } else {
        goto unknown;
    }
    site->native = (void *)site->pristine->ml_meth;
    return site->original ? 0 : -1;
unknown:
    PyErr_Format(PyExc_TypeError, "%R is not a kind of callable that can be intercepted", target);
    return -1;
}

static PyObject *site_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *target, *op, *key, *handler;
    unsigned long long hash;
    int flags = 0;
    PyObject *reader = Py_None;
    if (!PyArg_ParseTuple(args, "OOUKO|iO", &target, &op, &key, &hash, &handler, &flags, &reader)) return NULL;
    if (reader != Py_None && !Py_IS_TYPE(reader, &Reader_Type))
        return PyErr_Format(PyExc_TypeError, "a Reader or None is wanted, not %R", reader);
    Site *site = (Site *)type->tp_alloc(type, 0);
    if (!site) return NULL;
    site->index = -1;
    site->hash = hash;
    site->flags = flags;
    site->target = Py_NewRef(target);
    site->op = Py_NewRef(op);
    site->handler = Py_NewRef(handler);
    site->reader = reader == Py_None ? NULL : (Reader *)Py_NewRef(reader);
    site->key = Py_NewRef(key);
    PyUnicode_InternInPlace(&site->key);
    if (read_target(site, target)) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%R cannot be read", target);
        Py_DECREF(site);
        return NULL;
    }
    return (PyObject *)site;
}

/* The type and all that inherit from it. */
static PyObject *with_heirs(PyTypeObject *type) {
    PyObject *types = Py_BuildValue("[O]", type);
    for (Py_ssize_t i = 0; types && i < PyList_GET_SIZE(types); i++) {
        Py_ssize_t end = PyList_GET_SIZE(types);
        PyObject *heirs = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", PyList_GET_ITEM(types, i));
        if (!heirs || PyList_SetSlice(types, end, end, heirs)) Py_CLEAR(types);
        Py_XDECREF(heirs);
    }
    return types;
}

/* All or none: what may fail comes first. */
static int swap_slots(Site *site, void *from, void *to) {
    PyObject *types = with_heirs(PyDescr_TYPE(site->where.slot));
    if (!types) return -1;
    if (site->where.slot->d_wrapped == from) site->where.slot->d_wrapped = to;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(types); i++) {
        PyMappingMethods *mapping = ((PyTypeObject *)PyList_GET_ITEM(types, i))->tp_as_mapping;
        if (mapping && site->kind == SUBSCRIPT && mapping->mp_subscript == (binaryfunc)from)
            mapping->mp_subscript = (binaryfunc)to;
        if (mapping && site->kind == ASSIGN && mapping->mp_ass_subscript == (objobjargproc)from)
            mapping->mp_ass_subscript = (objobjargproc)to;
    }
    Py_DECREF(types);
    return 0;
}

static void *pointer_at(Site *site) {
    switch (site->kind) {
    case GET: return (void *)site->where.get->get;
    case FUNCTION: return (void *)site->where.function->vectorcall;
    case SUBSCRIPT: case ASSIGN: return site->where.slot->d_wrapped;
    default: return (void *)site->where.method->ml_meth;
    }
}

static int put(Site *site, void *pointer, void *instead_of) {
    switch (site->kind) {
    case GET:
        if (site->where.get->get == (getter)instead_of) site->where.get->get = (getter)pointer;
        return 0;
    case FUNCTION:
        if (site->where.function->vectorcall != (vectorcallfunc)instead_of) return 0;
        site->where.function->vectorcall = (vectorcallfunc)pointer;
        site->where.function->m_ml = pointer == site->native ? site->own : &site->marked;
        return 0;
    case SUBSCRIPT: case ASSIGN:
        return swap_slots(site, instead_of, pointer);
    default:
        if (site->where.method->ml_meth == (PyCFunction)instead_of)
            site->where.method->ml_meth = (PyCFunction)pointer;
        return 0;
    }
}

static void *stub_of(Site *site) { return site->kind == ASSIGN ? (void *)assign_stub : stubs[site->index]; }

static int assign_index(Site *site) {
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

static PyObject *site_place(Site *site, PyObject *Py_UNUSED(none)) {
    if (site->kind == PYTHON) return PyErr_Format(PyExc_TypeError, "%R is detoured, not placed", site->op);
    if (!site->placed && (assign_index(site) || put(site, stub_of(site), site->native))) return NULL;
    site->placed = pointer_at(site) == stub_of(site); /* where another site is, it stays */
    Py_RETURN_NONE;
}

static PyObject *site_remove(Site *site, PyObject *Py_UNUSED(none)) {
    if (site->placed && put(site, site->native, stub_of(site))) return NULL;
    site->placed = 0;
    Py_RETURN_NONE;
}

static PyObject *site_invoke(Site *site, PyObject *args) {
    PyObject *positional, *keywords = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyTuple_Type, &positional, &PyDict_Type, &keywords)) return NULL;
    Thread *thread = thread_state();
    PyObject *key = thread->key;
    int off = thread->off;
    thread->off = 0;
    thread->key = site->flags & TRANSPARENT ? NULL : site->key;
    PyObject *result = PyObject_Call(site->original, positional, keywords);
    thread->key = key;
    thread->off = off;
    return result;
}

static PyObject *site_address(Site *site, void *Py_UNUSED(closure)) {
    if (site->kind == PYTHON) Py_RETURN_NONE;
    return PyLong_FromVoidPtr(pointer_at(site));
}

static int site_traverse(Site *self, visitproc visit, void *arg) {
    Py_VISIT(self->op);
    Py_VISIT(self->handler);
    Py_VISIT(self->target);
    Py_VISIT(self->original);
    return 0;
}

static void site_dealloc(Site *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->op);
    Py_CLEAR(self->handler);
    Py_CLEAR(self->target);
    Py_CLEAR(self->original);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->key);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef site_methods[] = {
    {"place", (PyCFunction)site_place, METH_NOARGS, "Let calls of the target pass the stub."},
    {"remove", (PyCFunction)site_remove, METH_NOARGS, "Leave the target as it was."},
    {"invoke", (PyCFunction)site_invoke, METH_VARARGS,
     "invoke(args, kwargs={}): call the target itself; what it calls in turn is intercepted."},
    {0}};

static PyMemberDef site_members[] = {
    {"op", T_OBJECT, offsetof(Site, op), READONLY, "The callable that tools are shown."},
    {"key", T_OBJECT, offsetof(Site, key), READONLY, "Canonical name."},
    {"target", T_OBJECT, offsetof(Site, target), READONLY, "What is intercepted."},
    {"original", T_OBJECT, offsetof(Site, original), READONLY, "The target, past interception."},
    {"placed", T_BOOL, offsetof(Site, placed), READONLY, "Whether calls pass the stub."},
    {0}};

static PyGetSetDef site_getset[] = {
    {"address", (getter)site_address, NULL, "The native pointer that is in place now.", NULL}, {0}};

PyTypeObject Site_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Site",
    .tp_basicsize = sizeof(Site),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Site(target, op, key, hash, handler, flags=0, reader=None): one callable and who handles its calls.",
    .tp_new = site_new,
    .tp_dealloc = (destructor)site_dealloc,
    .tp_traverse = (traverseproc)site_traverse,
    .tp_methods = site_methods,
    .tp_members = site_members,
    .tp_getset = site_getset,
};

/* ---- suspension ---- */

static PyObject *suspension_enter(PyObject *self, PyObject *Py_UNUSED(none)) {
    thread_state()->off++;
    return Py_NewRef(self);
}

static PyObject *suspension_exit(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
    thread_state()->off--;
    Py_RETURN_NONE;
}

static PyMethodDef suspension_methods[] = {
    {"__enter__", suspension_enter, METH_NOARGS, NULL}, {"__exit__", suspension_exit, METH_VARARGS, NULL}, {0}};

PyTypeObject Suspension_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Suspension",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Context in which this thread intercepts nothing.",
    .tp_new = PyType_GenericNew,
    .tp_methods = suspension_methods,
};

static PyObject *active(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    Thread *thread = thread_state();
    PyObject *activation = (PyObject *)active_activation(thread);
    if (activation) return activation;
    return thread->met != watch.number && tell_watcher(thread) ? NULL : Py_NewRef(Py_None);
}

static PyObject *failure(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *number = thread_state()->failed ? PyLong_FromUnsignedLongLong(local.owner) : NULL;
    PyObject *error = number ? PyDict_GetItemWithError(failures, number) : NULL;
    Py_XDECREF(number);
    if (PyErr_Occurred()) return NULL;
    return Py_NewRef(error ? error : Py_None);
}

static PyObject *keep_failure(PyObject *Py_UNUSED(module), PyObject *error) {
    Thread *thread = thread_state();
    Py_XDECREF(take_failure(thread));
    if (error == Py_None || thread == &foreign || !current_region(thread)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    PyObject *number = PyLong_FromUnsignedLongLong(local.owner);
    thread->failed = number && !PyDict_SetItem(failures, number, error); /* the thread's root forgets it as it ends */
    Py_XDECREF(number);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *forget_failures(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyDict_Clear(failures);
    Py_RETURN_NONE;
}

static PyObject *running(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *key = thread_state()->key;
    return Py_NewRef(key ? key : Py_None);
}

static PyMethodDef running_def = {"running", running, METH_NOARGS,
                                  "Name of the op whose native code this thread runs; None outside of ops."};
static PyMethodDef failure_def = {"failure", failure, METH_NOARGS,
                                  "What a tool raised on this thread since the last op began, if it was kept."};
static PyMethodDef keep_failure_def = {"keep_failure", keep_failure, METH_O,
                                       "Keep a tool's exception, which an operator may drop; None lets go of it."};
static PyMethodDef forget_failures_def = {"forget_failures", forget_failures, METH_NOARGS,
                                          "Let go of the exceptions of tools that are kept for any thread."};
static PyMethodDef watch_outside_def = {"watch_outside", watch_outside, METH_O,
                                        "Call a function on each thread that runs ops where nothing is in force, "
                                        "until it returns True there; None ends it."};
static PyMethodDef active_def = {"active", active, METH_NOARGS,
                                 "The activation in force here; None where nothing is intercepted."};

int stub_boot(PyObject *names) {
    if (!activation_variable) activation_variable = PyContextVar_New("amanda.activation", NULL);
    if (!failures) failures = PyDict_New();
#ifdef AMANDA_CHECKED
    if (add_function(names, &disturb_with_def)) return -1;
#endif
    return !activation_variable || !failures || PyDict_SetItemString(names, "ACTIVATION", activation_variable) ||
                   add_function(names, &active_def) || add_function(names, &failure_def) ||
                   add_function(names, &keep_failure_def) || add_function(names, &forget_failures_def) ||
                   add_function(names, &watch_outside_def) || add_function(names, &running_def) ||
                   add_type(names, "PlanTable", &PlanTable_Type) || PyType_Ready(&Wrapped_Type) ||
                   add_type(names, "Activation", &Activation_Type) || add_type(names, "Site", &Site_Type) ||
                   add_type(names, "Detour", &Detour_Type) || add_type(names, "Suspension", &Suspension_Type)
               ? -1
               : 0;
}

/* Ordinals: numbers of objects in the order of first use, which enter the ids of ops that have them as arguments. */
#include "interception/fast_path.h"

#define TYPE_LIMIT 16
#define SLOT_QUERIES 8
#define FIRST_SWEEP 64

static struct {
    PyObject *on_death, *adopt, *is_leaf; /* owned; what Python has set */
    PyTypeObject *types[TYPE_LIMIT];
    int type_count;
    uint64_t last;
    size_t strong, strong_limit; /* objects that are held strongly, and how many lead to a sweep */
} ordinals = {.strong_limit = FIRST_SWEEP};

/* Whether the ordinals of values of a type enter ids. */
static inline int is_identity_type(PyTypeObject *type) {
    CachedType *answer = cached_type(type);
    unsigned version = type_version(type, type->tp_flags);
    if (version && answer->type == type && answer->version == version) return answer->identity;
    int identity = 0;
    for (int i = 0; !identity && i < ordinals.type_count; i++) identity = PyType_IsSubtype(type, ordinals.types[i]);
    if (version) *answer = (CachedType){type, version, identity};
    return identity;
}

static int is_finalizing(void) {
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
    ordinals.strong -= named->is_strong;
    Py_DECREF(named->reference);
    PyMem_RawFree(named->further_paths);
    PyMem_RawFree(named);
    if (!ordinals.on_death || is_finalizing()) return 0; /* the modules of Python have been taken apart */
    PyObject *on_death = Py_NewRef(ordinals.on_death), *answer = PyObject_CallFunction(on_death, "K", ordinal);
    Py_DECREF(on_death);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

static PyObject *forget(PyObject *address, PyObject *Py_UNUSED(reference)) {
    if (drop_named(PyLong_AsUnsignedLongLong(address))) return NULL;
    Py_RETURN_NONE;
}

/* Drop the objects that nothing but their ordinal holds.  Their types have no weak references, so nobody reports
   their death; the next sweep waits until there are twice as many as survive. */
static int sweep_strong(void) {
    size_t count = 0, room = ordinals.strong;
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
    ordinals.strong_limit = ordinals.strong > FIRST_SWEEP / 2 ? 2 * ordinals.strong : FIRST_SWEEP;
    return failed ? -1 : 0;
}

static PyMethodDef forget_def = {"forget", forget, METH_O, NULL};

/* Ask Python whether an argument lies in a slot of the object that encloses the call; if so, the argument gets the
   ordinal of the first object in that slot.  `adopt(owner, object, ordinal)` returns the ordinal, and whether it is
   final. */
static int query_slot(PyObject *object, Named *named) {
    Thread *thread = thread_state();
    PyObject *owner = thread->top ? thread->top->subject : NULL;
    if (thread->suspensions) return 0;
    if (!ordinals.adopt || !owner) {
        named->slot_queries_left--;
        return 0;
    }
    PyObject *adopt = Py_NewRef(ordinals.adopt);
    thread->suspensions++;
    PyObject *answer = PyObject_CallFunction(adopt, "OOK", owner, object, named->ordinal);
    thread->suspensions--;
    Py_DECREF(adopt);
    unsigned long long ordinal;
    int settled, failed = !answer || !PyArg_ParseTuple(answer, "Kp", &ordinal, &settled);
    Py_XDECREF(answer);
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
        PyErr_Clear(); /* held strongly: else another object at its address would get its ordinal */
        if (ordinals.strong >= ordinals.strong_limit && sweep_strong()) return -1;
        reference = Py_NewRef(object);
    }
    Named *named = map_get(&fast_cache.named, key);
    if (named) { /* code that a collection ran has asked for the ordinal in the meantime */
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
    int slot_queries_left = ordinals.adopt && is_identity_type(Py_TYPE(object)) ? SLOT_QUERIES : 0;
    int is_strong = reference == object;
    ordinals.strong += is_strong;
    *named = (Named){.ordinal = ++ordinals.last, .reference = reference, .is_strong = is_strong, .slot_queries_left = slot_queries_left};
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

/* Mix the ordinal of a leaf that needs a gradient into the way to a place, since another execution of the place may train
   another leaf. */
int mix_leaf(uint64_t *way, const Reader *reader, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    int is_exact = type == fast_cache.leaf_type;
    if (!is_exact && (!fast_cache.leaf_type || !PyType_IsSubtype(type, fast_cache.leaf_type) || is_identity_type(type))) return 0;
    Thread *thread = thread_state();
    Training training = is_exact && reader ? reader_training(reader, value) : ASK_PYTHON;
    if (training == ASK_PYTHON) {
        PyObject *is_leaf = Py_NewRef(ordinals.is_leaf);
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

/* ---- functions ---- */

void ordinals_configure(PyObject *on_death, PyObject *adopt) {
    Py_XSETREF(ordinals.on_death, Py_NewRef(on_death));
    Py_XSETREF(ordinals.adopt, Py_XNewRef(adopt));
}

static PyObject *add_identity_type(PyObject *Py_UNUSED(module), PyObject *type) {
    if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "a type is wanted, not %R", type);
    for (int i = 0; i < ordinals.type_count; i++)
        if (ordinals.types[i] == (PyTypeObject *)type) Py_RETURN_NONE;
    if (ordinals.type_count == TYPE_LIMIT)
        return PyErr_Format(PyExc_ValueError, "no more than %d types can tell ops apart", TYPE_LIMIT);
    ordinals.types[ordinals.type_count++] = (PyTypeObject *)Py_NewRef(type);
    new_epoch();
    Py_RETURN_NONE;
}

static PyObject *set_leaf_type(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *type, *is_leaf;
    if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &type, &is_leaf)) return NULL;
    Py_XSETREF(ordinals.is_leaf, Py_NewRef(is_leaf));
    Py_XSETREF(fast_cache.leaf_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyObject *ordinal(PyObject *Py_UNUSED(module), PyObject *object) {
    uint64_t value;
    return ordinal_of(object, &value) ? NULL : PyLong_FromUnsignedLongLong(value);
}

static PyMethodDef functions[] = {
    {"add_identity_type", add_identity_type, METH_O, "Make the ordinals of arguments of this type enter the ids of ops."},
    {"set_leaf_type", set_leaf_type, METH_VARARGS,
     "set_leaf_type(type, is_leaf): ordinals of arguments of the type for which is_leaf(value) is true enter ids of ops\n"
     "outside of enclosing calls."},
    {"ordinal", ordinal, METH_O, "Return the number of an object in the order of first use."},
    {0}};

int ordinal_boot(PyObject *names) {
    for (PyMethodDef *def = functions; def->ml_name; def++)
        if (add_function(names, def)) return -1;
    return 0;
}

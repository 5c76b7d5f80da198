/* Builtins of every calling convention, and an account of allocations that can be made to fail. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <structmember.h>

/* ---- what every builtin here does ---- */

/* (name, self, arguments, keywords). An exception among the arguments is raised, a callable is
   called: what it gives takes its place. */
static PyObject *echo(const char *name, PyObject *self, PyObject *const *items, Py_ssize_t count,
                      PyObject *names, PyObject *dict) {
    PyObject *args = PyTuple_New(count), *kwargs = dict ? PyDict_Copy(dict) : PyDict_New(), *result = NULL;
    if (!args || !kwargs) goto done;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyExceptionInstance_Check(items[i])) {
            PyErr_SetObject((PyObject *)Py_TYPE(items[i]), items[i]);
            goto done;
        }
        PyObject *item = PyCallable_Check(items[i]) && !PyType_Check(items[i]) ? PyObject_CallNoArgs(items[i])
                                                                                : Py_NewRef(items[i]);
        if (!item) goto done;
        PyTuple_SET_ITEM(args, i, item);
    }
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), items[count + i])) goto done;
    result = Py_BuildValue("sOOO", name, self ? self : Py_None, args, kwargs);
done:
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

static PyObject *noargs(PyObject *self, PyObject *none) {
    return none ? PyErr_Format(PyExc_SystemError, "not NULL") : echo("noargs", self, NULL, 0, NULL, NULL);
}
static PyObject *one(PyObject *self, PyObject *a) { return echo("one", self, &a, 1, NULL, NULL); }
static PyObject *varargs(PyObject *self, PyObject *a) {
    return echo("varargs", self, ((PyTupleObject *)a)->ob_item, PyTuple_GET_SIZE(a), NULL, NULL);
}
static PyObject *keywords(PyObject *self, PyObject *a, PyObject *k) {
    return echo("keywords", self, ((PyTupleObject *)a)->ob_item, PyTuple_GET_SIZE(a), NULL, k);
}
static PyObject *fast(PyObject *self, PyObject *const *a, Py_ssize_t n) {
    return echo("fast", self, a, n, NULL, NULL);
}
static PyObject *fast_keywords(PyObject *self, PyObject *const *a, Py_ssize_t n, PyObject *names) {
    return echo("fast_keywords", self, a, n, names, NULL);
}
static PyObject *parsed(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"x", "y", "only", NULL};
    PyObject *given[] = {NULL, Py_None, Py_None};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O$O:parsed", names, &given[0], &given[1], &given[2]))
        return NULL;
    return echo("parsed", self, given, 3, NULL, NULL);
}
static PyObject *with_class(PyObject *self, PyTypeObject *type, PyObject *const *a, Py_ssize_t n, PyObject *names) {
    return echo(type->tp_name, self, a, n, names, NULL);
}
static PyObject *nothing_said(PyObject *self, PyObject *args) { return (void)self, (void)args, NULL; }
static PyObject *both_said(PyObject *self, PyObject *args) {
    (void)self, (void)args;
    PyErr_SetString(PyExc_ValueError, "left behind");
    return PyLong_FromLong(1);
}
static PyObject *deeper(PyObject *self, PyObject *a) {
    (void)self;
    if (Py_EnterRecursiveCall(" in deeper")) return NULL;
    PyObject *result = PyObject_CallOneArg(a, a);
    Py_LeaveRecursiveCall();
    return result;
}

#define AS(f) (PyCFunction)(void (*)(void))(f)
#define SIX(prefix, flags)                                               \
    {prefix "noargs", AS(noargs), METH_NOARGS | (flags), NULL},          \
    {prefix "one", AS(one), METH_O | (flags), NULL},                     \
    {prefix "varargs", AS(varargs), METH_VARARGS | (flags), NULL},       \
    {prefix "keywords", AS(keywords), METH_VARARGS | METH_KEYWORDS | (flags), NULL}, \
    {prefix "fast", AS(fast), METH_FASTCALL | (flags), NULL},            \
    {prefix "fast_keywords", AS(fast_keywords), METH_FASTCALL | METH_KEYWORDS | (flags), NULL}, \
    {prefix "parsed", AS(parsed), METH_VARARGS | METH_KEYWORDS | (flags), "parsed(x, y=None, *, only=None)"}

/* ---- types: one of each make, and a twin that shares the definitions of the static one ---- */

static PyObject *get_name(PyObject *self, void *closure) { return echo(closure, self, NULL, 0, NULL, NULL); }
static int set_name(PyObject *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (value) return 0;
    PyErr_Format(PyExc_AttributeError, "%s keeps it", Py_TYPE(self)->tp_name);
    return -1;
}
static PyObject *get_error(PyObject *self, void *Py_UNUSED(closure)) {
    return PyErr_Format(PyExc_AttributeError, "%s has none", Py_TYPE(self)->tp_name);
}
static PyObject *subscript(PyObject *self, PyObject *key) { return echo("subscript", self, &key, 1, NULL, NULL); }
static int assign(PyObject *self, PyObject *key, PyObject *value) {
    PyObject *given[] = {key, value}, *said = echo("assign", self, given, value ? 2 : 1, NULL, NULL);
    Py_XDECREF(said);
    return said ? 0 : -1;
}
static Py_ssize_t length(PyObject *self) { return (void)self, 3; }
static PyObject *call(PyObject *self, PyObject *args, PyObject *kwargs) {
    return echo("call", self, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), NULL, kwargs);
}

#define METHODS                                                                                          \
    {SIX("", 0), SIX("class_", METH_CLASS), SIX("static_", METH_STATIC),                                 \
     {"with_class", AS(with_class), METH_METHOD | METH_FASTCALL | METH_KEYWORDS, NULL},                  \
     {"nothing_said", AS(nothing_said), METH_NOARGS, NULL}, {"both_said", AS(both_said), METH_NOARGS, NULL}, \
     {"deeper", AS(deeper), METH_O, NULL}, {0}}
#define GETSET                                                                                           \
    {{"read", get_name, NULL, NULL, "read"}, {"both", get_name, set_name, NULL, "both"},                 \
     {"written", NULL, set_name, NULL, NULL}, {"failing", get_error, NULL, NULL, NULL}, {0}}

static PyMethodDef static_methods[] = METHODS, heap_methods[] = METHODS;
static PyGetSetDef static_getset[] = GETSET, heap_getset[] = GETSET;
static PyMappingMethods static_mapping = {length, subscript, assign}, twin_mapping = {length, subscript, assign};

#define STATIC(name, mapping)                                                       \
    {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "builtin_kinds." name,                \
     .tp_basicsize = sizeof(PyObject), .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, \
     .tp_new = PyType_GenericNew, .tp_methods = static_methods, .tp_getset = static_getset,   \
     .tp_as_mapping = &mapping, .tp_call = call}

static PyTypeObject Static = STATIC("Static", static_mapping), Twin = STATIC("Twin", twin_mapping);

static void heap_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}
static PyType_Slot heap_slots[] = {
    {Py_tp_methods, heap_methods}, {Py_tp_getset, heap_getset}, {Py_mp_length, length}, {Py_mp_subscript, subscript},
    {Py_mp_ass_subscript, assign}, {Py_tp_call, call}, {Py_tp_dealloc, heap_dealloc}, {0}};
static PyType_Spec heap_spec = {"builtin_kinds.Heap", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, heap_slots};

/* Calls what it was made with when its memory goes, as cffi does: when it is a part of a cycle,
   others in that may have been cleared by then. */
typedef struct {
    PyObject_HEAD
    PyObject *last_word;
} Deathbed;

static PyObject *deathbed_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *last_word;
    if (!PyArg_ParseTuple(args, "O", &last_word)) return NULL;
    Deathbed *self = (Deathbed *)type->tp_alloc(type, 0);
    if (self) self->last_word = Py_NewRef(last_word);
    return (PyObject *)self;
}
static int deathbed_traverse(Deathbed *self, visitproc visit, void *arg) {
    Py_VISIT(self->last_word);
    return 0;
}
static void deathbed_dealloc(Deathbed *self) {
    PyObject_GC_UnTrack(self);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *result = PyObject_CallNoArgs(self->last_word);
    if (!result) PyErr_WriteUnraisable(self->last_word);
    Py_XDECREF(result);
    PyErr_Restore(kind, value, trace);
    Py_DECREF(self->last_word);
    Py_TYPE(self)->tp_free(self);
}
static PyTypeObject Deathbed_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "builtin_kinds.Deathbed",
    .tp_basicsize = sizeof(Deathbed),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = deathbed_new,
    .tp_traverse = (traverseproc)deathbed_traverse,
    .tp_dealloc = (destructor)deathbed_dealloc,
};

/* ---- a handler and a describer that run no Python, which is not itself safe without memory ---- */

static PyObject *pass_through(PyObject *Py_UNUSED(self), PyObject *const *a, Py_ssize_t n) {
    if (n != 6) return PyErr_Format(PyExc_TypeError, "six arguments are wanted");
    PyObject *name = PyUnicode_InternFromString("invoke");
    PyObject *result = name ? PyObject_CallMethodObjArgs(a[3], name, a[4], a[5], NULL) : NULL;
    Py_XDECREF(name);
    return result;
}
static PyObject *refuse(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(a), Py_ssize_t Py_UNUSED(n)) {
    PyErr_SetNone(PyExc_ZeroDivisionError);
    return NULL;
}
static PyObject *describe(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(code)) {
    return Py_BuildValue("iiy#", 7, 0, "", (Py_ssize_t)0);
}
static PyObject *hear(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(ordinal)) { Py_RETURN_NONE; }

/* ---- allocations ---- */

static struct Domain {
    PyMemAllocatorDomain name;
    PyMemAllocatorEx under;
} domains[] = {{.name = PYMEM_DOMAIN_RAW}, {.name = PYMEM_DOMAIN_MEM}, {.name = PYMEM_DOMAIN_OBJ}};
static atomic_long live, asked, fail_from, fail_to; /* live: blocks; asked: allocations since the last count */
static int watching;

static int refused(void) {
    long now = atomic_fetch_add(&asked, 1);
    return now >= atomic_load(&fail_from) && now < atomic_load(&fail_to);
}
static void *counted(void *block) {
    if (block) atomic_fetch_add(&live, 1);
    return block;
}
static void *watched_malloc(void *domain, size_t size) {
    PyMemAllocatorEx *under = &((struct Domain *)domain)->under;
    return refused() ? NULL : counted(under->malloc(under->ctx, size));
}
static void *watched_calloc(void *domain, size_t count, size_t size) {
    PyMemAllocatorEx *under = &((struct Domain *)domain)->under;
    return refused() ? NULL : counted(under->calloc(under->ctx, count, size));
}
static void *watched_realloc(void *domain, void *block, size_t size) {
    PyMemAllocatorEx *under = &((struct Domain *)domain)->under;
    if (refused()) return NULL;
    return block ? under->realloc(under->ctx, block, size) : counted(under->realloc(under->ctx, NULL, size));
}
static void watched_free(void *domain, void *block) {
    PyMemAllocatorEx *under = &((struct Domain *)domain)->under;
    if (block) atomic_fetch_sub(&live, 1);
    under->free(under->ctx, block);
}

static PyObject *watch_allocations(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    for (size_t i = 0; !watching && i < sizeof(domains) / sizeof(*domains); i++) {
        PyMem_GetAllocator(domains[i].name, &domains[i].under);
        PyMemAllocatorEx over = {&domains[i], watched_malloc, watched_calloc, watched_realloc, watched_free};
        PyMem_SetAllocator(domains[i].name, &over);
    }
    watching = 1;
    Py_RETURN_NONE;
}
static PyObject *fail_allocations(PyObject *Py_UNUSED(self), PyObject *args) {
    long from, to;
    if (!PyArg_ParseTuple(args, "ll", &from, &to)) return NULL;
    atomic_store(&fail_from, from);
    atomic_store(&fail_to, to);
    atomic_store(&asked, 0);
    Py_RETURN_NONE;
}
static PyObject *stop_failing(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    long so_far = atomic_load(&asked);
    atomic_store(&fail_from, 0);
    atomic_store(&fail_to, 0);
    return PyLong_FromLong(so_far);
}
static PyObject *live_blocks(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) {
    return PyLong_FromLong(atomic_load(&live));
}

static PyMethodDef functions[] = {
    SIX("", 0),
    {"nothing_said", AS(nothing_said), METH_NOARGS, "Fails and does not say how."},
    {"both_said", AS(both_said), METH_NOARGS, "Succeeds and fails."},
    {"deeper", AS(deeper), METH_O, "Calls its argument with itself."},
    {"pass_through", AS(pass_through), METH_FASTCALL, "A handler that makes the call."},
    {"refuse", AS(refuse), METH_FASTCALL, "A handler that raises ZeroDivisionError."},
    {"describe", AS(describe), METH_O, "Describes code, all the same way."},
    {"hear", AS(hear), METH_O, "Hears of deaths."},
    {"watch_allocations", watch_allocations, METH_NOARGS, "Count and control allocations from here on."},
    {"fail_allocations", fail_allocations, METH_VARARGS, "Refuse those numbered first up to last, counted from now."},
    {"stop_failing", stop_failing, METH_NOARGS, "Refuse none; gives the number asked for since."},
    {"live_blocks", live_blocks, METH_NOARGS, "Blocks allocated and not freed, from an arbitrary zero."},
    {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "builtin_kinds", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_builtin_kinds(void) {
    PyObject *module = PyModule_Create(&definition), *heap = PyType_FromSpec(&heap_spec);
    if (!module || !heap || PyModule_AddObject(module, "Heap", heap) || PyModule_AddType(module, &Static) ||
        PyModule_AddType(module, &Twin) || PyModule_AddType(module, &Deathbed_Type))
        return NULL;
    return module;
}

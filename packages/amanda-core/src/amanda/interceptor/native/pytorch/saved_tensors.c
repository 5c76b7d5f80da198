/* Tensors that backward ops have saved, read by the names of the attributes of these ops. */
#include "execution/saved.h"
#include "interception/table.h"
#include "pytorch/autograd.h"

struct SavedTensorReader {
    PyObject_HEAD
    PyObject *maker, *next, *number;  /* owned; names */
    PyObject *attributes, *is_packed; /* owned; functions */
    Map attributes_by_type;           /* static type of an op -> what `attributes` has returned for it, owned */
};

/* ---- ops ---- */

/* Put an op, which is taken over, on the stack of those to be searched; -1: an exception. */
static int push_op(BackwardOps *ops, PyObject *op) {
    if (!op) return -1;
    if (op == Py_None) {
        Py_DECREF(op);
        return 0;
    }
    if (ops->count == ops->room) {
        size_t room = ops->room ? ops->room * 2 : 8;
        PyObject **grown = PyMem_Realloc(ops->ops, room * sizeof *grown);
        if (!grown) {
            Py_DECREF(op);
            PyErr_NoMemory();
            return -1;
        }
        ops->ops = grown;
        ops->room = room;
    }
    ops->ops[ops->count++] = op;
    return 0;
}

int add_maker(const SavedTensorReader *self, PyObject *tensor, BackwardOps *ops) {
    disturb();
    return push_op(ops, PyObject_GetAttr(tensor, self->maker));
}

/* Whether an op has a number in a range: ops before it belong to other executions.  -1: an exception. */
static int is_between(const SavedTensorReader *self, PyObject *op, uint64_t first, uint64_t end) {
    PyObject *answer = PyObject_CallMethodNoArgs(op, self->number);
    uint64_t number = answer ? PyLong_AsUnsignedLongLong(answer) : 0;
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : first <= number && number < end;
}

/* The names of the attributes of an op's type that read what it has saved; new; NULL: an exception. */
static PyObject *attributes_of(SavedTensorReader *self, PyTypeObject *type) {
    PyObject *names = map_get(&self->attributes_by_type, (uint64_t)(uintptr_t)type);
    if (names) return Py_NewRef(names);
    names = PyObject_CallOneArg(self->attributes, (PyObject *)type);
    if (names && !PyList_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "the attributes of an op are no list");
        Py_CLEAR(names);
    }
    /* Types on the heap, which a program has made, may end, and another one have the address. */
    if (!names || PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) return names;
    PyObject *earlier = map_get(&self->attributes_by_type, (uint64_t)(uintptr_t)type); /* the function may run Python */
    if (!earlier && !map_set(&self->attributes_by_type, (uint64_t)(uintptr_t)type, names)) Py_INCREF(names);
    return names;
}

static int visit_attributes(PyObject *names, PyObject *op, SavedVisitor visit, void *context) {
    int result = 0;
    for (Py_ssize_t i = 0; !result && i < PyList_GET_SIZE(names); i++) {
        PyObject *value = PyObject_GetAttr(op, PyList_GET_ITEM(names, i));
        if (value) result = visit(value, context);
        else if (PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear(); /* freed, or written into since */
        else result = -1;
        Py_XDECREF(value);
    }
    return result;
}

static int push_next(const SavedTensorReader *self, BackwardOps *ops, PyObject *op) {
    PyObject *next = PyObject_GetAttr(op, self->next);
    int failed = !next || !PyTuple_Check(next);
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(next); i++) {
        PyObject *pair = PyTuple_GET_ITEM(next, i);
        if (PyTuple_Check(pair) && PyTuple_GET_SIZE(pair)) failed = push_op(ops, Py_NewRef(PyTuple_GET_ITEM(pair, 0)));
    }
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the next of an op are not a tuple of pairs");
    Py_XDECREF(next);
    return failed;
}

#define NOT_ASKED (-2)

/* Whether hooks pack what ops save now: to read it would run them.  -1: an exception. */
static int is_packed(const SavedTensorReader *self) {
    PyObject *answer = PyObject_CallNoArgs(self->is_packed);
    int packed = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return packed;
}

static int add_visited(Map *visited, PyObject *op) { /* -1: an exception */
    if (!map_set(visited, (uint64_t)(uintptr_t)op, op)) {
        Py_INCREF(op);
        return 0;
    }
    PyErr_NoMemory();
    return -1;
}

int visit_saved(SavedTensorReader *self, BackwardOps *ops, uint64_t first, uint64_t end, SavedVisitor visit, void *context) {
    Map visited = {0}; /* op -> the op, owned */
    int packed = NOT_ASKED, result = 0;
    uint64_t unmet = first < end ? end - first : 0; /* numbers of the range: once all are met there is no further op */
    while (!result && unmet && ops->count) {
        PyObject *op = ops->ops[--ops->count];
        int is_due = map_get(&visited, (uint64_t)(uintptr_t)op) ? 0 : is_between(self, op, first, end);
        PyObject *names = is_due > 0 ? attributes_of(self, Py_TYPE(op)) : NULL;
        if (is_due && !names) result = -1;
        if (names && PyList_GET_SIZE(names)) {
            if (packed == NOT_ASKED) packed = is_packed(self);
            result = packed ? packed : visit_attributes(names, op, visit, context);
        }
        if (names && !result && --unmet && (add_visited(&visited, op) || push_next(self, ops, op))) result = -1;
        Py_XDECREF(names);
        Py_DECREF(op);
    }
    for (size_t i = 0; i < visited.size; i++) Py_XDECREF((PyObject *)visited.cells[i].value);
    map_clear(&visited);
    while (ops->count) Py_DECREF(ops->ops[--ops->count]);
    PyMem_Free(ops->ops);
    *ops = (BackwardOps){0};
    return packed > 0 ? 0 : result;
}

/* ---- for Python ---- */

static PyObject *saved_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"maker", "next", "number", "attributes", "is_packed", NULL};
    PyObject *maker, *next, *number, *attributes, *packed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UUUOO", names, &maker, &next, &number, &attributes, &packed)) return NULL;
    SavedTensorReader *self = (SavedTensorReader *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->maker = Py_NewRef(maker);
    self->next = Py_NewRef(next);
    self->number = Py_NewRef(number);
    self->attributes = Py_NewRef(attributes);
    self->is_packed = Py_NewRef(packed);
    return (PyObject *)self;
}

static int saved_traverse(SavedTensorReader *self, visitproc visit, void *arg) {
    Py_VISIT(self->attributes);
    Py_VISIT(self->is_packed);
    return 0;
}

static void saved_dealloc(SavedTensorReader *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->maker);
    Py_CLEAR(self->next);
    Py_CLEAR(self->number);
    Py_CLEAR(self->attributes);
    Py_CLEAR(self->is_packed);
    for (size_t i = 0; i < self->attributes_by_type.size; i++) Py_XDECREF((PyObject *)self->attributes_by_type.cells[i].value);
    map_clear(&self->attributes_by_type);
    Py_TYPE(self)->tp_free(self);
}

static int append_value(PyObject *value, void *list) { return PyList_Append(list, value); }

static PyObject *saved_between(SavedTensorReader *self, PyObject *args) {
    PyObject *tensors;
    unsigned long long first, end;
    if (!PyArg_ParseTuple(args, "O!KK", &PyList_Type, &tensors, &first, &end)) return NULL;
    PyObject *values = PyList_New(0);
    BackwardOps ops = {0};
    int failed = !values;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = Py_NewRef(PyList_GET_ITEM(tensors, i));
        failed = add_maker(self, tensor, &ops);
        Py_DECREF(tensor);
    }
    if (visit_saved(self, &ops, first, failed ? first : end, append_value, values) || failed) Py_CLEAR(values);
    return values;
}

static PyObject *saved_reduce(SavedTensorReader *self, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O(OOOOO)", Py_TYPE(self), self->maker, self->next, self->number, self->attributes, self->is_packed);
}

static PyMethodDef saved_methods[] = {
    {"__reduce__", (PyCFunction)saved_reduce, METH_NOARGS, "Copy the names and functions."},
    {"between", (PyCFunction)saved_between, METH_VARARGS,
     "between(tensors, first, end): return what the ops that made the tensors of a list have saved, and those behind these:\n"
     "those with numbers from first to before end.  Empty where hooks pack saved tensors."},
    {0}};

PyTypeObject SavedTensorReader_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.SavedTensorReader",
    .tp_basicsize = sizeof(SavedTensorReader),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "SavedTensorReader(maker, next, number, attributes, is_packed): reads what backward ops have saved.\n\n"
              "maker: attribute of a tensor: the op that made it, None for a leaf.\n"
              "next, number: attributes of an op: a tuple of pairs, of a following op or None and more; a method whose result\n"
              "grows with each op that is made on a thread.\n"
              "attributes(type): return a list of the names of an op's attributes that read what it has saved.\n"
              "is_packed(): return what is true if hooks pack what ops save now, which is then not read.",
    .tp_new = saved_new,
    .tp_dealloc = (destructor)saved_dealloc,
    .tp_traverse = (traverseproc)saved_traverse,
    .tp_methods = saved_methods,
};

int saved_boot(PyObject *names) { return add_type(names, "SavedTensorReader", &SavedTensorReader_Type); }

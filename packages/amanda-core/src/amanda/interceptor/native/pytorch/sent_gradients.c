/* Gradients that recorded backward ops have sent to the next ones, by pass, op and position. */
#include "execution/gradients.h"
#include "interception/table.h"
#include "pytorch/autograd.h"
#include <string.h>

#define PASS_LIMIT 16 /* a pass that fails never takes what was sent to its ops */

/* Indices of the summands of one gradient. */
typedef struct {
    int count;
    int64_t indices[];
} Summands;

/* Nested and parallel passes run through ops of the same numbers. */
typedef struct {
    long long id;
    Map summands; /* key of op and position -> an index, doubled, plus 1; or Summands */
} Pass;

struct SentGradients {
    PyObject_HEAD
    PyObject *current_op, *current_pass; /* owned; functions */
    PyTypeObject *leaf;                  /* owned; type of the ops that accumulate the gradient of a leaf */
    int count;                           /* of passes, the newest last */
    Pass passes[PASS_LIMIT + 1];
};

/* ---- summands ---- */

static Summands *many(void *value) { return (uintptr_t)value & 1 ? NULL : value; }

static void release_pass(Pass *pass) {
    for (size_t i = 0; i < pass->summands.size; i++) PyMem_Free(many(pass->summands.cells[i].value));
    map_clear(&pass->summands);
}

static Pass *pass_of(SentGradients *self, long long id) {
    for (int i = self->count - 1; i >= 0; i--)
        if (self->passes[i].id == id) return &self->passes[i];
    return NULL;
}

static Pass *begin_pass(SentGradients *self, long long id) {
    self->passes[self->count++] = (Pass){.id = id};
    if (self->count > PASS_LIMIT) {
        release_pass(&self->passes[0]);
        memmove(self->passes, self->passes + 1, (size_t)--self->count * sizeof *self->passes);
    }
    return &self->passes[self->count - 1];
}

static uint64_t gradient_key(uint64_t op, uint64_t position) {
    uint64_t key = mix(op, position + 1);
    return key ? key : 1;
}

static int add_summand(Pass *pass, uint64_t key, int64_t index) {
    void *value = map_get(&pass->summands, key);
    if (!value) return map_set(&pass->summands, key, (void *)(uintptr_t)((uint64_t)index << 1 | 1));
    if (map_reserve(&pass->summands, 1)) return -1; /* so that nothing fails once the summands have moved */
    Summands *summands = many(value);
    int count = summands ? summands->count : 1;
    Summands *grown = PyMem_Realloc(summands, sizeof(Summands) + (size_t)(count + 1) * sizeof(int64_t));
    if (!grown) return -1;
    if (!summands) grown->indices[0] = (int64_t)((uintptr_t)value >> 1);
    grown->indices[count] = index;
    grown->count = count + 1;
    return map_set(&pass->summands, key, grown);
}

static PyObject *summands_as_tuple(void *value) {
    const Summands *summands = many(value);
    int count = !value ? 0 : summands ? summands->count : 1;
    /* A copy: to make the tuple may run Python, which may end the pass. */
    int64_t *indices = PyMem_Malloc((size_t)(count + 1) * sizeof *indices);
    if (!indices) return PyErr_NoMemory();
    for (int i = 0; i < count; i++) indices[i] = summands ? summands->indices[i] : (int64_t)((uintptr_t)value >> 1);
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *index = PyLong_FromLongLong(indices[i]);
        if (index) PyTuple_SET_ITEM(tuple, i, index);
        else Py_CLEAR(tuple);
    }
    PyMem_Free(indices);
    return tuple;
}

/* ---- backward ops ---- */

/* A key of an op in its pass: the ops of leaves have no number, and are told apart by their variable. */
static int read_op(const SentGradients *self, PyObject *op, int *is_leaf, uint64_t *number, uint64_t *key) {
    *is_leaf = Py_TYPE(op) == self->leaf;
    if (*is_leaf) {
        PyObject *variable = PyObject_GetAttrString(op, "variable");
        *key = mix(0, (uint64_t)(uintptr_t)variable);
        Py_XDECREF(variable); /* the op keeps it */
        return variable ? 0 : -1;
    }
    PyObject *answer = PyObject_CallMethod(op, "_sequence_nr", NULL);
    if (!answer) return -1;
    *number = PyLong_AsUnsignedLongLong(answer);
    Py_DECREF(answer);
    *key = mix((uint64_t)(uintptr_t)Py_TYPE(op), *number);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int find_unsuspended(SentGradients *self, BackwardOp *found) {
    *found = (BackwardOp){0};
    disturb();
    PyObject *op = PyObject_CallNoArgs(self->current_op);
    if (!op || op == Py_None) {
        Py_XDECREF(op);
        return op ? 0 : -1;
    }
    PyObject *pass = PyObject_CallNoArgs(self->current_pass);
    found->pass = pass ? PyLong_AsLongLong(pass) : -1;
    Py_XDECREF(pass);
    if ((found->pass == -1 && PyErr_Occurred()) || read_op(self, op, &found->is_leaf, &found->number, &found->key)) {
        Py_DECREF(op);
        return -1;
    }
    found->op = op;
    found->has_number = !found->is_leaf;
    return 0;
}

int find_backward_op(SentGradients *self, Thread *thread, BackwardOp *found) {
    thread->suspensions++;
    int failed = find_unsuspended(self, found);
    thread->suspensions--;
    return failed;
}

int read_backward_op(SentGradients *self, Thread *thread, PyObject *op, BackwardOp *found) {
    *found = (BackwardOp){0};
    thread->suspensions++;
    int failed = read_op(self, op, &found->is_leaf, &found->number, &found->key);
    thread->suspensions--;
    if (failed) return -1;
    found->op = Py_NewRef(op);
    found->has_number = !found->is_leaf;
    return 0;
}

void drop_gradients(SentGradients *self, const BackwardOp *op, Py_ssize_t count) {
    Pass *pass = op->op ? pass_of(self, op->pass) : NULL;
    for (Py_ssize_t i = 0; pass && i < count; i++)
        PyMem_Free(many(map_remove(&pass->summands, gradient_key(op->key, (uint64_t)i))));
}

/* Send one gradient to the op of an edge, a pair of op and position; -1: an exception. */
static int send_along(SentGradients *self, long long pass_id, PyObject *edge, int64_t index) {
    PyObject *op = PyTuple_Check(edge) && PyTuple_GET_SIZE(edge) == 2 ? PyTuple_GET_ITEM(edge, 0) : Py_None;
    if (op == Py_None) return 0;
    int is_leaf;
    uint64_t number, key, position = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(edge, 1));
    if (PyErr_Occurred() || read_op(self, op, &is_leaf, &number, &key)) return -1;
    disturb();
    Pass *pass = pass_of(self, pass_id); /* looked up again, since Python has run */
    if (!pass) pass = begin_pass(self, pass_id);
    if (!add_summand(pass, gradient_key(key, position), index)) return 0;
    PyErr_NoMemory();
    return -1;
}

static PyObject *leaf_gradient(PyObject *op) {
    PyObject *variable = PyObject_GetAttrString(op, "variable");
    PyObject *gradient = variable ? PyObject_GetAttrString(variable, "grad") : NULL;
    Py_XDECREF(variable);
    return gradient;
}

static PyObject *send_unsuspended(SentGradients *self, const BackwardOp *op, PyObject *given) {
    if (!op->op) Py_RETURN_NONE;
    PyObject *indices = PySequence_Tuple(given); /* a list may change, as Python runs below */
    if (!indices) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(indices), sent = 0;
    while (sent < count && !PyLong_Check(PyTuple_GET_ITEM(indices, sent))) sent++;
    PyObject *edges = sent < count && !op->is_leaf ? PyObject_GetAttrString(op->op, "next_functions") : PyTuple_New(0);
    int failed = !edges || !PyTuple_Check(edges);
    for (Py_ssize_t i = sent; !failed && i < count && i < PyTuple_GET_SIZE(edges); i++) {
        PyObject *index = PyTuple_GET_ITEM(indices, i);
        long long number = PyLong_Check(index) ? PyLong_AsLongLong(index) : 0;
        failed = PyErr_Occurred() != NULL;
        if (!failed && PyLong_Check(index)) failed = send_along(self, op->pass, PyTuple_GET_ITEM(edges, i), number);
    }
    Py_XDECREF(edges);
    Py_DECREF(indices);
    if (failed) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "the next of an op are not a tuple of pairs");
    return op->is_leaf ? leaf_gradient(op->op) : Py_NewRef(Py_None);
}

PyObject *send_gradients(SentGradients *self, Thread *thread, const BackwardOp *op, PyObject *indices) {
    thread->suspensions++;
    PyObject *gradient = send_unsuspended(self, op, indices);
    thread->suspensions--;
    return gradient;
}

/* ---- for Python ---- */

static PyObject *sent_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *current_op, *current_pass, *leaf;
    if (!PyArg_ParseTuple(args, "OOO!", &current_op, &current_pass, &PyType_Type, &leaf)) return NULL;
    SentGradients *self = (SentGradients *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->current_op = Py_NewRef(current_op);
    self->current_pass = Py_NewRef(current_pass);
    self->leaf = (PyTypeObject *)Py_NewRef(leaf);
    return (PyObject *)self;
}

static int sent_traverse(SentGradients *self, visitproc visit, void *arg) {
    Py_VISIT(self->current_op);
    Py_VISIT(self->current_pass);
    Py_VISIT(self->leaf);
    return 0;
}

static void sent_dealloc(SentGradients *self) {
    PyObject_GC_UnTrack(self);
    while (self->count) release_pass(&self->passes[--self->count]);
    Py_CLEAR(self->current_op);
    Py_CLEAR(self->current_pass);
    Py_CLEAR(self->leaf);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *sent_receive(SentGradients *self, PyObject *args) {
    Py_ssize_t count;
    int take;
    BackwardOp op;
    if (!PyArg_ParseTuple(args, "np", &count, &take) || find_backward_op(self, thread_state(), &op)) return NULL;
    PyObject *list = PyList_New(count), *number = NULL;
    for (Py_ssize_t i = 0; list && i < count; i++) {
        const Pass *pass = op.op ? pass_of(self, op.pass) : NULL;
        PyObject *tuple = summands_as_tuple(pass ? map_get(&pass->summands, gradient_key(op.key, (uint64_t)i)) : NULL);
        if (tuple) PyList_SET_ITEM(list, i, tuple);
        else Py_CLEAR(list);
    }
    if (list) number = op.has_number ? PyLong_FromUnsignedLongLong(op.number) : Py_NewRef(Py_None);
    if (number && take) drop_gradients(self, &op, count);
    Py_XDECREF(op.op);
    if (number) return Py_BuildValue("NN", number, list);
    Py_XDECREF(list);
    return NULL;
}

static PyObject *sent_send(SentGradients *self, PyObject *indices) {
    BackwardOp op;
    if (!PyList_Check(indices) && !PyTuple_Check(indices))
        return PyErr_Format(PyExc_TypeError, "indices are a list, not %R", indices);
    if (find_backward_op(self, thread_state(), &op)) return NULL;
    PyObject *gradient = send_gradients(self, thread_state(), &op, indices);
    Py_XDECREF(op.op);
    return gradient;
}

static PyObject *sent_reduce(SentGradients *self, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O(OOO)", Py_TYPE(self), self->current_op, self->current_pass, self->leaf);
}

static PyMethodDef sent_methods[] = {
    {"__reduce__", (PyCFunction)sent_reduce, METH_NOARGS, "A copy has no gradients."},
    {"receive", (PyCFunction)sent_receive, METH_VARARGS,
     "receive(count, take): return the number of the present backward op, None for that of a leaf, and for each of its\n"
     "gradients a tuple of the indices that were sent.  take: drop them."},
    {"send", (PyCFunction)sent_send, METH_O,
     "send(indices): send the indices of the gradients that leave the present backward op to the next ones; return the\n"
     "gradient of a leaf, else None.  An index is an int; any other object stands for none."},
    {0}};

PyTypeObject SentGradients_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.SentGradients",
    .tp_basicsize = sizeof(SentGradients),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "SentGradients(current_op, current_pass, leaf): indices of the gradients between the backward ops of a pass.\n\n"
              "current_op, current_pass: functions that return the backward op that runs, or None, and the number of its pass.\n"
              "leaf: type of the ops that accumulate the gradient of a leaf.",
    .tp_new = sent_new,
    .tp_dealloc = (destructor)sent_dealloc,
    .tp_traverse = (traverseproc)sent_traverse,
    .tp_methods = sent_methods,
};

int sent_boot(PyObject *names) { return add_type(names, "SentGradients", &SentGradients_Type); }

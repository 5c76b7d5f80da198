/* Recorded executions of an op, and those under way. */
#include "execution/records.h"
#include "execution/observer.h"
#include <string.h>
#include <structmember.h>

#define OPEN_LIMIT 256  /* executions under way, and some that raised */
#define RANGE_LIMIT 256 /* executions whose backward pass is still to come */
#define SPARE_LIMIT 64  /* leaves of an execution, the memory of which is kept */

static PyTypeObject Record_Type;

/* ---- leaves ---- */

Leaves take_spare(Records *self) {
    Leaves leaves = self->spare;
    self->spare = (Leaves){NULL, 0, 0};
    return leaves;
}

void release_leaf_values(Leaves *leaves) {
    for (int i = 0; i < leaves->count; i++) Py_CLEAR(leaves->items[i].value);
}

void release_leaves(Records *self, Leaves *leaves) {
    int count = leaves->count;
    release_leaf_values(leaves);
    for (int i = 0; i < count; i++) Py_CLEAR(leaves->items[i].reference);
    leaves->count = 0;
    if (!self->spare.items && leaves->room <= SPARE_LIMIT) self->spare = *leaves;
    else PyMem_Free(leaves->items);
    *leaves = (Leaves){NULL, 0, 0};
}

/* ---- executions under way ---- */

void release_open(Records *self, Open *open) {
    Open closed = *open; /* what is released may run Python, which may begin others */
    Py_XDECREF(closed.execution);
    Py_XDECREF(closed.record);
    release_leaves(self, &closed.leaves);
}

/* Put an execution, which is taken over, on the stack of those under way; -1: no memory. */
int push_open(Records *self, Open open) {
    if (self->open_count == OPEN_LIMIT) { /* an op that raises never ends */
        Open oldest = self->open[0];
        memmove(self->open, self->open + 1, (size_t)--self->open_count * sizeof *self->open);
        release_open(self, &oldest);
    }
    if (self->open_count >= self->open_room) {
        int room = self->open_room ? self->open_room * 2 : 2;
        Open *grown = PyMem_Realloc(self->open, (size_t)room * sizeof *grown);
        if (!grown) {
            release_open(self, &open);
            return -1;
        }
        self->open = grown;
        self->open_room = room;
    }
    self->open[self->open_count++] = open;
    return 0;
}

/* Position of the innermost execution of a thread; -1: it has none. */
int innermost(const Records *self, const Thread *thread) {
    int i = self->open_count - 1;
    while (i >= 0 && self->open[i].thread != thread) i--;
    return i;
}

Open pop_open(Records *self, int i) {
    Open open = self->open[i];
    memmove(self->open + i, self->open + i + 1, (size_t)(--self->open_count - i) * sizeof *self->open);
    return open;
}

int add_range(Records *self, uint64_t first, uint64_t end, long long index) {
    if (!self->ranges) self->ranges = PyMem_Calloc(RANGE_LIMIT, sizeof *self->ranges);
    if (!self->ranges) return -1;
    self->ranges[(self->first_range + self->range_count) % RANGE_LIMIT] = (NodeRange){first, end, index};
    if (self->range_count < RANGE_LIMIT) self->range_count++;
    else self->first_range = (self->first_range + 1) % RANGE_LIMIT;
    return 0;
}

/* The execution that made a backward op; NULL: none of the last did. */
const NodeRange *range_of_node(const Records *self, uint64_t number) {
    for (int i = self->range_count - 1; i >= 0; i--) { /* the latest first: an op that ran again has newer nodes */
        const NodeRange *range = &self->ranges[(self->first_range + i) % RANGE_LIMIT];
        if (range->first <= number && number < range->end) return range;
    }
    return NULL;
}

/* ---- for Python: records ---- */

static PyObject *record_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"index", "inputs", "input_roots", "outputs", "output_roots", "written", "forward", NULL};
    Record fields = {.forward = -1};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LO!O!O!O!O!|L", names, &fields.index, &PyTuple_Type, &fields.inputs,
                                     &PyTuple_Type, &fields.input_roots, &PyTuple_Type, &fields.outputs, &PyTuple_Type,
                                     &fields.output_roots, &PyTuple_Type, &fields.written, &fields.forward))
        return NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields.written); i++) {
        PyObject *item = PyTuple_GET_ITEM(fields.written, i);
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3)
            return PyErr_Format(PyExc_TypeError, "written: position, index and root, not %R", item);
    }
    if (PyTuple_GET_SIZE(fields.inputs) != PyTuple_GET_SIZE(fields.input_roots) ||
        PyTuple_GET_SIZE(fields.outputs) != PyTuple_GET_SIZE(fields.output_roots))
        return PyErr_Format(PyExc_ValueError, "inputs and outputs have a root each");
    Record *self = (Record *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->roots = PyMem_Calloc((size_t)PyTuple_GET_SIZE(fields.input_roots) + 1, sizeof *self->roots);
    for (Py_ssize_t i = 0; self->roots && i < PyTuple_GET_SIZE(fields.input_roots); i++)
        self->roots[i] = recorded_root(PyTuple_GET_ITEM(fields.input_roots, i));
    self->index = fields.index;
    self->forward = fields.forward;
    self->inputs = Py_NewRef(fields.inputs);
    self->input_roots = Py_NewRef(fields.input_roots);
    self->outputs = Py_NewRef(fields.outputs);
    self->output_roots = Py_NewRef(fields.output_roots);
    self->written = Py_NewRef(fields.written);
    if (!self->roots) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void record_dealloc(Record *self) {
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->input_roots);
    Py_CLEAR(self->outputs);
    Py_CLEAR(self->output_roots);
    Py_CLEAR(self->written);
    PyMem_Free(self->roots);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *record_reduce(Record *self, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O(LOOOOOL)", Py_TYPE(self), self->index, self->inputs, self->input_roots, self->outputs,
                         self->output_roots, self->written, self->forward);
}

static PyMethodDef record_methods[] = {
    {"__reduce__", (PyCFunction)record_reduce, METH_NOARGS, "A copy has counted no executions."}, {0}};

static PyMemberDef record_members[] = {
    {"index", T_LONGLONG, offsetof(Record, index), READONLY, "Index of the execution."},
    {"calls", T_LONGLONG, offsetof(Record, calls), READONLY, "Number of executions that native code has counted."},
    {"recomputations", T_LONGLONG, offsetof(Record, recomputations), READONLY, "Number of recomputations among further ones."},
    {0}};

static PyTypeObject Record_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.ExecutionRecord",
    .tp_basicsize = sizeof(Record),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "ExecutionRecord(index, inputs, input_roots, outputs, output_roots, written, forward=-1): a recorded execution.\n\n"
              "For each input and output the index of the tensor, None for another value, a tuple for a list; the roots, by\n"
              "which executions are told apart, likewise.  written: flat position, index and root of inputs after the op, or\n"
              "of the gradient of a leaf.  forward: of a backward op, index of the execution whose backward op it is.",
    .tp_new = record_new,
    .tp_dealloc = (destructor)record_dealloc,
    .tp_methods = record_methods,
    .tp_members = record_members,
};

/* ---- for Python: the records of an op ---- */

static PyObject *records_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"live", "ops", "written", "forward", NULL};
    PyObject *live, *ops, *written, *forward = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!|O", names, &LiveTensors_Type, &live, &PyList_Type, &ops, &PyTuple_Type,
                                     &written, &forward))
        return NULL;
    if (forward != Py_None && !Py_IS_TYPE(forward, &Records_Type))
        return PyErr_Format(PyExc_TypeError, "forward: ExecutionRecords or None, not %R", forward);
    Records *self = (Records *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->live = (LiveTensors *)Py_NewRef(live);
    self->ops = Py_NewRef(ops);
    self->written = Py_NewRef(written);
    self->forward = forward == Py_None ? NULL : (Records *)Py_NewRef(forward);
    return (PyObject *)self;
}

static int records_traverse(Records *self, visitproc visit, void *arg) {
    Py_VISIT(self->live);
    Py_VISIT(self->ops);
    Py_VISIT(self->forward);
    for (int i = 0; i < self->open_count; i++) Py_VISIT(self->open[i].execution);
    return 0;
}

static void records_dealloc(Records *self) {
    PyObject_GC_UnTrack(self);
    while (self->open_count) {
        Open open = pop_open(self, self->open_count - 1);
        release_open(self, &open);
    }
    for (int i = 0; i < self->count; i++) Py_DECREF(self->records[i]);
    PyMem_Free(self->records);
    PyMem_Free(self->open);
    PyMem_Free(self->ranges);
    PyMem_Free(self->spare.items);
    Py_CLEAR(self->live);
    Py_CLEAR(self->ops);
    Py_CLEAR(self->written);
    Py_CLEAR(self->forward);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *records_add(Records *self, PyObject *record) {
    if (!Py_IS_TYPE(record, &Record_Type)) return PyErr_Format(PyExc_TypeError, "an ExecutionRecord is added, not %R", record);
    if (self->count == self->room) {
        int room = self->room ? self->room * 2 : 1;
        Record **grown = PyMem_Realloc(self->records, (size_t)room * sizeof *grown);
        if (!grown) return PyErr_NoMemory();
        self->records = grown;
        self->room = room;
    }
    self->records[self->count++] = (Record *)Py_NewRef(record);
    Py_RETURN_NONE;
}

static PyObject *records_begin(Records *self, PyObject *execution) {
    if (push_open(self, (Open){.thread = thread_state(), .execution = Py_NewRef(execution)})) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *states_of(const Open *open) {
    PyObject *states = PyList_New(open->leaves.count);
    for (int i = 0; states && i < open->leaves.count; i++) {
        const Leaf *leaf = &open->leaves.items[i];
        PyObject *version = leaf->version == UNVERSIONED ? Py_NewRef(Py_None) : PyLong_FromUnsignedLongLong(leaf->version);
        PyObject *state = version ? Py_NewRef(Py_None) : NULL;
        if (state && leaf->reference) Py_SETREF(state, Py_BuildValue("OLO", leaf->reference, (long long)leaf->index, version));
        Py_XDECREF(version);
        if (state) PyList_SET_ITEM(states, i, state);
        else Py_CLEAR(states);
    }
    return states;
}

static PyObject *records_end(Records *self, PyObject *Py_UNUSED(none)) {
    int position = innermost(self, thread_state());
    if (position < 0) Py_RETURN_NONE;
    Open open = pop_open(self, position);
    PyObject *execution = Py_XNewRef(open.execution);
    if (!execution)
        execution = Py_BuildValue("LNLK", open.record->index, states_of(&open), (long long)open.serial,
                                  (unsigned long long)open.number);
    release_open(self, &open);
    return execution;
}

static PyObject *records_current(Records *self, PyObject *Py_UNUSED(none)) {
    int position = innermost(self, thread_state());
    if (position < 0) Py_RETURN_NONE;
    const Open *open = &self->open[position];
    return open->execution ? Py_NewRef(open->execution) : PyLong_FromLongLong(open->record->index);
}

static PyObject *records_add_nodes(Records *self, PyObject *args) {
    unsigned long long first, end;
    long long index;
    if (!PyArg_ParseTuple(args, "KKL", &first, &end, &index)) return NULL;
    if (add_range(self, first, end, index)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *records_op_of_node(Records *self, PyObject *number) {
    uint64_t node = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) return NULL;
    const NodeRange *range = range_of_node(self, node);
    if (!range) Py_RETURN_NONE;
    return PyLong_FromLongLong(range->index);
}

static PyObject *records_reduce(Records *self, PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("O(OOOO)", Py_TYPE(self), self->live, self->ops, self->written,
                         self->forward ? (PyObject *)self->forward : Py_None);
}

static PyMethodDef records_methods[] = {
    {"__reduce__", (PyCFunction)records_reduce, METH_NOARGS, "A copy has no records."},
    {"add", (PyCFunction)records_add, METH_O, "add(record): add an ExecutionRecord, whose index is in `ops`."},
    {"begin", (PyCFunction)records_begin, METH_O, "begin(execution): begin an execution in this thread."},
    {"current", (PyCFunction)records_current, METH_NOARGS,
     "Return the innermost execution of this thread, or None; for one that native code has begun the index of the record."},
    {"end", (PyCFunction)records_end, METH_NOARGS,
     "Remove the innermost execution of this thread, and return it; None without one.\n\n"
     "For one that native code has begun: index of the record; for each flat input a reference, index and version of the\n"
     "tensor, or None; serial number of the last write; number of the next backward op; all before the op."},
    {"add_nodes", (PyCFunction)records_add_nodes, METH_VARARGS,
     "add_nodes(first, end, index): note the numbers of the backward ops that an execution has made, from first to before end."},
    {"op_of_node", (PyCFunction)records_op_of_node, METH_O,
     "op_of_node(number): return the index of the execution that made a backward op; None if none of the last 256 did."},
    {0}};

static PyMemberDef records_members[] = {
    {"accepts_any", T_BOOL, offsetof(Records, accepts_any), 0,
     "Whether an execution that fits no record counts as one more of the last; false at first."},
    {"live", T_OBJECT, offsetof(Records, live), READONLY, "The live tensors."},
    {0}};

PyTypeObject Records_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.ExecutionRecords",
    .tp_basicsize = sizeof(Records),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "ExecutionRecords(live, ops, written, forward=None): the recorded executions of an op, and those under way.\n\n"
              "ops: list of the indices of the recorded executions; native code serves the op while it has a record of each.\n"
              "written: flat positions of the inputs that the op writes without a new version.  forward: the records of the\n"
              "forward op of a backward op.",
    .tp_new = records_new,
    .tp_dealloc = (destructor)records_dealloc,
    .tp_traverse = (traverseproc)records_traverse,
    .tp_methods = records_methods,
    .tp_members = records_members,
};

int records_boot(PyObject *names) {
    return live_boot(names) || add_type(names, "ExecutionRecord", &Record_Type) ||
                   add_type(names, "ExecutionRecords", &Records_Type) || repeats_boot(names)
               ? -1
               : 0;
}

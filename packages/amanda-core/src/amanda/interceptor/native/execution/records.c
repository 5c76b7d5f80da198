/* Observers of dataflow that need no call where an execution repeats one that a tool has recorded. */
#include "execution/gradients.h"
#include "execution/live_tensors.h"
#include "execution/observer.h"
#include <string.h>
#include <structmember.h>

#define OPEN_LIMIT 256  /* executions under way, and some that raised */
#define RANGE_LIMIT 256 /* executions whose backward pass is still to come */
#define VALUE_LIMIT 32  /* inputs; programs have no more */
#define DEPTH_LIMIT 8   /* of lists among the values */
#define SPARE_LIMIT 64  /* leaves of an execution, the memory of which is kept */

/* One recorded execution.  Roots and positions are trees of tuples, as deep as the values: an index, or None for no tensor. */
typedef struct {
    PyObject_HEAD
    long long index, calls, recomputations;
    long long forward; /* index of the execution whose backward op it is; -1: none is known */
    PyObject *inputs, *input_roots, *outputs, *output_roots; /* owned tuples */
    PyObject *written; /* owned tuple of (flat position, index, root) of inputs after the op */
    int64_t *roots;    /* of the inputs, or LISTED_ROOTS, NO_ROOT */
} Record;

/* A value among lists.  before a run: index and root that it is to have, if it has a position in a record. */
typedef struct {
    PyObject *value;     /* owned, while indices are set */
    PyObject *reference; /* owned, while the execution is open; NULL: not a known tensor */
    int64_t index, root;
    uint64_t version;
    char has_position, is_due;
} Leaf;

typedef struct {
    Leaf *items;
    int count, room;
} Leaves;

typedef struct {
    const Thread *thread;
    PyObject *execution; /* owned; with which Python began it; NULL: native code did */
    Record *record;      /* owned; that native code found */
    int64_t serial;
    uint64_t number;
    Leaves leaves;
} Open;

typedef struct {
    uint64_t first, end;
    long long index;
} NodeRange;

typedef struct Records {
    PyObject_HEAD
    LiveTensors *live; /* owned */
    PyObject *ops;     /* owned list; indices of the recorded executions, of which native code may not have all yet */
    PyObject *written; /* owned tuple; flat positions of inputs that the op writes without a new version */
    struct Records *forward; /* owned; of the forward op of a backward op; NULL: none */
    Record **records;  /* owned */
    int count, room;
    char accepts_any; /* whether an execution that fits no record is one more of the last */
    int open_count, open_room, first_range, range_count;
    Open *open;
    NodeRange *ranges; /* a ring */
    Leaves spare;
} Records;

typedef struct {
    Observer base;
    Records *records;         /* owned */
    SentGradients *gradients; /* owned; of a backward op; NULL: of a forward op */
    char recomputes;          /* the executions are recomputations, which may have other tensors as inputs */
} RepeatObserver;

static PyTypeObject Record_Type, Records_Type, RepeatObserver_Type;

/* ---- values ---- */

static int is_list(PyObject *value) { return PyTuple_Check(value) || PyList_Check(value); }

/* Whether native code knows which tensors a value holds. */
static int is_readable(const Reader *reader, PyObject *value, int depth) {
    const void *data;
    if (reader_is_tensor(reader, value)) return reader_storage(reader, value, &data) != NULL;
    if (!is_list(value)) return reader_is_plain(reader, value) || PySlice_Check(value);
    if (!depth) return 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
        if (!is_readable(reader, PySequence_Fast_GET_ITEM(value, i), depth - 1)) return 0;
    return 1;
}

static int are_readable(const Reader *reader, PyObject *const *values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (!is_readable(reader, values[i], DEPTH_LIMIT)) return 0;
    return 1;
}

static int holds_tensor(const Reader *reader, PyObject *value) {
    if (!is_list(value)) return reader_is_tensor(reader, value);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
        if (holds_tensor(reader, PySequence_Fast_GET_ITEM(value, i))) return 1;
    return 0;
}

#define UNKNOWN_ROOT (-1) /* of a tensor that fits any */
#define NO_ROOT (-2)      /* of a value that is no tensor */
#define LISTED_ROOTS (-3)

static int64_t integer_of(PyObject *integer) { return PyLong_Check(integer) ? (int64_t)PyLong_AsLongLong(integer) : UNKNOWN_ROOT; }

/* The root of a value, or of a recorded input. */
static int64_t root_of(const Records *self, const Reader *reader, PyObject *value) {
    if (is_list(value)) return LISTED_ROOTS;
    if (!reader_is_tensor(reader, value)) return NO_ROOT;
    const LiveTensor *live = live_find(self->live, value);
    return live ? live->root : UNKNOWN_ROOT;
}

static int64_t recorded_root(PyObject *root) {
    return PyTuple_Check(root) ? LISTED_ROOTS : root == Py_None ? NO_ROOT : integer_of(root);
}

/* Whether a value has the roots of a recorded input. */
static int fits_root(const Records *self, const Reader *reader, PyObject *value, PyObject *root) {
    if (is_list(value)) {
        if (!PyTuple_Check(root)) return root == Py_None && !holds_tensor(reader, value);
        Py_ssize_t count = PySequence_Fast_GET_SIZE(value);
        if (count != PyTuple_GET_SIZE(root)) return 0;
        for (Py_ssize_t i = 0; i < count; i++)
            if (!fits_root(self, reader, PySequence_Fast_GET_ITEM(value, i), PyTuple_GET_ITEM(root, i))) return 0;
        return 1;
    }
    int64_t present = root_of(self, reader, value), recorded = recorded_root(root);
    return present == recorded || (present == UNKNOWN_ROOT && recorded != NO_ROOT);
}

/* The record of which an execution with these inputs is one more; NULL: only Python can tell, or it is a new one. */
static Record *record_of(const Records *self, const Reader *reader, PyObject *const *values, Py_ssize_t count, int accepts_any) {
    int64_t present[VALUE_LIMIT];
    if (count > VALUE_LIMIT) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) present[i] = root_of(self, reader, values[i]);
    for (int i = 0; i < self->count; i++) {
        const Record *record = self->records[i];
        Py_ssize_t position = PyTuple_GET_SIZE(record->input_roots) == count ? 0 : count + 1;
        for (; position < count; position++) {
            int64_t recorded = record->roots[position];
            if (present[position] == LISTED_ROOTS || recorded == LISTED_ROOTS) {
                if (!fits_root(self, reader, values[position], PyTuple_GET_ITEM(record->input_roots, position))) break;
            } else if (present[position] != recorded && (present[position] != UNKNOWN_ROOT || recorded == NO_ROOT))
                break;
        }
        if (position == count) return self->records[i];
    }
    return accepts_any && self->count ? self->records[self->count - 1] : NULL;
}

/* Add a value, or the values in a list, as leaves.  position, root: of the record; NULL: it has none.  -1: no memory. */
static int gather(Leaves *leaves, const Reader *reader, PyObject *value, PyObject *position, PyObject *root) {
    if (is_list(value)) {
        int listed = position && PyTuple_Check(position) && PyTuple_Check(root);
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            int has_position = listed && i < PyTuple_GET_SIZE(position) && i < PyTuple_GET_SIZE(root);
            if (gather(leaves, reader, PySequence_Fast_GET_ITEM(value, i), has_position ? PyTuple_GET_ITEM(position, i) : NULL,
                       has_position ? PyTuple_GET_ITEM(root, i) : NULL))
                return -1;
        }
        return 0;
    }
    if (leaves->count == leaves->room) {
        int room = leaves->room ? leaves->room * 2 : 8;
        Leaf *items = PyMem_Realloc(leaves->items, (size_t)room * sizeof *items);
        if (!items) return -1;
        leaves->items = items;
        leaves->room = room;
    }
    Leaf *leaf = &leaves->items[leaves->count++];
    *leaf = (Leaf){.value = Py_NewRef(value)};
    if (position && PyLong_Check(position) && PyLong_Check(root) && reader_is_tensor(reader, value)) {
        leaf->has_position = 1;
        leaf->index = integer_of(position);
        leaf->root = integer_of(root);
    }
    return 0;
}

static int gather_all(Leaves *leaves, const Reader *reader, PyObject *const *values, Py_ssize_t count, PyObject *positions,
                      PyObject *roots) {
    Py_ssize_t recorded = PyTuple_GET_SIZE(positions) < PyTuple_GET_SIZE(roots) ? PyTuple_GET_SIZE(positions) : PyTuple_GET_SIZE(roots);
    for (Py_ssize_t i = 0; i < count; i++)
        if (gather(leaves, reader, values[i], i < recorded ? PyTuple_GET_ITEM(positions, i) : NULL,
                   i < recorded ? PyTuple_GET_ITEM(roots, i) : NULL))
            return -1;
    return 0;
}

static Leaves take_spare(Records *self) {
    Leaves leaves = self->spare;
    self->spare = (Leaves){NULL, 0, 0};
    return leaves;
}

static void release_values(Leaves *leaves) {
    for (int i = 0; i < leaves->count; i++) Py_CLEAR(leaves->items[i].value);
}

static void release_leaves(Records *self, Leaves *leaves) {
    int count = leaves->count;
    release_values(leaves);
    for (int i = 0; i < count; i++) Py_CLEAR(leaves->items[i].reference);
    leaves->count = 0;
    if (!self->spare.items && leaves->room <= SPARE_LIMIT) self->spare = *leaves;
    else PyMem_Free(leaves->items);
    *leaves = (Leaves){NULL, 0, 0};
}

/* ---- executions under way ---- */

static void release_open(Records *self, Open *open) {
    Open closed = *open; /* what is released may run Python, which may begin others */
    Py_XDECREF(closed.execution);
    Py_XDECREF(closed.record);
    release_leaves(self, &closed.leaves);
}

/* Put an execution, which is taken over, on the stack of those under way; -1: no memory. */
static int push_open(Records *self, Open open) {
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
static int innermost(const Records *self, const Thread *thread) {
    int i = self->open_count - 1;
    while (i >= 0 && self->open[i].thread != thread) i--;
    return i;
}

static Open pop_open(Records *self, int i) {
    Open open = self->open[i];
    memmove(self->open + i, self->open + i + 1, (size_t)(--self->open_count - i) * sizeof *self->open);
    return open;
}

static int add_range(Records *self, uint64_t first, uint64_t end, long long index) {
    if (!self->ranges) self->ranges = PyMem_Calloc(RANGE_LIMIT, sizeof *self->ranges);
    if (!self->ranges) return -1;
    self->ranges[(self->first_range + self->range_count) % RANGE_LIMIT] = (NodeRange){first, end, index};
    if (self->range_count < RANGE_LIMIT) self->range_count++;
    else self->first_range = (self->first_range + 1) % RANGE_LIMIT;
    return 0;
}

/* The execution that made a backward op; NULL: none of the last did. */
static const NodeRange *range_of_node(const Records *self, uint64_t number) {
    for (int i = self->range_count - 1; i >= 0; i--) { /* the latest first: an op that ran again has newer nodes */
        const NodeRange *range = &self->ranges[(self->first_range + i) % RANGE_LIMIT];
        if (range->first <= number && number < range->end) return range;
    }
    return NULL;
}

/* ---- before the op ---- */

static Observation observe_before(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                  Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    LiveTensors *live_tensors = self ? self->live : NULL;
    if (!self || live_tensors->busy || PyList_GET_SIZE(self->ops) != self->count || !are_readable(reader, values, count)) return CALL_PYTHON;
    int accepts_any = self->accepts_any || ((RepeatObserver *)observer)->recomputes;
    Record *record = record_of(self, reader, values, count, accepts_any);
    if (!record) return CALL_PYTHON;
    Leaves leaves = take_spare(self);
    Open open = {.thread = thread, .record = (Record *)Py_NewRef(record)};
    int only_python = gather_all(&leaves, reader, values, count, record->inputs, record->input_roots);
    for (int i = 0; !only_python && i < leaves.count; i++) {
        Leaf *leaf = &leaves.items[i];
        if (!leaf->has_position) continue;
        const LiveTensor *live = live_find(live_tensors, leaf->value);
        Change change = live ? changed_since(live_tensors, thread, reader, leaf->value, live->serial) : CHANGED_SINCE;
        only_python = change == ONLY_PYTHON_KNOWS;
        leaf->is_due = change == CHANGED_SINCE;
    }
    if (only_python) { /* nothing is changed yet */
        release_leaves(self, &leaves);
        Py_DECREF(open.record);
        return CALL_PYTHON;
    }
    int failed = 0;
    for (int i = 0; !failed && i < leaves.count; i++) {
        const Leaf *leaf = &leaves.items[i];
        const LiveTensor *live = leaf->is_due ? live_find(live_tensors, leaf->value) : NULL;
        if (leaf->is_due && (!live || live->serial != live_tensors->serial)) /* an op may be given a tensor twice */
            failed = live_set(live_tensors, leaf->value, leaf->index, leaf->root);
    }
    for (int i = 0; !failed && i < leaves.count; i++) {
        Leaf *leaf = &leaves.items[i];
        const LiveTensor *live = reader_is_tensor(reader, leaf->value) ? live_find(live_tensors, leaf->value) : NULL;
        if (!live) continue;
        leaf->index = live->index;
        leaf->version = tensor_version(reader, leaf->value);
        leaf->reference = Py_NewRef(live->reference);
    }
    open.serial = live_tensors->serial;
    open.number = reader_clock(reader);
    release_values(&leaves);
    open.leaves = leaves;
    if (failed) release_open(self, &open);
    else if (push_open(self, open)) {
        PyErr_NoMemory();
        failed = 1;
    }
    return failed ? OBSERVER_FAILED : OBSERVED;
}

/* ---- after the op ---- */

static int is_written_always(const Records *self, int position) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->written); i++)
        if (integer_of(PyTuple_GET_ITEM(self->written, i)) == position) return 1;
    return 0;
}

/* Keep as `value` the inputs that the op itself has written, each once, and not ops within it. 0: only Python knows. */
static int find_written(const Records *self, Open *open, Thread *thread, const Reader *reader) {
    Leaf *leaves = open->leaves.items;
    for (int i = 0; i < open->leaves.count; i++) {
        PyObject *tensor = leaves[i].reference ? referent(leaves[i].reference) : NULL;
        int is_written = tensor != NULL;
        for (int j = 0; is_written && j < i; j++) is_written = leaves[j].value != tensor;
        if (is_written) is_written = is_written_always(self, i) || tensor_version(reader, tensor) != leaves[i].version;
        if (!is_written) {
            Py_XDECREF(tensor);
            continue;
        }
        leaves[i].value = tensor; /* which is taken over */
        Change change = changed_since(self->live, thread, reader, tensor, open->serial);
        if (change == ONLY_PYTHON_KNOWS || !can_note_write(self->live, thread, reader, tensor)) return 0;
        if (change == CHANGED_SINCE) Py_CLEAR(leaves[i].value);
    }
    return 1;
}

/* Note the writes of an execution, and give outputs and written inputs their indices; -1: an exception. */
static int set_results(Records *self, Open *open, Leaves *outputs, Thread *thread, const Reader *reader) {
    const Leaf *inputs = open->leaves.items;
    Record *record = open->record;
    for (int i = 0; i < open->leaves.count; i++)
        if (inputs[i].value && note_write(self->live, thread, reader, inputs[i].value, record->index)) {
            PyErr_NoMemory();
            return -1;
        }
    for (int i = 0; i < outputs->count; i++) {
        const Leaf *leaf = &outputs->items[i];
        if (leaf->has_position && live_set(self->live, leaf->value, leaf->index, leaf->root)) return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(record->written); i++) {
        PyObject *item = PyTuple_GET_ITEM(record->written, i);
        int64_t position = integer_of(PyTuple_GET_ITEM(item, 0));
        PyObject *tensor = position >= 0 && position < open->leaves.count ? inputs[position].value : NULL;
        if (tensor && live_set(self->live, tensor, integer_of(PyTuple_GET_ITEM(item, 1)), integer_of(PyTuple_GET_ITEM(item, 2)))) return -1;
    }
    return 0;
}

static Observation observe_after(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                 Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    int position = self ? innermost(self, thread) : -1;
    if (position < 0 || self->open[position].execution || self->live->busy || !are_readable(reader, values, count)) return CALL_PYTHON;
    Open open = pop_open(self, position);
    if (!find_written(self, &open, thread, reader)) {
        release_values(&open.leaves);
        if (!push_open(self, open)) return CALL_PYTHON;
        PyErr_NoMemory();
        return OBSERVER_FAILED;
    }
    Leaves outputs = take_spare(self);
    uint64_t end = reader_clock(reader);
    int failed = gather_all(&outputs, reader, values, count, open.record->outputs, open.record->output_roots) ||
                 (open.number != end && add_range(self, open.number, end, open.record->index));
    if (failed) PyErr_NoMemory();
    else {
        (*(((RepeatObserver *)observer)->recomputes ? &open.record->recomputations : &open.record->calls))++;
        self->live->counted++;
        failed = set_results(self, &open, &outputs, thread, reader);
    }
    release_leaves(self, &outputs);
    release_open(self, &open);
    return failed ? OBSERVER_FAILED : OBSERVED;
}

/* ---- around a backward op ---- */

/* The execution that made a backward op; if none did, the first one.  -1: none is known. */
static long long forward_of(const Records *self, const BackwardOp *op) {
    const Records *forward = self->forward;
    if (!forward) return -1;
    const NodeRange *range = op->has_number ? range_of_node(forward, op->number) : NULL;
    if (range) return range->index;
    return PyList_GET_SIZE(forward->ops) ? integer_of(PyList_GET_ITEM(forward->ops, 0)) : -1;
}

static Record *backward_record(const Records *self, long long forward) {
    for (int i = self->count - 1; i >= 0; i--)
        if (self->records[i]->forward == forward) return self->records[i];
    return self->accepts_any && self->count ? self->records[self->count - 1] : NULL;
}

static Observation observe_before_backward(Observer *observer, Thread *thread, const Reader *reader,
                                           PyObject *const *Py_UNUSED(values), Py_ssize_t count,
                                           const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    SentGradients *gradients = ((RepeatObserver *)observer)->gradients;
    if (self->live->busy || !self->count || PyList_GET_SIZE(self->ops) != self->count) return CALL_PYTHON;
    BackwardOp op;
    if (find_backward_op(gradients, thread, &op)) return OBSERVER_FAILED;
    Record *record = PyList_GET_SIZE(self->ops) == self->count ? backward_record(self, forward_of(self, &op)) : NULL;
    if (record) drop_gradients(gradients, &op, count);
    Py_XDECREF(op.op);
    if (!record) return CALL_PYTHON;
    Open open = {.thread = thread, .record = (Record *)Py_NewRef(record), .number = reader_clock(reader)};
    if (!push_open(self, open)) return OBSERVED;
    PyErr_NoMemory();
    return OBSERVER_FAILED;
}

/* Count an execution, give the gradients that leave the op their indices, and send these on; -1: an exception. */
static int repeat_backward(Records *self, SentGradients *gradients, Thread *thread, Record *record, const Leaves *leaves) {
    BackwardOp op;
    record->calls++;
    self->live->counted++;
    for (int i = 0; i < leaves->count; i++) {
        const Leaf *leaf = &leaves->items[i];
        if (leaf->has_position && live_set(self->live, leaf->value, leaf->index, leaf->root)) return -1;
    }
    if (find_backward_op(gradients, thread, &op)) return -1;
    PyObject *gradient = send_gradients(gradients, thread, &op, record->outputs);
    Py_XDECREF(op.op);
    int failed = !gradient;
    if (gradient && gradient != Py_None && PyTuple_GET_SIZE(record->written)) { /* each pass writes the gradient of a leaf */
        PyObject *item = PyTuple_GET_ITEM(record->written, 0);
        failed = live_set(self->live, gradient, integer_of(PyTuple_GET_ITEM(item, 1)), integer_of(PyTuple_GET_ITEM(item, 2)));
    }
    Py_XDECREF(gradient);
    return failed ? -1 : 0;
}

static Observation observe_after_backward(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                          Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    int position = innermost(self, thread);
    if (position < 0 || self->open[position].execution || self->live->busy || !are_readable(reader, values, count))
        return CALL_PYTHON;
    Open open = pop_open(self, position);
    Leaves leaves = take_spare(self);
    int failed = gather_all(&leaves, reader, values, count, open.record->outputs, open.record->output_roots);
    if (failed) PyErr_NoMemory();
    else failed = repeat_backward(self, ((RepeatObserver *)observer)->gradients, thread, open.record, &leaves);
    release_leaves(self, &leaves);
    release_open(self, &open);
    return failed ? OBSERVER_FAILED : OBSERVED;
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
        PyObject *state = !leaf->reference ? Py_NewRef(Py_None) : version ? Py_BuildValue("OLO", leaf->reference, (long long)leaf->index, version) : NULL;
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
        execution = Py_BuildValue("LNLK", open.record->index, states_of(&open), (long long)open.serial, (unsigned long long)open.number);
    release_open(self, &open);
    return execution;
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
    {"end", (PyCFunction)records_end, METH_NOARGS,
     "Remove the innermost execution of this thread, and return it; None without one.\n\n"
     "For one that native code has begun: index of the record; for each flat input a reference, index and version of the\n"
     "tensor, or None; serial number of the last write; number of the next backward op; all before the op."},
    {"add_nodes", (PyCFunction)records_add_nodes, METH_VARARGS,
     "add_nodes(first, end, index): note the numbers of the backward ops that an execution has made; end is that after the last."},
    {"op_of_node", (PyCFunction)records_op_of_node, METH_O,
     "op_of_node(number): return the index of the execution that made a backward op; None if none of the last 256 did."},
    {0}};

static PyMemberDef records_members[] = {
    {"accepts_any", T_BOOL, offsetof(Records, accepts_any), 0,
     "Whether an execution that fits no record counts as one more of the last; false at first."},
    {"live", T_OBJECT, offsetof(Records, live), READONLY, "The live tensors."},
    {0}};

static PyTypeObject Records_Type = {
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

/* ---- for Python: observers ---- */

static PyObject *repeat_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    RepeatObserver *self = (RepeatObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (self) self->base.observe = observe_before;
    return (PyObject *)self;
}

static int repeat_init(RepeatObserver *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"records", "after", "gradients", NULL};
    PyObject *records, *gradients = Py_None;
    int after = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|pO", names, &Records_Type, &records, &after, &gradients)) return -1;
    if (gradients != Py_None && !Py_IS_TYPE(gradients, &SentGradients_Type)) {
        PyErr_Format(PyExc_TypeError, "gradients: SentGradients or None, not %R", gradients);
        return -1;
    }
    Py_XSETREF(self->records, (Records *)Py_NewRef(records));
    Py_XSETREF(self->gradients, gradients == Py_None ? NULL : (SentGradients *)Py_NewRef(gradients));
    if (self->gradients) self->base.observe = after ? observe_after_backward : observe_before_backward;
    else self->base.observe = after ? observe_after : observe_before;
    return 0;
}

static int repeat_traverse(RepeatObserver *self, visitproc visit, void *arg) {
    Py_VISIT(self->records);
    Py_VISIT(self->gradients);
    return 0;
}

static void repeat_dealloc(RepeatObserver *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->records);
    Py_CLEAR(self->gradients);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef repeat_members[] = {
    {"records", T_OBJECT, offsetof(RepeatObserver, records), READONLY, "The records of the op."},
    {"recomputes", T_BOOL, offsetof(RepeatObserver, recomputes), 0,
     "Whether the executions are recomputations, which count as such, and may have other inputs; false at first."},
    {0}};

static PyTypeObject RepeatObserver_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.RepeatObserver",
    .tp_basicsize = sizeof(RepeatObserver),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "RepeatObserver(records, after=False, gradients=None): base of observers that native code calls for new executions.\n\n"
              "A subclass defines __call__(*values, **options).  One is the routine before an op, and one that after it.\n"
              "gradients: SentGradients, of the observers of a backward op.",
    .tp_new = repeat_new,
    .tp_init = (initproc)repeat_init,
    .tp_dealloc = (destructor)repeat_dealloc,
    .tp_traverse = (traverseproc)repeat_traverse,
    .tp_members = repeat_members,
};

int records_boot(PyObject *names) {
    return live_boot(names) || add_type(names, "ExecutionRecord", &Record_Type) ||
                   add_type(names, "ExecutionRecords", &Records_Type) || add_type(names, "RepeatObserver", &RepeatObserver_Type)
               ? -1
               : 0;
}

/* Observers of dataflow that need no call where an execution repeats one that a tool has recorded. */
#include "execution/observer.h"
#include "execution/records.h"
#include <structmember.h>

#define VALUE_LIMIT 32  /* inputs; programs have no more */
#define DEPTH_LIMIT 8   /* of lists among the values */

typedef struct {
    Observer base;
    Records *records;         /* owned */
    SentGradients *gradients; /* owned; of a backward op; NULL: of a forward op */
    char recomputes;          /* the executions are recomputations, which may have other tensors as inputs */
} RepeatObserver;

static PyTypeObject RepeatObserver_Type;

/* ---- values ---- */

static int is_list(PyObject *value) { return PyTuple_Check(value) || PyList_Check(value); }

/* Whether native code knows which tensors a value holds. */
static int is_readable(const Reader *reader, PyObject *value, int depth) {
    const void *data;
    int64_t size;
    if (reader_is_tensor(reader, value)) return reader_storage(reader, value, &data, &size) != NULL;
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


/* The root of a value, or of a recorded input. */
static int64_t root_of(const Records *self, const Reader *reader, PyObject *value) {
    if (is_list(value)) return LISTED_ROOTS;
    if (!reader_is_tensor(reader, value)) return NO_ROOT;
    const LiveTensor *live = live_find(self->live, value);
    return live ? live->root : UNKNOWN_ROOT;
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
    Py_ssize_t recorded = PyTuple_GET_SIZE(positions); /* a record has as many roots */
    for (Py_ssize_t i = 0; i < count; i++)
        if (gather(leaves, reader, values[i], i < recorded ? PyTuple_GET_ITEM(positions, i) : NULL,
                   i < recorded ? PyTuple_GET_ITEM(roots, i) : NULL))
            return -1;
    return 0;
}

/* ---- before the op ---- */

static Observation observe_before(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                  Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    LiveTensors *live_tensors = self ? self->live : NULL;
    if (!self || live_tensors->busy || PyList_GET_SIZE(self->ops) != self->count || !are_readable(reader, values, count))
        return CALL_PYTHON;
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
    release_leaf_values(&leaves);
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

/* Give a tensor the index and root that `written` of a record has for it. */
static int set_written(LiveTensors *live, PyObject *tensor, PyObject *item) {
    return live_set(live, tensor, integer_of(PyTuple_GET_ITEM(item, 1)), integer_of(PyTuple_GET_ITEM(item, 2)));
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
        if (tensor && set_written(self->live, tensor, item)) return -1;
    }
    return 0;
}

static Observation observe_after(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                 Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    int position = self ? innermost(self, thread) : -1;
    if (position < 0 || self->open[position].execution || self->live->busy || !are_readable(reader, values, count))
        return CALL_PYTHON;
    Open open = pop_open(self, position);
    if (!find_written(self, &open, thread, reader)) {
        release_leaf_values(&open.leaves);
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

static int has_all_records(const Records *self) {
    return !self->live->busy && self->count && PyList_GET_SIZE(self->ops) == self->count;
}

/* Find the backward op that runs, and the record of which its execution is one more (new), whose summands are taken;
   NULL: only Python can tell.  Returns -1 with an exception. */
static int begin_repeat(const Records *self, SentGradients *gradients, Thread *thread, Py_ssize_t count, BackwardOp *op,
                        Record **record) {
    *op = (BackwardOp){0};
    *record = NULL;
    if (!has_all_records(self)) return 0;
    if (find_backward_op(gradients, thread, op)) return -1;
    if (has_all_records(self)) *record = (Record *)Py_XNewRef(backward_record(self, forward_of(self, op)));
    if (*record) drop_gradients(gradients, op, count);
    return 0;
}

static Observation observe_before_backward(Observer *observer, Thread *thread, const Reader *reader,
                                           PyObject *const *Py_UNUSED(values), Py_ssize_t count,
                                           const OpInputs *Py_UNUSED(op_inputs)) {
    Records *self = ((RepeatObserver *)observer)->records;
    BackwardOp op;
    Record *record;
    int failed = begin_repeat(self, ((RepeatObserver *)observer)->gradients, thread, count, &op, &record);
    Py_XDECREF(op.op);
    if (failed) return OBSERVER_FAILED;
    if (!record) return CALL_PYTHON;
    Open open = {.thread = thread, .record = record, .number = reader_clock(reader)};
    if (!push_open(self, open)) return OBSERVED;
    PyErr_NoMemory();
    return OBSERVER_FAILED;
}

/* Whether every execution of a backward op is one more of a recorded one. */
static int repeats_always(const Observer *observer) {
    const Records *self = ((const RepeatObserver *)observer)->records;
    if (!has_all_records(self)) return 0;
    Py_ssize_t forward_count = 0;
    for (int i = 0; i < self->count; i++) forward_count += self->records[i]->forward >= 0; /* each of another execution */
    return self->accepts_any || (self->forward && forward_count && forward_count >= PyList_GET_SIZE(self->forward->ops));
}

/* The observer after the op then knows as much as that before it. */
static int is_idle_repeat(const Observer *observer) {
    return observer->observe == observe_before_backward && repeats_always(observer);
}

/* Begin an execution with the gradients that entered the op, by which Python makes up for the observer before the op.
   Weak references, where these are possible: where a routine in between raises, nobody ends the execution. */
static int begin_late(Records *self, Thread *thread, const OpInputs *entered) {
    PyObject *gradients = PyList_New(entered->count);
    for (Py_ssize_t i = 0; gradients && i < entered->count; i++) {
        PyObject *reference = PyWeakref_NewRef(entered->items[i], NULL);
        if (!reference) PyErr_Clear(); /* such as None */
        PyList_SET_ITEM(gradients, i, reference ? reference : Py_NewRef(entered->items[i]));
    }
    if (!gradients) return -1;
    if (!push_open(self, (Open){.thread = thread, .execution = gradients})) return 0;
    PyErr_NoMemory();
    return -1;
}

static int hand_over_repeat(Observer *observer, Thread *thread, const Reader *Py_UNUSED(reader), const OpInputs *op_inputs) {
    return op_inputs->is_alone ? begin_late(((RepeatObserver *)observer)->records, thread, op_inputs) : 0;
}

/* Count an execution, give the gradients that leave the op their indices, and send these on; -1: an exception. */
static int repeat_backward(Records *self, SentGradients *gradients, Thread *thread, const BackwardOp *op, Record *record,
                           const Leaves *leaves) {
    record->calls++;
    self->live->counted++;
    for (int i = 0; i < leaves->count; i++) {
        const Leaf *leaf = &leaves->items[i];
        if (leaf->has_position && live_set(self->live, leaf->value, leaf->index, leaf->root)) return -1;
    }
    PyObject *gradient = send_gradients(gradients, thread, op, record->outputs);
    int failed = !gradient;
    if (gradient && gradient != Py_None && PyTuple_GET_SIZE(record->written)) { /* each pass writes the gradient of a leaf */
        PyObject *item = PyTuple_GET_ITEM(record->written, 0);
        failed = set_written(self->live, gradient, item);
    }
    Py_XDECREF(gradient);
    return failed ? -1 : 0;
}

static Observation observe_after_backward(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                          Py_ssize_t count, const OpInputs *op_inputs) {
    Records *self = ((RepeatObserver *)observer)->records;
    SentGradients *gradients = ((RepeatObserver *)observer)->gradients;
    int is_readable = !self->live->busy && are_readable(reader, values, count), failed = 0;
    BackwardOp op = {0};
    Open open = {.record = NULL};
    if (op_inputs->is_alone) {
        if (is_readable) failed = begin_repeat(self, gradients, thread, op_inputs->count, &op, &open.record);
        if (!failed && !open.record) failed = begin_late(self, thread, op_inputs);
    } else {
        int position = is_readable ? innermost(self, thread) : -1;
        if (position < 0 || self->open[position].execution) return CALL_PYTHON;
        open = pop_open(self, position);
        failed = find_backward_op(gradients, thread, &op);
    }
    Leaves leaves = take_spare(self);
    if (!failed && open.record) {
        failed = gather_all(&leaves, reader, values, count, open.record->outputs, open.record->output_roots);
        if (failed) PyErr_NoMemory();
        else failed = repeat_backward(self, gradients, thread, &op, open.record, &leaves);
    }
    Observation observation = failed ? OBSERVER_FAILED : open.record ? OBSERVED : CALL_PYTHON;
    release_leaves(self, &leaves);
    release_open(self, &open);
    Py_XDECREF(op.op);
    return observation;
}

/* A pass that has ended has sent on all of its gradients, of which the program has those of leaves alone. */
static int repeat_ended(Observer *observer, Thread *thread, PyObject *op) {
    Records *self = ((RepeatObserver *)observer)->records;
    SentGradients *gradients = ((RepeatObserver *)observer)->gradients;
    BackwardOp backward_op;
    if (read_backward_op(gradients, thread, op, &backward_op)) return -1;
    Record *record = (Record *)Py_XNewRef(backward_record(self, forward_of(self, &backward_op)));
    int failed = 0;
    if (!record) {
        PyErr_Format(PyExc_ValueError, "an execution repeats no recorded one");
        failed = -1;
    } else if (backward_op.is_leaf)
        failed = repeat_backward(self, gradients, thread, &backward_op, record, &(Leaves){NULL, 0, 0});
    else {
        record->calls++;
        self->live->counted++;
    }
    Py_XDECREF(record);
    Py_DECREF(backward_op.op);
    return failed;
}

/* ---- for Python ---- */

static PyObject *repeat_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    RepeatObserver *self = (RepeatObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_before;
    self->base.is_idle = is_idle_repeat;
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
    if (self->gradients) {
        self->base.observe = after ? observe_after_backward : observe_before_backward;
        self->base.hand_over = after ? hand_over_repeat : NULL;
        self->base.repeat = after ? repeat_ended : NULL;
        self->base.may_repeat = after ? repeats_always : NULL;
    }
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
    .tp_doc = "RepeatObserver(records, after=False, gradients=None): base of observers, called for new executions alone.\n\n"
              "A subclass defines __call__(*values, **options).  One is the routine before an op, and one that after it.\n"
              "gradients: SentGradients, of the observers of a backward op.",
    .tp_new = repeat_new,
    .tp_init = (initproc)repeat_init,
    .tp_dealloc = (destructor)repeat_dealloc,
    .tp_traverse = (traverseproc)repeat_traverse,
    .tp_members = repeat_members,
};

int repeats_boot(PyObject *names) { return add_type(names, "RepeatObserver", &RepeatObserver_Type); }

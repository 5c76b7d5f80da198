/* Hooks: programs that a framework calls with a tuple of values. */
#include "execution/program.h"
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Program *program;  /* owned */
    Reader *reader;    /* owned */
    PyObject *resume;  /* owned; called if Python continues */
    PyObject *actions; /* owned; first argument of `resume` */
    PyObject *shapes;  /* owned; of the op; None: no routine takes any */
    PyObject *idle;    /* owned; the hook before the op, which was idle, and is left out; NULL: none is */
    char counts_alone; /* whether each routine is a tally, and no hook is left out */
    char is_repeatable; /* whether each routine is a tally, or an observer that may repeat executions */
    int word_count;    /* of `words`; -1: the last call was not counted by words */
    int64_t *words;    /* owned; shapes of the last call */
} Hook;

/* Read the shapes that routines of a hook take: of the op, then of the arguments from the last on, since a framework
   passes the incoming gradients behind the outgoing ones. -1: an exception. */
static int read_shapes(const Hook *hook, PyObject *const *args, Py_ssize_t sides, Shapes *shapes) {
    const Program *program = hook->program;
    shapes->objects = NULL;
    shapes->code.count = program->needs_shape_codes ? 0 : -1;
    if (program->needs_shape_codes) encode_shapes(&shapes->code, hook->shapes);
    for (Py_ssize_t i = sides; shapes->code.count >= 0 && i--;)
        if (PyTuple_Check(args[i]))
            reader_shape_code(hook->reader, ((PyTupleObject *)args[i])->ob_item, PyTuple_GET_SIZE(args[i]), &shapes->code);
    if (!program->needs_shapes && !(program->needs_shape_codes && shapes->code.count < 0)) return 0;
    shapes->objects = Py_NewRef(hook->shapes);
    for (Py_ssize_t i = sides; i--;)
        if (PyTuple_Check(args[i]) && add_shapes(hook->reader, &shapes->objects, ((PyTupleObject *)args[i])->ob_item,
                                                 PyTuple_GET_SIZE(args[i])))
            return -1;
    return 0;
}

/* Keep the shapes of a call that tallies have counted, for `count_again`. */
static void keep_words(Hook *hook, const ShapeCode *code) {
    hook->word_count = -1;
    if (code->count < 0) return;
    int64_t *words = PyMem_Realloc(hook->words, (size_t)(code->count + 1) * sizeof *words);
    if (!words) return;
    memcpy(words, code->items, (size_t)code->count * sizeof *words);
    hook->words = words;
    hook->word_count = code->count;
}

static PyObject *call_hook(PyObject *self, PyObject *const *args, size_t flags, PyObject *Py_UNUSED(names)) {
    Hook *hook = (Hook *)self;
    if (!PyVectorcall_NARGS(flags) || !PyTuple_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "a hook is called with a tuple of values");
    if (is_switched_off(thread_state())) Py_RETURN_NONE; /* a pass within the hook's own, which calls the hooks that are there */
    Shapes shapes;
    if (read_shapes(hook, args, PyVectorcall_NARGS(flags), &shapes)) return NULL;
    PyObject *entered = PyVectorcall_NARGS(flags) > 1 && PyTuple_Check(args[1]) ? args[1] : NULL;
    PyObject *resumption = run_on_values(hook->program, hook->reader, args[0], entered, hook->idle != NULL, &shapes);
    PyObject *values = resumption;
    if (hook->is_repeatable && hook->program->needs_shape_codes && resumption == Py_None) keep_words(hook, &shapes.code);
    if (resumption && resumption != Py_None) {
        int shaped = hook->program->needs_shapes || hook->program->needs_shape_codes;
        PyObject *objects = shaped ? shapes_as_objects(&shapes) : NULL;
        values = shaped && !objects
                     ? NULL
                     : PyObject_CallFunctionObjArgs(hook->resume, hook->actions, args[0], resumption, objects, NULL);
        Py_DECREF(resumption);
    }
    Py_XDECREF(shapes.objects);
    return values;
}

static int is_idle(const Hook *self) {
    const Program *program = self->program;
    int idle = !python_mode_active(self->reader); /* in which Python calls the routines */
    for (Py_ssize_t i = 0; idle && i < program->before + program->after; i++) {
        const Observer *observer = program->steps[i].observer;
        idle = observer && observer->is_idle && observer->is_idle(observer);
    }
    return idle;
}

static PyObject *hook_is_idle(Hook *self, void *Py_UNUSED(closure)) { return PyBool_FromLong(is_idle(self)); }

static PyObject *hook_repeats(Hook *self, void *Py_UNUSED(closure)) {
    const Program *program = self->program;
    int repeats = self->is_repeatable && (!program->needs_shape_codes || self->word_count >= 0);
    if (repeats && !self->counts_alone) repeats = !python_mode_active(self->reader); /* a mode sees gradients */
    if (repeats && self->idle) repeats = is_idle((const Hook *)self->idle);
    for (Py_ssize_t i = 0; repeats && i < program->before + program->after; i++) {
        const Observer *observer = program->steps[i].tally ? NULL : program->steps[i].observer;
        repeats = !observer || observer->may_repeat(observer);
    }
    return PyBool_FromLong(repeats);
}

/* Count an execution in a tally that native code cannot count in, by a call; -1: an exception. */
static int call_tally(const Step *step, const ShapeCode *code) {
    PyObject *shapes = step->takes_shapes ? decode_shapes(code) : NULL;
    PyObject *keywords = PyDict_New(), *none = PyTuple_New(0), *result = NULL;
    if (keywords && none && (!step->takes_shapes || (shapes && !PyDict_SetItemString(keywords, "shapes", shapes))))
        result = PyObject_Call(step->func, none, keywords);
    Py_XDECREF(shapes);
    Py_XDECREF(keywords);
    Py_XDECREF(none);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Count an execution of an op as the last call did; -1: an exception.  op: NULL if each routine is a tally. */
static int count_again(Hook *self, PyObject *op) {
    static const ShapeCode NO_SHAPES;
    Thread *thread = thread_state();
    Program *program = self->program;
    ShapeCode code = {.count = self->word_count};
    if (!self->is_repeatable || (program->needs_shape_codes && code.count < 0)) {
        PyErr_Format(PyExc_ValueError, "the hook does not repeat");
        return -1;
    }
    if (code.count > 0) memcpy(code.items, self->words, (size_t)code.count * sizeof *code.items);
    counts.native++;
    for (Py_ssize_t i = 0; i < program->before + program->after; i++) {
        Step *step = &program->steps[i];
        if (step->tally && tally_count(step->tally, step->takes_shapes ? &code : &NO_SHAPES)) continue;
        if (lock_acquire(step->lock, thread)) return -1; /* a routine of the tool may run on another thread */
        thread->suspensions++;
        int failed = step->tally ? call_tally(step, &code) : step->observer->repeat(step->observer, thread, op);
        thread->suspensions--;
        lock_release(step->lock);
        if (failed) return -1;
    }
    return 0;
}

static PyObject *hook_count_again(PyObject *Py_UNUSED(none), PyObject *args) {
    PyObject *hooks, *ops;
    if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &hooks, &ops)) return NULL;
    if (ops != Py_None && !PyList_Check(ops)) return PyErr_Format(PyExc_TypeError, "ops: a list or None, not %R", ops);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks); i++) {
        PyObject *hook, *op = NULL;
        Py_ssize_t position;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(hooks, i), "nO!", &position, &Hook_Type, &hook)) return NULL;
        if (!((Hook *)hook)->counts_alone) {
            if (ops == Py_None || position < 0 || position >= PyList_GET_SIZE(ops))
                return PyErr_Format(PyExc_IndexError, "there is no op %zd", position);
            op = Py_NewRef(PyList_GET_ITEM(ops, position));
        }
        int failed = count_again((Hook *)hook, op);
        Py_XDECREF(op);
        if (failed) return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef hook_methods[] = {
    {"count_again", hook_count_again, METH_VARARGS | METH_STATIC,
     "count_again(hooks, ops): count an execution at each hook as its last call did, without the values.\n\n"
     "hooks: a tuple of (position, hook); position: of the hook's op in the list `ops`, those of a pass that has ended;\n"
     "ops: None where each hook `counts_alone`."},
    {0}};

static PyMemberDef hook_members[] = {
    {"counts_alone", T_BOOL, offsetof(Hook, counts_alone), READONLY, "True if every routine counts executions and no hook is left out, so that `count_again` needs no op."},
    {0}};

static PyGetSetDef hook_properties[] = {
    {"repeats", (getter)hook_repeats, NULL, "True if `count_again` does for all routines what a call would do.", NULL},
    {"is_idle", (getter)hook_is_idle, NULL,
     "True if a call before an op would have no effect, so that a hook after it may do without.", NULL},
    {0}};

PyObject *program_hook(Program *self, PyObject *args) {
    Reader *reader;
    PyObject *resume, *actions, *idle, *shapes = Py_None;
    if (!PyArg_ParseTuple(args, "O!OOO|O!", &Reader_Type, &reader, &resume, &actions, &idle, &PyTuple_Type, &shapes))
        return NULL;
    if (idle != Py_None && !Py_IS_TYPE(idle, &Hook_Type))
        return PyErr_Format(PyExc_TypeError, "idle: a Hook or None, not %R", idle);
    if ((self->needs_shapes || self->needs_shape_codes) && shapes == Py_None)
        return PyErr_Format(PyExc_TypeError, "routines take shapes: pass those of the op");
    Hook *hook = PyObject_GC_New(Hook, &Hook_Type);
    if (!hook) return NULL;
    hook->vectorcall = call_hook;
    hook->program = (Program *)Py_NewRef(self);
    hook->reader = (Reader *)Py_NewRef(reader);
    hook->resume = Py_NewRef(resume);
    hook->actions = Py_NewRef(actions);
    hook->shapes = Py_NewRef(shapes);
    hook->idle = idle == Py_None ? NULL : Py_NewRef(idle);
    hook->counts_alone = !hook->idle;
    hook->is_repeatable = 1;
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        const Step *step = &self->steps[i];
        hook->counts_alone &= step->tally != NULL;
        hook->is_repeatable &= step->tally || (step->observer && step->observer->repeat);
    }
    hook->word_count = -1;
    hook->words = NULL;
    PyObject_GC_Track(hook);
    return (PyObject *)hook;
}

static int hook_traverse(Hook *self, visitproc visit, void *arg) {
    Py_VISIT(self->program);
    Py_VISIT(self->reader);
    Py_VISIT(self->resume);
    Py_VISIT(self->actions);
    Py_VISIT(self->shapes);
    Py_VISIT(self->idle);
    return 0;
}

static void hook_dealloc(Hook *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->program);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->resume);
    Py_CLEAR(self->actions);
    Py_CLEAR(self->shapes);
    Py_CLEAR(self->idle);
    PyMem_Free(self->words);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject Hook_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Callable that runs the routines of a program on a tuple of values, which a framework passes.",
    .tp_dealloc = (destructor)hook_dealloc,
    .tp_traverse = (traverseproc)hook_traverse,
    .tp_methods = hook_methods,
    .tp_members = hook_members,
    .tp_getset = hook_properties,
};

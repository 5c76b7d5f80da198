/* What is in force on a thread: activations, suspensions, watches of threads without, failures of tools. */
#include "interception/fast_path.h"
#include <structmember.h>

PyObject *activation_variable;

/* ---- activations ---- */

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

int is_switched_off(Thread *thread) {
    if (thread->suspensions) return 1;
    if (activation_of(running_thread(), thread)) return 0;
    PyObject *value = NULL;
    if (PyContextVar_Get(activation_variable, NULL, &value)) PyErr_Clear();
    int is_inactive = value && value != Py_None; /* a thread of a framework has none */
    Py_XDECREF(value);
    return is_inactive;
}

static PyObject *activation_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *table, *state;
    int active = 1, caches = 1, variant = 0;
    if (!PyArg_ParseTuple(args, "OO|ppi", &table, &state, &active, &caches, &variant)) return NULL;
    if (table != Py_None && !Py_IS_TYPE(table, &PlanTable_Type))
        return PyErr_Format(PyExc_TypeError, "a PlanTable or None is wanted, not %R", table);
    Activation *self = (Activation *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->active = active;
    self->caches = caches;
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
    self->caches = other->caches;
    self->variant = other->variant;
    self->table = (PlanTable *)Py_XNewRef((PyObject *)other->table);
    self->state = Py_NewRef(other->state);
    Py_XDECREF(table);
    Py_DECREF(state);
    Py_RETURN_NONE;
}

static PyMethodDef activation_methods[] = {
    {"become", (PyCFunction)activation_become, METH_O,
     "Take the contents of another activation, for every context that has this one; calls of ops that have begun "
     "go on as they began."},
    {0}};

static PyMemberDef activation_members[] = {
    {"active", T_INT, offsetof(Activation, active), 0, "Whether ops are intercepted."},
    {"state", T_OBJECT, offsetof(Activation, state), READONLY, "What handlers are given."},
    {0}};

PyTypeObject Activation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Activation",
    .tp_basicsize = sizeof(Activation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Activation(table, state, active=True, caches=True, variant=0): plans and state of an execution context.\n\n"
              "caches: whether programs of call caches may run.  variant: call caches have programs for each number.",
    .tp_new = activation_new,
    .tp_dealloc = (destructor)activation_dealloc,
    .tp_traverse = (traverseproc)activation_traverse,
    .tp_methods = activation_methods,
    .tp_members = activation_members,
    .tp_weaklistoffset = offsetof(Activation, references),
};

/* ---- threads where nothing is in force ---- */

Watch watch;

/* Call the watcher on a thread that runs ops where nothing is in force, until it returns True; -1: it raised. */
COLD int call_watcher(Thread *thread) {
    if (thread->suspensions) return 0;
    uint64_t number = watch.number;
    if (!watch.function) {
        thread->watch_seen = number;
        return 0;
    }
    PyObject *function = Py_NewRef(watch.function);
    thread->suspensions++;
    PyObject *answer = PyObject_CallNoArgs(function);
    thread->suspensions--;
    Py_DECREF(function);
    if (!answer) return -1;
    if (answer == Py_True) thread->watch_seen = number;
    Py_DECREF(answer);
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
                                       "Call a function at each point where native code lets Python run; only builds for tests have this."};
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

/* ---- suspension ---- */

static PyObject *suspension_enter(PyObject *self, PyObject *Py_UNUSED(none)) {
    thread_state()->suspensions++;
    return Py_NewRef(self);
}

static PyObject *suspension_exit(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args)) {
    thread_state()->suspensions--;
    Py_RETURN_NONE;
}

static PyMethodDef suspension_methods[] = {
    {"__enter__", suspension_enter, METH_NOARGS, NULL}, {"__exit__", suspension_exit, METH_VARARGS, NULL}, {0}};

PyTypeObject Suspension_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Suspension",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Context in which no call of this thread is intercepted.",
    .tp_new = PyType_GenericNew,
    .tp_methods = suspension_methods,
};

/* ---- functions ---- */

static PyObject *active(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    Thread *thread = thread_state();
    PyObject *activation = (PyObject *)active_activation(thread);
    if (activation) return activation;
    return thread->watch_seen != watch.number && call_watcher(thread) ? NULL : Py_NewRef(Py_None);
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
    if (error == Py_None || thread == &other_interpreter || !current_region(thread)) return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
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
                                  "Return the name of the op whose native code this thread runs; None outside of ops."};
static PyMethodDef failure_def = {"failure", failure, METH_NOARGS,
                                  "Return the kept exception of a tool on this thread since the last op began; None without one."};
static PyMethodDef keep_failure_def = {"keep_failure", keep_failure, METH_O,
                                       "Keep a tool's exception, which an operator may drop; None forgets it."};
static PyMethodDef forget_failures_def = {"forget_failures", forget_failures, METH_NOARGS,
                                          "Forget the kept exceptions of tools on all threads."};
static PyMethodDef watch_outside_def = {"watch_outside", watch_outside, METH_O,
                                        "Call a function on each thread that runs ops without an activation, until "
                                        "it returns True there; None ends this."};
static PyMethodDef active_def = {"active", active, METH_NOARGS,
                                 "Return the activation in force here; None if no call is intercepted."};

int activation_boot(PyObject *names) {
    if (!activation_variable) activation_variable = PyContextVar_New("amanda.activation", NULL); /* a reload keeps it */
    if (!failures) failures = PyDict_New();
#ifdef AMANDA_CHECKED
    if (add_function(names, &disturb_with_def)) return -1;
#endif
    return !activation_variable || !failures || PyDict_SetItemString(names, "ACTIVATION", activation_variable) ||
                   add_function(names, &active_def) || add_function(names, &failure_def) ||
                   add_function(names, &keep_failure_def) || add_function(names, &forget_failures_def) ||
                   add_function(names, &watch_outside_def) || add_function(names, &running_def) ||
                   add_type(names, "Activation", &Activation_Type) || add_type(names, "Suspension", &Suspension_Type)
               ? -1
               : 0;
}

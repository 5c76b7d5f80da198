/* A clock of executions: the time of each op, without that of the ops within it, and the rows of a timeline. */
#include "execution/observer.h"
#include "interception/table.h"
#include <string.h>
#include <structmember.h>

#define DEEPEST 256 /* executions under way on a thread, with those that raised: these never stop */

/* An execution under way; times in nanoseconds. */
typedef struct {
    uint32_t number;
    int64_t begin, inner, excluded;
    PyObject *tag; /* owned; NULL: none */
} Started;

typedef struct {
    int depth;
    Started started[DEEPEST];
} Stack;

typedef struct {
    int64_t executions, total, inner, least, most;
} Sums;

typedef struct {
    int64_t number, begin, duration, thread;
} LoggedExecution;

typedef struct {
    PyObject_HEAD
    Map stack_by_thread;
    Map logged_threads; /* known to `on_thread` */
    PyObject *on_thread; /* owned; NULL: None */
    Sums *sums;          /* by number */
    uint32_t sum_count;
    LoggedExecution *log;
    Py_ssize_t log_count, log_room, limit;
    long long dropped, step_begin, step_end;
    char recording;
} Clock;

typedef struct {
    Observer base;
    Clock *clock; /* owned */
    uint32_t number;
    char stops;
} ClockObserver;

static PyTypeObject Clock_Type;

/* Converter of the number of an op, for PyArg_Parse. */
static int read_number(PyObject *value, void *number) {
    long long given = PyLong_AsLongLong(value);
    if (PyErr_Occurred()) return 0;
    if (given < 0 || given >= NUMBER_LIMIT) {
        PyErr_Format(PyExc_ValueError, "the number of an op is from 0 to %d, not %lld", NUMBER_LIMIT - 1, given);
        return 0;
    }
    *(uint32_t *)number = (uint32_t)given;
    return 1;
}

static inline uint64_t thread_key(unsigned long thread) { return (uint64_t)thread + 1; } /* 0 is no key */

/* ---- executions under way ---- */

static Stack *stack_of(Clock *clock, unsigned long thread) { /* NULL: out of memory, no exception set */
    Stack *stack = map_get(&clock->stack_by_thread, thread_key(thread));
    if (stack) return stack;
    stack = PyMem_Malloc(sizeof *stack);
    if (stack) stack->depth = 0;
    if (stack && map_set(&clock->stack_by_thread, thread_key(thread), stack)) {
        PyMem_Free(stack);
        return NULL;
    }
    return stack;
}

static int start(Clock *clock, uint32_t number, PyObject *tag) { /* -1: out of memory, no exception set */
    if (!clock->recording) return 0;
    Stack *stack = stack_of(clock, PyThread_get_thread_ident());
    if (!stack) return -1;
    PyObject *oldest_tag = NULL;
    if (stack->depth == DEEPEST) { /* the outermost one has raised long ago */
        oldest_tag = stack->started[0].tag;
        memmove(stack->started, stack->started + 1, (DEEPEST - 1) * sizeof *stack->started);
        stack->depth--;
    }
    Started *started = &stack->started[stack->depth++];
    *started = (Started){number, 0, 0, 0, Py_XNewRef(tag)};
    started->begin = nanoseconds(); /* the last thing: what comes after it counts as the op's time */
    Py_XDECREF(oldest_tag);         /* which may run Python, and that may end the stack */
    return 0;
}

/* Leave time out of the executions under way on this thread. */
static void exclude(Clock *clock, int64_t excluded) {
    Stack *stack = map_get(&clock->stack_by_thread, thread_key(PyThread_get_thread_ident()));
    if (stack && stack->depth) stack->started[stack->depth - 1].excluded += excluded;
}

static Sums *sums_of(Clock *clock, uint32_t number) { /* NULL: out of memory, no exception set */
    if (number >= clock->sum_count) {
        uint32_t count = number + number / 2 + 64;
        Sums *larger = PyMem_Realloc(clock->sums, count * sizeof *larger);
        if (!larger) return NULL;
        memset(larger + clock->sum_count, 0, (count - clock->sum_count) * sizeof *larger);
        clock->sums = larger;
        clock->sum_count = count;
    }
    return &clock->sums[number];
}

/* Add an execution to the step, and to the log if there is room. -1: an exception. */
static int log_execution(Clock *clock, uint32_t number, int64_t begin, int64_t end, unsigned long thread) {
    if (clock->step_begin < 0 || begin < clock->step_begin) clock->step_begin = begin;
    if (end > clock->step_end) clock->step_end = end;
    if (clock->log_count >= clock->limit) {
        clock->dropped++;
        return 0;
    }
    if (clock->log_count == clock->log_room) {
        Py_ssize_t room = clock->log_room * 2 + 256;
        LoggedExecution *larger = PyMem_Realloc(clock->log, (size_t)room * sizeof *larger);
        if (!larger) {
            PyErr_NoMemory();
            return -1;
        }
        clock->log = larger;
        clock->log_room = room;
    }
    clock->log[clock->log_count++] = (LoggedExecution){number, begin, end - begin, (int64_t)thread};
    if (map_get(&clock->logged_threads, thread_key(thread))) return 0;
    if (map_set(&clock->logged_threads, thread_key(thread), clock)) {
        PyErr_NoMemory();
        return -1;
    }
    if (!clock->on_thread) return 0;
    int64_t called = nanoseconds();
    PyObject *result = PyObject_CallFunction(clock->on_thread, "k", thread);
    Py_XDECREF(result);
    exclude(clock, nanoseconds() - called);
    return result ? 0 : -1;
}

/* Stop the innermost execution of a number, and those within it, which raised: their time belongs to the op around
   them.  tag: set to that of the execution (owned), or NULL.  -1: an exception. */
static int stop(Clock *clock, uint32_t number, PyObject **tag) {
    int64_t now = nanoseconds(); /* the first thing, for the same reason */
    unsigned long thread = PyThread_get_thread_ident();
    Stack *stack = map_get(&clock->stack_by_thread, thread_key(thread));
    *tag = NULL;
    int found = stack ? stack->depth - 1 : -1;
    while (found >= 0 && stack->started[found].number != number) found--;
    if (found < 0) return 0;
    int64_t inner = 0, excluded = 0;
    PyObject *raised_tags[DEEPEST]; /* dropped at the end: what they hold may run Python */
    int raised = 0;
    for (int i = stack->depth - 1; i >= found; i--) {
        inner += stack->started[i].inner;
        excluded += stack->started[i].excluded;
        if (i > found && stack->started[i].tag) raised_tags[raised++] = stack->started[i].tag;
    }
    *tag = stack->started[found].tag;
    int64_t begin = stack->started[found].begin, duration = now - begin - excluded;
    stack->depth = found;
    if (found) {
        stack->started[found - 1].inner += duration;
        stack->started[found - 1].excluded += excluded;
    }
    Sums *sums = sums_of(clock, number);
    if (sums) {
        if (!sums->executions || duration < sums->least) sums->least = duration;
        if (!sums->executions || duration > sums->most) sums->most = duration;
        sums->executions++;
        sums->total += duration;
        sums->inner += inner;
    } else
        PyErr_NoMemory();
    int failed = !sums || log_execution(clock, number, begin, now, thread);
    for (int i = 0; i < raised; i++) Py_DECREF(raised_tags[i]);
    if (failed) Py_CLEAR(*tag);
    return failed ? -1 : 0;
}

static void drop_stacks(Clock *clock) {
    Map stacks = clock->stack_by_thread;
    clock->stack_by_thread = (Map){0}; /* first: what tags hold may run Python */
    for (size_t i = 0; i < stacks.size; i++) {
        Stack *stack = stacks.cells[i].value;
        for (int j = 0; stack && j < stack->depth; j++) Py_XDECREF(stack->started[j].tag);
        PyMem_Free(stack);
    }
    map_clear(&stacks);
}

/* ---- observers ---- */

static Observation observe_clock(Observer *observer, Thread *Py_UNUSED(thread), const Reader *Py_UNUSED(reader),
                                 PyObject *const *Py_UNUSED(values), Py_ssize_t Py_UNUSED(count),
                                 const OpInputs *Py_UNUSED(op_inputs)) {
    ClockObserver *self = (ClockObserver *)observer;
    PyObject *tag = NULL;
    if (!self->clock) return CALL_PYTHON;
    if (!self->stops) return start(self->clock, self->number, NULL) ? CALL_PYTHON : OBSERVED;
    int failed = stop(self->clock, self->number, &tag);
    Py_XDECREF(tag);
    return failed ? OBSERVER_FAILED : OBSERVED;
}

static PyObject *clock_observer_call(ClockObserver *self, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    PyObject *tag = NULL;
    if (!self->clock) return PyErr_Format(PyExc_ValueError, "the observer has no clock");
    if (!self->stops && start(self->clock, self->number, NULL)) return PyErr_NoMemory();
    if (self->stops && stop(self->clock, self->number, &tag)) return NULL;
    Py_XDECREF(tag);
    Py_RETURN_NONE;
}

static PyObject *clock_observer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    ClockObserver *self = (ClockObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_clock;
    self->base.reads = NO_VALUES;
    return (PyObject *)self;
}

static int clock_observer_init(ClockObserver *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"clock", "number", "stops", NULL};
    PyObject *clock;
    int stops = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&|p", names, &Clock_Type, &clock, read_number, &self->number, &stops))
        return -1;
    self->stops = (char)stops;
    Py_XSETREF(self->clock, (Clock *)Py_NewRef(clock));
    return 0;
}

static int clock_observer_traverse(ClockObserver *self, visitproc visit, void *arg) {
    Py_VISIT(self->clock);
    return 0;
}

static void clock_observer_dealloc(ClockObserver *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->clock);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject ClockObserver_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.ClockObserver",
    .tp_basicsize = sizeof(ClockObserver),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "ClockObserver(clock, number, stops=False): routine that starts an execution before an op, or stops it after the op.",
    .tp_new = clock_observer_new,
    .tp_init = (initproc)clock_observer_init,
    .tp_call = (ternaryfunc)clock_observer_call,
    .tp_dealloc = (destructor)clock_observer_dealloc,
    .tp_traverse = (traverseproc)clock_observer_traverse,
};

/* ---- for Python ---- */

static PyObject *clock_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Clock *self = (Clock *)type->tp_alloc(type, 0);
    if (self) self->step_begin = -1;
    return (PyObject *)self;
}

static int clock_init(Clock *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", "on_thread", NULL};
    PyObject *on_thread = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|O", names, &self->limit, &on_thread)) return -1;
    Py_XSETREF(self->on_thread, on_thread == Py_None ? NULL : Py_NewRef(on_thread));
    return 0;
}

static PyObject *clock_start(Clock *self, PyObject *args) {
    uint32_t number;
    PyObject *tag = NULL;
    if (!PyArg_ParseTuple(args, "O&|O", read_number, &number, &tag)) return NULL;
    if (start(self, number, tag)) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *clock_stop(Clock *self, PyObject *argument) {
    uint32_t number;
    PyObject *tag = NULL;
    if (!read_number(argument, &number) || stop(self, number, &tag)) return NULL;
    return tag ? tag : Py_NewRef(Py_None);
}

static PyObject *clock_exclude(Clock *self, PyObject *argument) {
    long long excluded = PyLong_AsLongLong(argument);
    if (PyErr_Occurred()) return NULL;
    exclude(self, excluded);
    Py_RETURN_NONE;
}

static PyObject *clock_add(Clock *self, PyObject *args) {
    uint32_t number;
    long long begin, end;
    unsigned long thread;
    if (!PyArg_ParseTuple(args, "O&LLk", read_number, &number, &begin, &end, &thread)) return NULL;
    if (log_execution(self, number, begin, end, thread)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *clock_take(Clock *self, PyObject *argument) {
    uint32_t number;
    if (!read_number(argument, &number)) return NULL;
    if (number >= self->sum_count || !self->sums[number].executions) Py_RETURN_NONE;
    Sums sums = self->sums[number];
    self->sums[number] = (Sums){0};
    return Py_BuildValue("LLLLL", (long long)sums.executions, (long long)sums.total, (long long)sums.inner,
                         (long long)sums.least, (long long)sums.most);
}

static PyObject *clock_log(Clock *self, PyObject *Py_UNUSED(none)) {
    return PyBytes_FromStringAndSize((char *)self->log, self->log_count * (Py_ssize_t)sizeof *self->log);
}

static PyObject *clock_abandon(Clock *self, PyObject *Py_UNUSED(none)) {
    drop_stacks(self);
    Py_RETURN_NONE;
}

static PyObject *clock_clear(Clock *self, PyObject *Py_UNUSED(none)) {
    drop_stacks(self);
    map_clear(&self->logged_threads);
    PyMem_Free(self->log);
    PyMem_Free(self->sums);
    self->log = NULL;
    self->sums = NULL;
    self->sum_count = 0;
    self->log_count = self->log_room = 0;
    self->dropped = self->step_end = 0;
    self->step_begin = -1;
    Py_RETURN_NONE;
}

static PyObject *clock_reduce(Clock *self, PyObject *Py_UNUSED(none)) {
    PyObject *log = clock_log(self, NULL);
    if (!log) return NULL;
    return Py_BuildValue("O(n)(NOy#iLLL)", Py_TYPE(self), self->limit, log, self->on_thread ? self->on_thread : Py_None,
                         self->sums ? (char *)self->sums : "", (Py_ssize_t)(self->sum_count * sizeof *self->sums),
                         (int)self->recording, self->dropped, self->step_begin, self->step_end);
}

static PyObject *clock_setstate(Clock *self, PyObject *state) {
    const char *log, *sums;
    Py_ssize_t log_size, sums_size;
    PyObject *on_thread;
    int recording;
    long long dropped, step_begin, step_end;
    if (!PyArg_ParseTuple(state, "y#Oy#iLLL", &log, &log_size, &on_thread, &sums, &sums_size, &recording, &dropped,
                          &step_begin, &step_end))
        return NULL;
    Py_XDECREF(clock_clear(self, NULL));
    self->log = PyMem_Malloc((size_t)log_size + 1);
    self->sums = PyMem_Malloc((size_t)sums_size + 1);
    if (!self->log || !self->sums) {
        Py_XDECREF(clock_clear(self, NULL));
        return PyErr_NoMemory();
    }
    memcpy(self->log, log, (size_t)log_size);
    memcpy(self->sums, sums, (size_t)sums_size);
    self->log_count = self->log_room = log_size / (Py_ssize_t)sizeof *self->log;
    self->sum_count = (uint32_t)(sums_size / (Py_ssize_t)sizeof *self->sums);
    self->recording = (char)recording;
    self->dropped = dropped;
    self->step_begin = step_begin;
    self->step_end = step_end;
    for (Py_ssize_t i = 0; i < self->log_count; i++)
        if (map_set(&self->logged_threads, thread_key((unsigned long)self->log[i].thread), self)) return PyErr_NoMemory();
    Py_XSETREF(self->on_thread, on_thread == Py_None ? NULL : Py_NewRef(on_thread));
    Py_RETURN_NONE;
}

static int clock_traverse(Clock *self, visitproc visit, void *arg) {
    Py_VISIT(self->on_thread);
    for (size_t i = 0; i < self->stack_by_thread.size; i++) {
        const Stack *stack = self->stack_by_thread.cells[i].value;
        for (int j = 0; stack && j < stack->depth; j++) Py_VISIT(stack->started[j].tag);
    }
    return 0;
}

static int clock_tp_clear(Clock *self) {
    Py_CLEAR(self->on_thread);
    drop_stacks(self);
    return 0;
}

static void clock_dealloc(Clock *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->on_thread);
    Py_XDECREF(clock_clear(self, NULL));
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef clock_members[] = {
    {"recording", T_BOOL, offsetof(Clock, recording), 0, "Whether executions are started; false at first."},
    {"dropped", T_LONGLONG, offsetof(Clock, dropped), READONLY, "Number of executions for which the log had no room."},
    {"step_begin", T_LONGLONG, offsetof(Clock, step_begin), 0,
     "Earliest begin of the executions since it was set to -1; -1: there were none."},
    {"step_end", T_LONGLONG, offsetof(Clock, step_end), READONLY, "Latest end of all executions."},
    {0}};

static PyMethodDef clock_methods[] = {
    {"start", (PyCFunction)clock_start, METH_VARARGS, "start(number, tag=None): start an execution of an op on this thread, while recording."},
    {"stop", (PyCFunction)clock_stop, METH_O,
     "stop(number): stop the innermost execution of an op on this thread, and return its tag; nothing without one."},
    {"exclude", (PyCFunction)clock_exclude, METH_O,
     "exclude(nanoseconds): do not count them in the executions under way on this thread."},
    {"add", (PyCFunction)clock_add, METH_VARARGS, "add(number, begin, end, thread): log an execution that was measured otherwise."},
    {"take", (PyCFunction)clock_take, METH_O,
     "take(number): return and forget executions, total, inner, least and most nanoseconds of an op; None without executions."},
    {"log", (PyCFunction)clock_log, METH_NOARGS,
     "Return the executions in the order of their ends, four int64 each: number, begin, duration, and thread."},
    {"abandon", (PyCFunction)clock_abandon, METH_NOARGS, "Forget the executions under way."},
    {"clear", (PyCFunction)clock_clear, METH_NOARGS, "Forget all executions."},
    {"__reduce__", (PyCFunction)clock_reduce, METH_NOARGS, "Copy the clock without executions under way."},
    {"__setstate__", (PyCFunction)clock_setstate, METH_O, "Take over the executions of a copied clock."},
    {0}};

static PyTypeObject Clock_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Clock",
    .tp_basicsize = sizeof(Clock),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Clock(limit, on_thread=None): times of executions, which nest on each thread, by number of their op.\n\n"
              "limit: number of executions in the log; further ones are in the sums alone.\n"
              "on_thread(thread): called at the first logged execution of a thread, by the number of `threading.get_ident`.",
    .tp_new = clock_new,
    .tp_init = (initproc)clock_init,
    .tp_dealloc = (destructor)clock_dealloc,
    .tp_traverse = (traverseproc)clock_traverse,
    .tp_clear = (inquiry)clock_tp_clear,
    .tp_methods = clock_methods,
    .tp_members = clock_members,
};

int clock_boot(PyObject *names) {
    return add_type(names, "Clock", &Clock_Type) || add_type(names, "ClockObserver", &ClockObserver_Type);
}

/* A reentrant lock, without cost while no other thread waits for it: the GIL guards its fields. */
#include "interception/lock.h"

uint64_t forks; /* number of forks that led to this process: a lock that another thread held at a fork is free in the child */

/* Take a lock that another thread holds, or that has not been used since a fork; -1: a signal's handler raised. */
int lock_wait(Lock *lock, const Thread *thread) {
    if (lock->forks != forks) {
        if (lock->owner != thread) lock->depth = 0;
        lock->waiting = lock->open = 0;
        lock->gate = NULL;
        lock->forks = forks;
    }
    if (lock->depth && lock->owner != thread && !lock->gate) {
        lock->gate = PyThread_allocate_lock();
        if (!lock->gate) {
            PyErr_NoMemory();
            return -1;
        }
        PyThread_acquire_lock(lock->gate, WAIT_LOCK);
    }
    while (lock->depth && lock->owner != thread) {
        PyLockStatus status;
        lock->waiting++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(lock->gate, -1, 1);
        Py_END_ALLOW_THREADS
        lock->waiting--;
        if (status == PY_LOCK_ACQUIRED) lock->open = 0;
        else if (PyErr_CheckSignals()) return -1;
    }
    lock->owner = thread;
    lock->depth++;
    return 0;
}

void lock_open(Lock *lock) {
    if (lock->open) return;
    lock->open = 1;
    PyThread_release_lock(lock->gate);
}

static PyObject *lock_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    Lock *lock = (Lock *)type->tp_alloc(type, 0);
    if (lock) lock->forks = forks;
    return (PyObject *)lock;
}

static PyObject *lock_enter(Lock *self, PyObject *Py_UNUSED(none)) {
    return lock_acquire(self, thread_state()) ? NULL : Py_NewRef((PyObject *)self);
}

static PyObject *lock_exit(Lock *self, PyObject *Py_UNUSED(args)) {
    if (!self->depth || self->owner != thread_state()) {
        PyErr_SetString(PyExc_RuntimeError, "the lock is not held by this thread");
        return NULL;
    }
    lock_release(self);
    Py_RETURN_NONE;
}

static void lock_dealloc(Lock *self) {
    if (self->gate && self->forks == forks) {
        if (!self->open) PyThread_release_lock(self->gate);
        PyThread_free_lock(self->gate);
    }
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef lock_methods[] = {
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)lock_exit, METH_VARARGS, NULL},
    {0}};

PyTypeObject Lock_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Lock",
    .tp_basicsize = sizeof(Lock),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A reentrant lock; a process that forks finds it free in the child.",
    .tp_new = lock_new,
    .tp_dealloc = (destructor)lock_dealloc,
    .tp_methods = lock_methods,
};

static PyObject *forked(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    forks++;
    Py_RETURN_NONE;
}

static PyMethodDef forked_def = {"forked", forked, METH_NOARGS,
                                 "Free the locks that other threads held: call it in a forked child."};

int lock_boot(PyObject *names) { return add_function(names, &forked_def) || add_type(names, "Lock", &Lock_Type) ? -1 : 0; }

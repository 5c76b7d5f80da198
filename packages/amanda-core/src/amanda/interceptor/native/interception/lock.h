/* The lock of a tool, under which one of its routines runs at a time. */
#ifndef AMANDA_LOCK_H
#define AMANDA_LOCK_H
#include "interception/place.h"

typedef struct {
    PyObject_HEAD
    const Thread *owner;
    int depth, waiting, open; /* waiting: number of threads; open: the gate is released, and no thread has passed it yet */
    PyThread_type_lock gate; /* NULL until a thread has to wait */
    uint64_t forks; /* of the process when the fields were last valid */
} Lock;

extern PyTypeObject Lock_Type;
extern uint64_t forks;
int lock_wait(Lock *lock, const Thread *thread);
void lock_open(Lock *lock);
int lock_boot(PyObject *names);

static inline int lock_acquire(Lock *lock, const Thread *thread) { /* -1: an exception */
    if ((lock->depth && lock->owner != thread) || lock->forks != forks) return lock_wait(lock, thread);
    lock->owner = thread;
    lock->depth++;
    return 0;
}

static inline void lock_release(Lock *lock) {
    if (!--lock->depth && lock->waiting) lock_open(lock);
}

#endif

/* What every file of the native code starts from: CPython, hints for the compiler, names for Python. */
#ifndef AMANDA_BASE_H
#define AMANDA_BASE_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#ifdef Py_GIL_DISABLED
#error "the native interceptor needs the GIL; a free-threaded build is served by the pure-Python one"
#endif
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)
#define HOT __attribute__((hot))
#define COLD __attribute__((cold, noinline))
#define FLAT static inline __attribute__((always_inline))

#ifdef AMANDA_CHECKED
void disturb(void); /* where Python may run, a build for tests calls what a test has set */
#else
static inline void disturb(void) {}
#endif

static inline uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 6364136223846793005ULL + 1442695040888963407ULL;
    return hash ^ (hash >> 32);
}

/* Both put a name into the dict of the native face; -1 with an exception. */
int add_function(PyObject *names, PyMethodDef *def);
int add_type(PyObject *names, const char *name, PyTypeObject *type);

/* Like a tuple, no type here but PlanTable and CallCache has tp_clear: its objects are whole for as long as what
   dies in a collection may call them, and every cycle has another object that clears. */

#endif

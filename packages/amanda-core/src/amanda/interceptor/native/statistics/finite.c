/* Pairs of routines around an op that are called only where an output holds NaN or Inf. */
#include "statistics/finite.h"
#include "execution/observer.h"
#include <string.h>
#include <structmember.h>

#define READ_LIMIT (1 << 21) /* bytes: the GIL is held, and several threads of torch sum larger tensors faster */

/* A copy of an op's first input, from before the op. */
typedef struct {
    Py_ssize_t size; /* bytes */
    size_t room;     /* of the memory */
    int is_due;      /* the routine that was skipped is being called */
    char memory[];
} Copy;

typedef struct FiniteCheck {
    Observer base;
    struct FiniteCheck *before; /* owned; the routine before the op; NULL: this one is */
    Tally *tally;               /* owned; counts executions without a call; NULL: they are not counted */
    char skips;                 /* whether the routines are to be skipped where they can be */
    char copies;                /* of a routine before the op: the op writes its first input */
    Map copy_by_thread;         /* thread -> Copy of its execution under way, whose routine before the op was skipped */
} FiniteCheck;

static PyTypeObject FiniteCheck_Type;

/* ---- memory ---- */

#define INLINE static inline __attribute__((always_inline))
/* ALL_FINITE(name, word): whether no word at an address has all bits of the exponent set: whether the largest exponent has
   not.  A maximum waits for the one before it, so that both halves have one. */
#define ALL_FINITE(NAME, WORD)                                                                 \
    INLINE int NAME(const void *at, Py_ssize_t count, uint64_t mask) {                         \
        const Py_ssize_t half = count / 2;                                                     \
        const WORD *words = at, *second = words + half, exponent = (WORD)mask;                 \
        WORD most = count % 2 ? words[count - 1] & exponent : 0, most_2 = 0;                   \
        _Pragma("omp simd reduction(max : most, most_2)")                                      \
        for (Py_ssize_t i = 0; i < half; i++) {                                                \
            WORD number = words[i] & exponent, number_2 = second[i] & exponent;                \
            most = number > most ? number : most;                                              \
            most_2 = number_2 > most_2 ? number_2 : most_2;                                    \
        }                                                                                      \
        return most != exponent && most_2 != exponent;                                         \
    }

ALL_FINITE(are_finite_16, uint16_t)
ALL_FINITE(are_finite_32, uint32_t)
ALL_FINITE(are_finite_64, uint64_t)

/* ANY_WIDTH(name, attributes): the same for elements of any width. */
#define ANY_WIDTH(NAME, ATTRIBUTES)                                                                      \
    ATTRIBUTES static int NAME(const Memory *memory) {                                                   \
        if (memory->width == 2) return are_finite_16(memory->at, memory->count, memory->exponent);       \
        if (memory->width == 4) return are_finite_32(memory->at, memory->count, memory->exponent);       \
        return are_finite_64(memory->at, memory->count, memory->exponent);                               \
    }

ANY_WIDTH(is_finite_on_any_processor, )
static int (*is_finite_memory)(const Memory *) = is_finite_on_any_processor;

#if defined(__x86_64__) && defined(__GNUC__)
ANY_WIDTH(is_finite_by_avx2, __attribute__((target("avx2"))))
ANY_WIDTH(is_finite_by_avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
static void choose_vectors(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) is_finite_memory = is_finite_by_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        is_finite_memory = is_finite_by_avx512;
}
#else
static void choose_vectors(void) {}
#endif

/* Whether native code can tell that a value holds finite numbers alone. */
static int is_finite(const Reader *reader, PyObject *value) {
    Memory memory;
    if (!reader_is_tensor(reader, value)) return reader_is_plain(reader, value);
    if (!reader_host_memory(reader, value, &memory)) return 0;
    if (!memory.exponent || !memory.count) return 1; /* integers */
    return memory.count * memory.width <= READ_LIMIT && is_finite_memory(&memory);
}

/* ---- many arrays ---- */

#define UNLOCKED (1 << 16) /* bytes that are read without the GIL */

/* The bits of the exponent of a format of the buffer protocol; 0: its numbers are finite; -1: unknown. */
static int64_t exponent_of(const char *format) {
    if (*format == 'Z') format++; /* pairs of numbers */
    if (!format[0] || format[1]) return -1;
    switch (*format) {
        case 'e': return 0x7c00;
        case 'f': return 0x7f800000;
        case 'd': return 0x7ff0000000000000;
    }
    return strchr("?bBhHiIlLqQ", *format) ? 0 : -1;
}

/* Get the memory of an array that an object exports. 0: it exports none that is known here. */
static int get_memory(PyObject *array, Py_buffer *view, Memory *memory) {
    view->obj = NULL;
    if (array == Py_None || PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS)) {
        PyErr_Clear(); /* no memory, no such element type, or no array in one piece */
        return 0;
    }
    int64_t exponent = view->format ? exponent_of(view->format) : 0;
    int width = exponent == 0x7c00 ? 2 : exponent == 0x7f800000 ? 4 : 8;
    *memory = (Memory){.at = view->buf, .count = exponent ? view->len / width : 0, .width = width, .exponent = (uint64_t)exponent};
    return exponent >= 0 && (!memory->count || !((uintptr_t)view->buf % (uintptr_t)width)); /* a view of bytes may begin anywhere */
}

static PyObject *positions_of(const char *flags, Py_ssize_t count) {
    PyObject *positions = PyList_New(0);
    for (Py_ssize_t i = 0; positions && i < count; i++) {
        if (!flags[i]) continue;
        PyObject *position = PyLong_FromSsize_t(i);
        if (!position || PyList_Append(positions, position)) Py_CLEAR(positions);
        Py_XDECREF(position);
    }
    return positions;
}

static PyObject *nonfinite(PyObject *Py_UNUSED(none), PyObject *arrays) {
    if (!PyTuple_Check(arrays)) return PyErr_Format(PyExc_TypeError, "a tuple of arrays is wanted, not %R", arrays);
    Py_ssize_t count = PyTuple_GET_SIZE(arrays), bytes = 0;
    Py_buffer *views = PyMem_Calloc((size_t)count + 1, sizeof *views);
    Memory *memory = PyMem_Calloc((size_t)count + 1, sizeof *memory);
    char *flags = PyMem_Calloc((size_t)count + 1, 1); /* of arrays that are not finite */
    PyObject *positions = NULL;
    if (!views || !memory || !flags) PyErr_NoMemory();
    else {
        for (Py_ssize_t i = 0; i < count; i++) {
            flags[i] = !get_memory(PyTuple_GET_ITEM(arrays, i), &views[i], &memory[i]);
            if (flags[i]) memory[i].count = 0;
            bytes += (Py_ssize_t)(memory[i].count * memory[i].width);
        }
        PyThreadState *state = bytes >= UNLOCKED ? PyEval_SaveThread() : NULL;
        for (Py_ssize_t i = 0; i < count; i++)
            if (memory[i].count) flags[i] = !is_finite_memory(&memory[i]);
        if (state) PyEval_RestoreThread(state);
        for (Py_ssize_t i = 0; i < count; i++)
            if (views[i].obj) PyBuffer_Release(&views[i]);
        positions = positions_of(flags, count);
    }
    PyMem_Free(views);
    PyMem_Free(memory);
    PyMem_Free(flags);
    return positions;
}

static PyMethodDef nonfinite_def = {
    "nonfinite", nonfinite, METH_O,
    "nonfinite(arrays): return the positions in a tuple of arrays of those that are None, hold NaN or an infinity, or whose\n"
    "memory native code does not read."};

/* ---- before the op ---- */

static inline uint64_t thread_key(const Thread *thread) { return (uint64_t)(uintptr_t)thread; }

/* A copy that the next op uses again: memory that the system gives anew costs several times the copying. */
static Copy *spare_copy;

static void free_copy(Copy *copy) { PyMem_RawFree(__atomic_exchange_n(&spare_copy, copy, __ATOMIC_ACQ_REL)); }

/* Memory for a copy, of an earlier one if it has room; NULL: there is none. */
static Copy *new_copy(size_t size) {
    Copy *copy = __atomic_exchange_n(&spare_copy, NULL, __ATOMIC_ACQ_REL);
    if (copy && copy->room >= size) return copy;
    PyMem_RawFree(copy);
    if ((copy = PyMem_RawMalloc(sizeof(Copy) + size))) copy->room = size;
    return copy;
}

static void drop_copy(FiniteCheck *self, const Thread *thread) {
    Copy *copy = map_remove(&self->copy_by_thread, thread_key(thread));
    if (copy) free_copy(copy);
}

/* Keep the first input as it is before the op. 0: Python has to. */
static int copy_first_input(FiniteCheck *self, const Thread *thread, const Reader *reader, PyObject *const *values, Py_ssize_t count) {
    Memory memory;
    drop_copy(self, thread); /* of an execution that has raised */
    if (!count || !reader_is_tensor(reader, values[0]) || !reader_host_memory(reader, values[0], &memory)) return 0;
    Py_ssize_t size = memory.count * memory.width;
    if (memory.is_negated || size > READ_LIMIT) return 0;
    Copy *copy = new_copy((size_t)size);
    if (!copy) return 0;
    if (map_set(&self->copy_by_thread, thread_key(thread), copy)) {
        free_copy(copy);
        return 0;
    }
    copy->size = size;
    copy->is_due = 0;
    if (size) memcpy(copy->memory, memory.at, (size_t)size);
    return 1;
}

/* ---- after the op ---- */

/* Whether native code has skipped the routine before the op, at the execution under way on this thread. */
static int was_skipped(const FiniteCheck *before, const Thread *thread) {
    return before->skips && (!before->copies || map_get(&before->copy_by_thread, thread_key(thread)));
}

/* Call the routine before the op, which was skipped, with the op's inputs; -1: an exception. */
static int call_skipped(FiniteCheck *before, Thread *thread, const Reader *reader, PyObject *const *values, Py_ssize_t count) {
    int gradients = reader_gradients(reader, thread);
    PyObject **inputs = PyMem_Malloc((size_t)(count + 1) * sizeof *inputs); /* owned: a list may lose them */
    if (!inputs) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) inputs[i + 1] = Py_NewRef(values[i]);
    Copy *copy = map_get(&before->copy_by_thread, thread_key(thread));
    if (copy) copy->is_due = 1;
    if (gradients) reader_set_gradients(reader, thread, 0);
    thread->suspensions++;
    PyObject *result = PyObject_Vectorcall((PyObject *)before, inputs + 1, (size_t)count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    thread->suspensions--;
    if (gradients) reader_set_gradients(reader, thread, 1);
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(inputs[i + 1]);
    PyMem_Free(inputs);
    drop_copy(before, thread);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static Observation observe_finite(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                  Py_ssize_t count, const OpInputs *op_inputs) {
    FiniteCheck *self = (FiniteCheck *)observer, *before = self->before;
    if (!before) {
        if (self->copies && !self->skips) drop_copy(self, thread);
        return self->skips && (!self->copies || copy_first_input(self, thread, reader, values, count)) ? OBSERVED : CALL_PYTHON;
    }
    int skipped = was_skipped(before, thread), finite = self->skips && skipped;
    for (Py_ssize_t i = 0; finite && i < count; i++) finite = is_finite(reader, values[i]);
    if (!finite)
        return skipped && call_skipped(before, thread, reader, op_inputs->items, op_inputs->count) ? OBSERVER_FAILED : CALL_PYTHON;
    static const ShapeCode NO_SHAPES;
    if (self->tally) tally_count(self->tally, &NO_SHAPES);
    drop_copy(before, thread);
    return OBSERVED;
}

/* Python runs the rest of an execution, and the routine after the op. */
static int hand_over_finite(Observer *observer, Thread *thread, const Reader *reader, const OpInputs *op_inputs) {
    FiniteCheck *before = ((FiniteCheck *)observer)->before;
    if (!before || !was_skipped(before, thread)) return 0;
    return call_skipped(before, thread, reader, op_inputs->items, op_inputs->count);
}

static int is_idle_finite(const Observer *observer) {
    const FiniteCheck *self = (const FiniteCheck *)observer;
    return !self->before && self->skips && !self->copies;
}

/* ---- for Python ---- */

static PyObject *finite_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    FiniteCheck *self = (FiniteCheck *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_finite;
    self->base.hand_over = hand_over_finite;
    self->base.is_idle = is_idle_finite;
    return (PyObject *)self;
}

static int finite_init(FiniteCheck *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"before", "tally", NULL};
    PyObject *before = NULL, *tally = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O!O!", names, &FiniteCheck_Type, &before, &Tally_Type, &tally)) return -1;
    Py_XSETREF(self->before, (FiniteCheck *)Py_XNewRef(before));
    Py_XSETREF(self->tally, (Tally *)Py_XNewRef(tally));
    return 0;
}

static int finite_traverse(FiniteCheck *self, visitproc visit, void *arg) {
    Py_VISIT(self->before);
    Py_VISIT(self->tally);
    return 0;
}

static void finite_dealloc(FiniteCheck *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->before);
    Py_CLEAR(self->tally);
    for (size_t i = 0; i < self->copy_by_thread.size; i++) PyMem_RawFree(self->copy_by_thread.cells[i].value);
    map_clear(&self->copy_by_thread);
    PyMem_RawFree(__atomic_exchange_n(&spare_copy, NULL, __ATOMIC_ACQ_REL)); /* no memory outlives the tools */
    Py_TYPE(self)->tp_free(self);
}

static PyObject *finite_copy(FiniteCheck *self, void *Py_UNUSED(none)) {
    const Copy *copy = map_get(&self->copy_by_thread, thread_key(thread_state()));
    if (!copy || !copy->is_due) Py_RETURN_NONE; /* not due: left by an execution that has raised */
    return PyByteArray_FromStringAndSize(copy->memory, copy->size);
}

static PyMemberDef finite_members[] = {
    {"before", T_OBJECT, offsetof(FiniteCheck, before), READONLY, "Routine before the op; None: this one is."},
    {"skips", T_BOOL, offsetof(FiniteCheck, skips), 0, "Whether native code may skip the routine; false at first."},
    {"copies", T_BOOL, offsetof(FiniteCheck, copies), 0,
     "Of a routine before an op: whether the op writes its first input, so that native code keeps a copy."},
    {0}};

static PyGetSetDef finite_properties[] = {
    {"copy", (getter)finite_copy, NULL,
     "A copy of the first input's memory, from before the op; None unless the routine is called after the op has run.",
     NULL},
    {0}};

static PyTypeObject FiniteCheck_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.FiniteCheck",
    .tp_basicsize = sizeof(FiniteCheck),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "FiniteCheck(before=None, tally=None): base of observers that native code calls only where an output is not finite.\n\n"
              "A subclass defines __call__(*values).  Without `before` the object is the routine before an op or a backward\n"
              "op, with it the one after it.  Where both have `skips` set, and all outputs are tensors in host memory\n"
              "whose numbers are finite, neither is called, and `tally` counts the execution.  Else the routine before the\n"
              "op is called as well, but after the op: inputs that the op has written are no longer what they were.",
    .tp_new = finite_new,
    .tp_init = (initproc)finite_init,
    .tp_dealloc = (destructor)finite_dealloc,
    .tp_traverse = (traverseproc)finite_traverse,
    .tp_members = finite_members,
    .tp_getset = finite_properties,
};

int finite_boot(PyObject *names) {
    choose_vectors();
    return add_function(names, &nonfinite_def) || add_type(names, "FiniteCheck", &FiniteCheck_Type) ? -1 : 0;
}

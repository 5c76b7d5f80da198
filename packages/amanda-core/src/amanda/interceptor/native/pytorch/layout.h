/* How the tensors of PyTorch lie in memory, and what of them is read in line. Included by execution/tensors.h, which says
   what each function answers. */
#ifndef AMANDA_LAYOUT_H
#define AMANDA_LAYOUT_H
#include "execution/tensors.h"

#define UNVERSIONED ((uint64_t)-1)
#define TYPE_LIMIT 16
#define FUNCTION_LIMIT 8

typedef int32_t (*Describe)(const void *tensor, int64_t *out);
typedef bool (*Ask)(const void *);
typedef bool (*AskMode)(uint16_t);
typedef int32_t (*Sizes)(const void *tensor, int64_t **out);
typedef const void *const *(*Tangent)(const void *tensor, uint64_t level, const void *handle);

struct Reader {
    PyObject_HEAD
    /* what each routine takes comes first, in few lines of the cache */
    Py_ssize_t offset;
    const void *plain_kind; /* what a plain tensor begins with */
    struct { /* offsets in what the handle of a plain tensor points to; the functions are asked where it is not `available` */
        int available;
        Py_ssize_t counter, number; /* of the pointer to what counts writes, and of the 32 bits there that do */
        Py_ssize_t kind, rank;      /* of 32 bits for dtype and device, and of 64 for the rank */
        Py_ssize_t autodiff;        /* of a pointer that is NULL where the tensor needs no gradient */
        char *(*switches)(void);    /* of this thread; one of the bits there tells whether gradients are on */
        Py_ssize_t byte;
        unsigned char bit;
    } layout;
    PyTypeObject *tensors[TYPE_LIMIT], *plain[TYPE_LIMIT]; /* owned */
    int tensor_count, plain_count, mode_count;
    Describe describe[FUNCTION_LIMIT + 1]; /* ends with NULL */
    PyObject *extents;                     /* owned: name of an attribute */
    struct {
        AskMode ask;
        uint16_t which;
    } modes[FUNCTION_LIMIT];
    struct { /* what function transforms put around tensors; count 0: they are not known */
        Py_ssize_t content;                   /* offset of the pointer to the tensor within */
        int count, mode;                      /* mode: index of the mode in which a transform is in force */
        const void *kinds[FUNCTION_LIMIT];    /* what a wrapper begins with */
    } wrappers;
    Ask needs_gradient, unversioned;
    int64_t (*version)(const void *);
    bool (*gradients_on)(void);
    void (*set_gradients)(bool);
    uint64_t (*clock)(void);
    /* For values in the place of others; sizes is NULL where Python alone puts them there. */
    Sizes sizes;
    Describe rank;
    Tangent tangent;
    Ask is_leaf;
    Py_ssize_t memory;                   /* offset in a tensor of the pointer to its memory */
    const void *no_tangent;              /* what a plain tensor has for a tangent */
    PyObject *through;                   /* owned; through(original, value) */
};

static inline int among(PyTypeObject *const *types, int count, PyTypeObject *type) {
    for (int i = 0; i < count; i++)
        if (types[i] == type) return 1;
    return 0;
}

static inline const void *tensor_at(const Reader *reader, PyObject *value) {
    return (const char *)value + reader->offset;
}

static inline int reader_is_tensor(const Reader *reader, PyObject *value) {
    return among(reader->tensors, reader->tensor_count, Py_TYPE(value));
}

static inline const char *impl_with_layout(const Reader *reader, PyObject *value) { /* NULL: its layout is not known */
    const char *tensor = *(const char *const *)tensor_at(reader, value);
    return reader->layout.available && *(const void *const *)tensor == reader->plain_kind ? tensor : NULL;
}

/* ---- versions ---- */

static inline uint64_t tensor_version(const Reader *reader, PyObject *value) {
    const char *tensor = impl_with_layout(reader, value);
    if (tensor) {
        const char *counter = *(const char *const *)(tensor + reader->layout.counter);
        return counter ? *(const uint32_t *)(counter + reader->layout.number) : UNVERSIONED;
    }
    const void *handle = tensor_at(reader, value);
    return reader->unversioned(handle) ? UNVERSIONED : (uint64_t)reader->version(handle);
}

uint64_t reader_other_version(const Reader *reader, PyObject *value); /* of no tensor, but a list may hold some */

static inline uint64_t version_of(const Reader *reader, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == reader->tensors[0] || among(reader->tensors, reader->tensor_count, type))
        return tensor_version(reader, value);
    return reader_other_version(reader, value);
}

static inline void reader_versions(const Reader *reader, PyObject *const *values, Py_ssize_t count, uint64_t *versions) {
    for (Py_ssize_t i = 0; i < count; i++) versions[i] = version_of(reader, values[i]);
}

/* The first value that was written since its version was read; -1: none was. */
static inline Py_ssize_t reader_written(const Reader *reader, PyObject *const *values, Py_ssize_t count, const uint64_t *versions) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (versions[i] != UNVERSIONED && version_of(reader, values[i]) != versions[i]) return i;
    return -1;
}

/* ---- gradients ---- */

static inline char *switches_of(const Reader *reader, Thread *thread) {
    if (!thread->switches) thread->switches = reader->layout.switches();
    return thread->switches + reader->layout.byte;
}

static inline int reader_gradients(const Reader *reader, Thread *thread) {
    return reader->layout.available ? (*switches_of(reader, thread) & reader->layout.bit) != 0 : reader->gradients_on();
}

static inline void reader_set_gradients(const Reader *reader, Thread *thread, int on) {
    if (!reader->layout.available) reader->set_gradients(on);
    else if (on) *switches_of(reader, thread) |= (char)reader->layout.bit;
    else *switches_of(reader, thread) &= (char)~reader->layout.bit;
}

#endif

/* How the tensors of PyTorch lie in memory, and what of them is read in line. Included by execution/tensors.h, which says
   what each function answers. */
#ifndef AMANDA_LAYOUT_H
#define AMANDA_LAYOUT_H
#include "execution/tensors.h"

#define UNVERSIONED ((uint64_t)-1)
#define TYPE_LIMIT 16
#define FUNCTION_LIMIT 8
#define ELEMENT_LIMIT 16

typedef int32_t (*Describe)(const void *tensor, int64_t *out);
typedef bool (*Predicate)(const void *tensor);
typedef bool (*ModePredicate)(uint16_t mode);
typedef int32_t (*Sizes)(const void *tensor, int64_t **out);
typedef const void *const *(*Tangent)(const void *tensor, uint64_t level, const void *handle);

struct Reader {
    PyObject_HEAD
    /* The fields that each call of a routine reads come first, in few lines of the cache. */
    Py_ssize_t offset;      /* in a tensor's Python object, of its handle: a pointer to the TensorImpl */
    const void *plain_kind; /* first word of the TensorImpl of a plain tensor, which tells its class */
    struct { /* offsets in the TensorImpl of a plain tensor; the functions below are called where it is not `available` */
        int available;
        Py_ssize_t version_counter, version;  /* of the pointer to the counter of writes, and of 32 bits in the counter */
        Py_ssize_t dtype_and_device, rank;    /* of 32 bits, and of 64 */
        Py_ssize_t autograd;                  /* of a pointer that is NULL where the tensor needs no gradient */
        char *(*switches)(void);              /* returns this thread's switches, of which one is the grad mode */
        Py_ssize_t grad_mode_byte;
        unsigned char grad_mode_bit;
    } layout;
    PyTypeObject *tensors[TYPE_LIMIT], *plain[TYPE_LIMIT]; /* owned */
    int tensor_count, plain_count, mode_count;
    Describe describe[FUNCTION_LIMIT + 1]; /* functions that return dtype, rank and device; ends with NULL */
    PyObject *extents;                     /* owned: name of the attribute with a tensor's shape */
    struct {
        ModePredicate is_active;
        uint16_t number;
    } modes[FUNCTION_LIMIT];
    struct { /* wrappers that function transforms put around tensors; count 0: their layout is not known */
        Py_ssize_t content;                   /* offset of the pointer to the wrapped tensor */
        int count, mode;                      /* mode: index, in `modes`, of the transforms */
        const void *kinds[FUNCTION_LIMIT];    /* first word of a wrapper, which tells its class */
    } wrappers;
    Predicate needs_gradient, unversioned;
    int64_t (*version)(const void *);
    bool (*gradients_on)(void);
    void (*set_gradients)(bool);
    uint64_t (*clock)(void);
    /* For values of routines in the place of tensors; sizes is NULL where only Python puts them there. */
    Sizes sizes;
    Describe rank;
    Tangent tangent;
    Predicate is_leaf;
    Py_ssize_t storage;                  /* offset in the TensorImpl of the pointer to the storage */
    struct { /* of numbers in host memory; count 0: only Python reads them */
        Py_ssize_t data, size, start; /* offsets: in the storage, of the pointer to its memory and of its bytes; in the
                                         TensorImpl, of 64 bits */
        Sizes strides;
        Py_ssize_t keys;        /* offset in the TensorImpl of 64 bits, */
        uint64_t lazy_key;      /* of which this one says that the elements are the negatives of what is in memory */
        int count;
        struct {
            uint32_t dtype_and_device; /* as `layout.dtype_and_device` has them */
            int width;                 /* bytes */
            uint64_t exponent;
        } kinds[ELEMENT_LIMIT];
    } elements;
    const void *no_tangent;              /* tangent of a tensor that has none */
    PyObject *straight_through;          /* owned; called with an original and a value, returns the value */
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

/* The TensorImpl of a tensor; NULL: not a plain tensor, or of an unknown layout. */
static inline const char *impl_with_layout(const Reader *reader, PyObject *value) {
    const char *tensor = *(const char *const *)tensor_at(reader, value);
    return reader->layout.available && *(const void *const *)tensor == reader->plain_kind ? tensor : NULL;
}

/* ---- versions ---- */

static inline uint64_t tensor_version(const Reader *reader, PyObject *value) {
    const char *tensor = impl_with_layout(reader, value);
    if (tensor) {
        const char *counter = *(const char *const *)(tensor + reader->layout.version_counter);
        return counter ? *(const uint32_t *)(counter + reader->layout.version) : UNVERSIONED;
    }
    const void *handle = tensor_at(reader, value);
    return reader->unversioned(handle) ? UNVERSIONED : (uint64_t)reader->version(handle);
}

uint64_t reader_version_of_list(const Reader *reader, PyObject *value); /* UNVERSIONED for any other value */

static inline uint64_t version_of(const Reader *reader, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value);
    if (type == reader->tensors[0] || among(reader->tensors, reader->tensor_count, type))
        return tensor_version(reader, value);
    return reader_version_of_list(reader, value);
}

static inline void reader_versions(const Reader *reader, PyObject *const *values, Py_ssize_t count, uint64_t *versions) {
    for (Py_ssize_t i = 0; i < count; i++) versions[i] = version_of(reader, values[i]);
}

/* Position of the first value that was written since its version was read; -1: none was. */
static inline Py_ssize_t reader_written(const Reader *reader, PyObject *const *values, Py_ssize_t count, const uint64_t *versions) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (versions[i] != UNVERSIONED && version_of(reader, values[i]) != versions[i]) return i;
    return -1;
}

/* ---- gradients ---- */

static inline char *switches_of(const Reader *reader, Thread *thread) {
    if (!thread->switches) thread->switches = reader->layout.switches();
    return thread->switches + reader->layout.grad_mode_byte;
}

static inline int reader_gradients(const Reader *reader, Thread *thread) {
    return reader->layout.available ? (*switches_of(reader, thread) & reader->layout.grad_mode_bit) != 0 : reader->gradients_on();
}

static inline void reader_set_gradients(const Reader *reader, Thread *thread, int on) {
    if (!reader->layout.available) reader->set_gradients(on);
    else if (on) *switches_of(reader, thread) |= (char)reader->layout.grad_mode_bit;
    else *switches_of(reader, thread) &= (char)~reader->layout.grad_mode_bit;
}

#endif

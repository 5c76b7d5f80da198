/* The seam between the execution of plans and the tensors of a framework: all questions that native code has about a
   tensor. Defined in pytorch/, for the one framework whose ops are called often enough to need it. */
#ifndef AMANDA_TENSORS_H
#define AMANDA_TENSORS_H
#include "execution/tally.h"
#include "interception/site.h"

/* Key of a call's form; 0: only Python can tell the form. sized: whether other extents make another form. */
uint64_t reader_key(const Reader *reader, Thread *thread, const Arguments *arguments, int sized, int *gradients);
int reader_is_plain(const Reader *reader, PyObject *value);
int python_mode_active(const Reader *reader); /* whether a mode is in force in which Python has to run the plans */
uint64_t reader_clock(const Reader *reader);
int reader_needs_gradient(const Reader *reader, PyObject *tensor);
int reader_is_leaf(const Reader *reader, PyObject *tensor); /* of a plain tensor */
const void *reader_memory(const Reader *reader, PyObject *tensor); /* address of the storage; NULL: not a plain tensor */

/* Memory of a tensor's numbers.  width: bytes of each.  exponent: bits that are all set in what is not finite; 0: integers. */
typedef struct {
    const void *at;
    Py_ssize_t count;
    int width, is_negated, is_dense; /* is_dense: each number is an element, and each element once, not negated */
    uint64_t exponent;
} Memory;
/* Whether a value is a plain tensor of a known element type in host memory, whose storage holds all of it; the span of a view
   has the numbers between its elements too. */
int reader_host_memory(const Reader *reader, PyObject *tensor, Memory *memory);
/* Address of a plain tensor's storage, of its memory, which may be NULL, and its bytes; NULL: only Python can tell. */
const void *reader_storage(const Reader *reader, PyObject *tensor, const void **data, int64_t *size);
/* Where the elements of a plain tensor lie in its storage, in elements from the start.  kind: of element type and device. */
typedef struct {
    const void *storage;
    int64_t start, rank;
    const int64_t *sizes, *strides;
    uint32_t kind;
} Layout;
int reader_layout(const Reader *reader, PyObject *tensor, Layout *layout); /* 0: only Python can tell */
PyObject *storage_of(PyObject *tensor); /* new; as Python has it */
int64_t width_of(PyObject *tensor);     /* bytes of an element, as Python has them; -1: an exception */
/* Add the shapes of inputs, of outputs, ... as words. */
void reader_shape_code(const Reader *reader, PyObject *const *values, Py_ssize_t count, ShapeCode *words);
PyObject *reader_shapes(const Reader *reader, PyObject *const *values, Py_ssize_t count,
                        PyObject *before); /* new; `before` itself if it equals the shapes; NULL: an exception */
int can_substitute(const Reader *reader, PyObject *original, PyObject *value);
PyObject *with_straight_through(const Reader *reader, PyObject *original, PyObject *value, int gradients);

/* Called for every argument of every routine, and so defined in line, in the framework's header. */
static inline int reader_is_tensor(const Reader *reader, PyObject *value);
static inline uint64_t tensor_version(const Reader *reader, PyObject *tensor);
static inline void reader_versions(const Reader *reader, PyObject *const *values, Py_ssize_t count, uint64_t *versions);
/* Position of the first value that was written since its version was read; -1: none was. */
static inline Py_ssize_t reader_written(const Reader *reader, PyObject *const *values, Py_ssize_t count,
                                        const uint64_t *versions);
static inline int reader_gradients(const Reader *reader, Thread *thread);
static inline void reader_set_gradients(const Reader *reader, Thread *thread, int on);

/* The marks that executions leave at their backward ops. */
extern PyTypeObject BackwardMarker_Type;
int marker_reads_written(PyObject *marker); /* whether it takes the value that the op wrote */
int mark_backward_nodes(PyObject *marker, uint64_t begin, uint64_t start, uint64_t end, PyObject *outputs, PyObject *written,
               PyObject *shapes);

#include "pytorch/layout.h"

#endif

/* Moments and a histogram of floating-point numbers in memory, in one pass.

   Each block of numbers is read while it is in the cache, by loops that the compiler turns into vector code; sums of
   blocks are put together by the formula of Chan, Golub, LeVeque 1979. Bins divide each power of two evenly, as those
   of DDSketch with a linearly interpolated logarithm do: Masson, Rim, Lee 2019. */
#include "statistics/moments.h"
#include <float.h>
#include <math.h>
#include <string.h>

#define BLOCK 4096
#define LOWEST (-88) /* magnitudes from 2**LOWEST have bins of their own, */
#define OCTAVES 128  /* in so many powers of two */
#define BITS_LIMIT 16
#define TABLES 4          /* neighbours are counted apart: they are often in one bin, and would wait for one another */
#define TABLE_LIMIT 4104  /* bins that a table has room for */
#define SHARED (1 << 15)  /* so many numbers are measured without the GIL, where tables suffice */

typedef struct {
    int64_t count; /* of finite numbers, which the next ones are of */
    double mean, squares /* of distances from the mean */, magnitudes, least, most;
    int64_t nan, inf, negative_inf, zeros;
} Sums;

typedef struct {
    PyObject_HEAD
    Sums sums;
    int bits, side, total; /* of a bin; bins of one sign, of both and zero's; 0: there is no histogram */
    int64_t *counts;       /* NULL: none was counted */
} Moments;

static const Sums NONE = {.least = INFINITY, .most = -INFINITY};

static void merge(Sums *sums, const Sums *more) {
    int64_t count = sums->count + more->count;
    if (more->count && !sums->count) { /* a square that overflows is not multiplied by 0 */
        sums->mean = more->mean;
        sums->squares = more->squares;
        sums->magnitudes = more->magnitudes;
        sums->least = more->least;
        sums->most = more->most;
    } else if (more->count) {
        double share = (double)more->count / (double)count, distance = more->mean - sums->mean;
        sums->mean = isfinite(distance) ? sums->mean + distance * share : sums->mean * (1 - share) + more->mean * share;
        sums->squares += more->squares + distance * distance * (double)sums->count * share;
        sums->magnitudes += more->magnitudes;
        if (more->least < sums->least) sums->least = more->least;
        if (more->most > sums->most) sums->most = more->most;
    }
    sums->count = count;
    sums->nan += more->nan;
    sums->inf += more->inf;
    sums->negative_inf += more->negative_inf;
    sums->zeros += more->zeros;
}

/* ---- a block ---- */

/* BLOCK_OF(name, number, word, largest, mantissa, bias): sums of `count` numbers, and how many are not finite, in which
   case the sums are worth nothing; where `side` is not 0, the bin of each as well. */
#define BLOCK_OF(NAME, NUMBER, WORD, LARGEST, MANTISSA, BIAS)                                                         \
    INLINE int NAME(const NUMBER *restrict at, int count, Sums *sums, int32_t *restrict bins, int bits, int side) {   \
        double total = 0, magnitudes = 0, squares = 0;                                                                \
        NUMBER least = INFINITY, most = -INFINITY;                                                                    \
        int zeros = 0, non_finite = 0;                                                                                       \
        _Pragma("omp simd reduction(+ : total, magnitudes, zeros, non_finite) reduction(min : least) reduction(max : most)") \
        for (int i = 0; i < count; i++) {                                                                             \
            NUMBER number = at[i], magnitude = number < 0 ? -number : number;                                         \
            total += number;                                                                                          \
            magnitudes += magnitude;                                                                                  \
            least = number < least ? number : least;                                                                  \
            most = number > most ? number : most;                                                                     \
            zeros += number == 0;                                                                                     \
            non_finite += !(magnitude <= LARGEST);                                                                           \
        }                                                                                                             \
        if (non_finite) return non_finite;                                                                                          \
        double mean = total / count;                                                                                  \
        if (!isfinite(mean)) { /* the sum overflows, the mean of finite numbers does not */                           \
            mean = 0;                                                                                                 \
            for (int i = 0; i < count; i++) mean += (double)at[i] / count;                                            \
        }                                                                                                             \
        _Pragma("omp simd reduction(+ : squares)")                                                                    \
        for (int i = 0; i < count; i++) {                                                                             \
            double distance = at[i] - mean;                                                                           \
            squares += distance * distance;                                                                           \
        }                                                                                                             \
        *sums = (Sums){count, mean, squares, magnitudes, (double)least, (double)most, 0, 0, 0, zeros};                \
        if (!side) return 0;                                                                                          \
        const int shift = MANTISSA - bits, first = ((BIAS + LOWEST) << bits) - 1;                                     \
        _Pragma("omp simd")                                                                                           \
        for (int i = 0; i < count; i++) {                                                                             \
            WORD word;                                                                                                \
            memcpy(&word, at + i, sizeof word);                                                                       \
            WORD magnitude = word & ~((WORD)1 << (8 * sizeof(WORD) - 1));                                             \
            int32_t place = (int32_t)(magnitude >> shift) - first;                                                    \
            place = (place < 0 ? 0 : place >= side ? side - 1 : place) + 1;                                           \
            place = magnitude ? place : 0;                                                                            \
            bins[i] = side + (word == magnitude ? place : -place);                                                    \
        }                                                                                                             \
        return 0;                                                                                                     \
    }

#define INLINE static inline __attribute__((always_inline))
BLOCK_OF(floats, float, uint32_t, FLT_MAX, 23, 127)
BLOCK_OF(doubles, double, uint64_t, DBL_MAX, 52, 1023)

/* Numbers of either width: one of `floats` and `doubles` is given. */
#define EITHER(NAME, ATTRIBUTES)                                                                                   \
    ATTRIBUTES static int NAME(const void *at, int is_float, int count, Sums *sums, int32_t *bins, int bits, int side) { \
        return is_float ? floats(at, count, sums, bins, bits, side) : doubles(at, count, sums, bins, bits, side);  \
    }

EITHER(of_any_processor, )
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_WIDER 1
EITHER(of_avx2, __attribute__((target("avx2,fma"))))
EITHER(of_avx512, __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))))
#endif

static int (*block_of)(const void *, int, int, Sums *, int32_t *, int, int) = of_any_processor;

static void choose_vectors(void) {
#ifdef HAS_WIDER
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) block_of = of_avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        block_of = of_avx512;
#endif
}

/* Moves the finite numbers of a block together and counts the others: how many are finite. */
static int copy_finite(const char *at, int is_float, int count, void *finite_numbers, Sums *sums) {
    int finite = 0;
    for (int i = 0; i < count; i++) {
        double number = is_float ? ((const float *)at)[i] : ((const double *)at)[i];
        if (isnan(number)) sums->nan++;
        else if (isinf(number)) number > 0 ? sums->inf++ : sums->negative_inf++;
        else if (is_float) ((float *)finite_numbers)[finite++] = (float)number;
        else ((double *)finite_numbers)[finite++] = number;
    }
    return finite;
}

/* ---- an array ---- */

typedef uint32_t Table[TABLE_LIMIT];

typedef struct {
    Table *tables;
    int32_t bins[BLOCK];
    double finite_numbers[BLOCK];
} Scratch; /* on the stack: from the heap it would be value back to the system, and made anew, for each array */

static void add_block(Sums *sums, int64_t *counts, Scratch *scratch, const char *at, int is_float, int count, int bits,
                      int side) {
    Sums block = NONE;
    if (block_of(at, is_float, count, &block, scratch->bins, bits, side)) {
        count = copy_finite(at, is_float, count, scratch->finite_numbers, &block);
        Sums finite = NONE;
        if (count) block_of(scratch->finite_numbers, is_float, count, &finite, scratch->bins, bits, side);
        merge(&block, &finite);
    }
    merge(sums, &block);
    if (!side) return;
    const int32_t *bins = scratch->bins;
    int i = 0;
    if (counts) {
        for (; i < count; i++) counts[bins[i]]++;
        return;
    }
    for (; i + TABLES <= count; i += TABLES)
        for (int table = 0; table < TABLES; table++) scratch->tables[table][bins[i + table]]++;
    for (; i < count; i++) scratch->tables[0][bins[i]]++;
}

/* counts: where each number is counted at once; NULL: in the tables of the scratch memory. */
static void measure(Sums *sums, int64_t *counts, Scratch *scratch, const char *at, int is_float, int64_t size, int bits,
                    int side) {
    int width = is_float ? sizeof(float) : sizeof(double);
    for (int64_t start = 0; start < size; start += BLOCK) {
        int count = size - start < BLOCK ? (int)(size - start) : BLOCK;
        add_block(sums, counts, scratch, at + start * width, is_float, count, bits, side);
    }
}

/* ---- for Python ---- */

static int make_counts(Moments *self) {
    if (self->total && !self->counts && !(self->counts = PyMem_Calloc((size_t)self->total, sizeof *self->counts))) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int add_tabled(Moments *self, const Py_buffer *view, int is_float, int64_t size, Scratch *scratch) {
    const int64_t most = (int64_t)1 << 30; /* what a table counts does not overflow */
    scratch->tables = NULL;
    if (self->total && !(scratch->tables = PyMem_RawMalloc(TABLES * sizeof(Table)))) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t start = 0; start < size; start += most) {
        Sums sums = NONE; /* another thread may add to this object meanwhile */
        Py_BEGIN_ALLOW_THREADS
        if (scratch->tables) memset(scratch->tables, 0, TABLES * sizeof(Table));
        measure(&sums, NULL, scratch, (const char *)view->buf + start * view->itemsize, is_float,
                size - start < most ? size - start : most, self->bits, self->side);
        Py_END_ALLOW_THREADS
        merge(&self->sums, &sums);
        for (int i = 0; i < self->total; i++) { /* most are empty, and what they are added to is not in the cache */
            int64_t calls = 0;
            for (int table = 0; table < TABLES; table++) calls += scratch->tables[table][i];
            if (calls) self->counts[i] += calls;
        }
    }
    PyMem_RawFree(scratch->tables);
    return 0;
}

static int add_view(Moments *self, const Py_buffer *view) {
    int is_float = view->itemsize == sizeof(float);
    int64_t size = view->len / view->itemsize;
    Scratch scratch;
    if (make_counts(self)) return -1;
    if (self->total <= TABLE_LIMIT && size >= SHARED) return add_tabled(self, view, is_float, size, &scratch);
    measure(&self->sums, self->counts, &scratch, view->buf, is_float, size, self->bits, self->side);
    return 0;
}

static PyObject *moments_add(Moments *self, PyObject *numbers) {
    Py_buffer view;
    if (PyObject_GetBuffer(numbers, &view, PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
        PyErr_Clear(); /* no memory, no such element type, or no array in one piece */
        Py_RETURN_FALSE;
    }
    int is_floating = view.format && (!strcmp(view.format, "f") || !strcmp(view.format, "d"));
    int failed = is_floating && view.len && add_view(self, &view);
    PyBuffer_Release(&view);
    return failed ? NULL : PyBool_FromLong(is_floating);
}

static PyObject *moments_merge(Moments *self, PyObject *value) {
    if (!PyObject_TypeCheck(value, Py_TYPE(self)) || ((Moments *)value)->total != self->total)
        return PyErr_Format(PyExc_TypeError, "Moments with the same bins are wanted, not %R", value);
    Moments *more = (Moments *)value;
    if (more->counts) {
        if (make_counts(self)) return NULL;
        for (int i = 0; i < self->total; i++) self->counts[i] += more->counts[i];
    }
    merge(&self->sums, &more->sums);
    Py_RETURN_NONE;
}

static PyObject *moments_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"bits", NULL};
    int bits = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|i", names, &bits)) return NULL;
    if (bits < -1 || bits > BITS_LIMIT) return PyErr_Format(PyExc_ValueError, "bits is %d; give -1 to %d", bits, BITS_LIMIT);
    Moments *self = (Moments *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->sums = NONE;
    if (bits >= 0) {
        self->bits = bits;
        self->side = (OCTAVES << bits) + 2;
        self->total = 2 * self->side + 1;
    }
    return (PyObject *)self;
}

static void moments_dealloc(Moments *self) {
    PyMem_Free(self->counts);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *moments_numbers(Moments *self, void *Py_UNUSED(none)) {
    const Sums *sums = &self->sums;
    return Py_BuildValue("LdddddLLLL", (long long)sums->count, sums->mean, sums->squares, sums->magnitudes, sums->least,
                         sums->most, (long long)sums->nan, (long long)sums->inf, (long long)sums->negative_inf,
                         (long long)sums->zeros);
}

static PyObject *moments_counts(Moments *self, void *Py_UNUSED(none)) {
    if (!self->counts) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((const char *)self->counts, (Py_ssize_t)self->total * (Py_ssize_t)sizeof *self->counts);
}

static PyMethodDef moments_methods[] = {
    {"add", (PyCFunction)moments_add, METH_O,
     "add(array): add the numbers of an array; return False unless they are floats or doubles in contiguous memory."},
    {"merge", (PyCFunction)moments_merge, METH_O, "merge(moments): add the numbers of other Moments, of the same bins."},
    {0}};

static PyGetSetDef moments_fields[] = {
    {"numbers", (getter)moments_numbers, NULL,
     "Count, mean, squared distances from the mean, sum of magnitudes, least and largest of the finite numbers; then\n"
     "the numbers of NaN, inf, -inf and zero.", NULL},
    {"counts", (getter)moments_counts, NULL, "How many are in each bin, int64 in bytes; None where nothing was counted.", NULL},
    {0}};

static PyTypeObject Moments_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Moments",
    .tp_basicsize = sizeof(Moments),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Moments(bits=-1): statistics of the numbers of arrays, read in one pass.\n\n"
              "bits: number of bits of the mantissa by which the bins of a histogram differ, up to 16; -1 for no histogram.",
    .tp_new = moments_new,
    .tp_dealloc = (destructor)moments_dealloc,
    .tp_methods = moments_methods,
    .tp_getset = moments_fields,
};

int moments_boot(PyObject *names) {
    choose_vectors();
    return add_type(names, "Moments", &Moments_Type);
}

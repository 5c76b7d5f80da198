/* Moments and a histogram of floating-point numbers in memory, in one pass.

   Each block of numbers is read while it is in the cache, by loops that the compiler turns into vector code; sums of
   blocks are put together by the formula of Chan, Golub, LeVeque 1979. Bins divide each power of two evenly, as those
   of DDSketch with a linearly interpolated logarithm do: Masson, Rim, Lee 2019. */
#include "statistics/moments.h"
#include "execution/observer.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define BLOCK 4096
#define LOWEST (-88) /* magnitudes from 2**LOWEST have bins of their own, */
#define OCTAVES 128  /* in so many powers of two */
#define BITS_LIMIT 16
#define TABLES 4          /* neighbours are counted apart: they are often in one bin, and would wait for one another */
#define TABLE_LIMIT 4104  /* bins that a table has room for */
#define MEASURED_LIMIT 32 /* values of an op */
#define SHARED (1 << 15)  /* so many numbers are measured without the GIL, where tables suffice */
#define REPEATED (1 << 14) /* floats from which on memory that several arrays share is measured once */

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

/* BLOCK_OF(name, number, word, mantissa, bias): sums of `count` numbers, and how many are not finite, in which
   case the sums are worth nothing; where `side` is not 0, the bin of each as well, of equal numbers that of the first alone.
   A sum waits for the one before it, so that parts of the block have sums of their own. */
#define BLOCK_OF(NAME, NUMBER, WORD, MANTISSA, BIAS)                                                                  \
    INLINE int NAME(const NUMBER *restrict at, int count, Sums *sums, int32_t *restrict bins, int bits, int side) {   \
        const int half = count / 2, quarter = count / 4;                                                              \
        const NUMBER *restrict second = at + half;                                                                    \
        double total = 0, magnitudes = 0, squares = 0, total_2 = 0, magnitudes_2 = 0;                                 \
        NUMBER least = INFINITY, most = -INFINITY, least_2 = INFINITY, most_2 = -INFINITY;                            \
        WORD zeros = 0, zeros_2 = 0;                                                                                  \
        _Pragma("omp simd reduction(+:total,magnitudes,total_2,magnitudes_2,zeros,zeros_2) reduction(min:least,least_2) reduction(max:most,most_2)") \
        for (int i = 0; i < half; i++) {                                                                              \
            READ(NUMBER, at[i], total, magnitudes, least, most, zeros)                                                \
            READ(NUMBER, second[i], total_2, magnitudes_2, least_2, most_2, zeros_2)                                  \
        }                                                                                                             \
        if (count % 2) READ(NUMBER, at[count - 1], total, magnitudes, least, most, zeros)                             \
        double mean = (total + total_2) / count;                                                                      \
        if (!isfinite(mean)) { /* or the sum overflows, and the mean of finite numbers does not */                    \
            int non_finite = 0;                                                                                       \
            for (int i = 0; i < count; i++) non_finite += !isfinite(at[i]);                                           \
            if (non_finite) return non_finite;                                                                        \
            mean = 0;                                                                                                 \
            for (int i = 0; i < count; i++) mean += (double)at[i] / count;                                            \
        }                                                                                                             \
        double squares_2 = 0, squares_3 = 0, squares_4 = 0;                                                           \
        const NUMBER low = least < least_2 ? least : least_2, high = most > most_2 ? most : most_2;                   \
        /* Not what compares equal to 0: where the processor takes subnormal numbers for 0, their bins differ. */      \
        const int is_constant = low == high && low != 0, spread = is_constant && mean == (double)low ? 0 : quarter;   \
        _Pragma("omp simd reduction(+ : squares, squares_2, squares_3, squares_4)")                                   \
        for (int i = 0; i < spread; i++) {                                                                            \
            double distance = at[i] - mean, distance_2 = at[i + quarter] - mean;                                      \
            double distance_3 = at[i + 2 * quarter] - mean, distance_4 = at[i + 3 * quarter] - mean;                  \
            squares += distance * distance;                                                                           \
            squares_2 += distance_2 * distance_2;                                                                     \
            squares_3 += distance_3 * distance_3;                                                                     \
            squares_4 += distance_4 * distance_4;                                                                     \
        }                                                                                                             \
        for (int i = 4 * quarter; i < count; i++) squares += (at[i] - mean) * (at[i] - mean);                         \
        *sums = (Sums){count, mean, squares + squares_2 + squares_3 + squares_4, magnitudes + magnitudes_2,           \
                       (double)low, (double)high, 0, 0, 0, (int64_t)(zeros + zeros_2)};                               \
        if (!side) return 0;                                                                                          \
        /* Places are clamped before they count from 1: so the compiler takes one instruction for each bound. */      \
        const int shift = MANTISSA - bits, first = ((BIAS + LOWEST) << bits) - 1, last = first + side - 1;            \
        _Pragma("omp simd")                                                                                           \
        for (int i = 0; i < (is_constant ? 1 : count); i++) {                                                         \
            WORD word;                                                                                                \
            memcpy(&word, at + i, sizeof word);                                                                       \
            WORD magnitude = word & ~((WORD)1 << (8 * sizeof(WORD) - 1));                                             \
            int32_t place = (int32_t)(magnitude >> shift);                                                            \
            place = place > first ? place : first;                                                                    \
            place = place < last ? place : last;                                                                      \
            place = magnitude ? place - (first - 1) : 0;                                                              \
            bins[i] = side + (word == magnitude ? place : -place);                                                    \
        }                                                                                                             \
        return 0;                                                                                                     \
    }

#define READ(NUMBER, ITEM, TOTAL, MAGNITUDES, LEAST, MOST, ZEROS) \
    {                                                             \
        NUMBER number = ITEM;                                     \
        TOTAL += number;                                          \
        MAGNITUDES += fabs((double)number);                       \
        LEAST = number < LEAST ? number : LEAST;                  \
        MOST = number > MOST ? number : MOST;                     \
        ZEROS += number == 0;                                     \
    }

#define INLINE static inline __attribute__((always_inline))
BLOCK_OF(floats, float, uint32_t, 23, 127)
BLOCK_OF(doubles, double, uint64_t, 52, 1023)

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

/* Whether all bits of a block are 0, as of gradients that do not arrive, and of what a mask leaves out: a few words tell
   where not. */
static int is_zero(const char *at, int width, int count) {
    static const double zero;
    return !memcmp(at, &zero, (size_t)width) && !memcmp(at, at + width, (size_t)width * (size_t)(count - 1));
}

static void add_block(Sums *sums, int64_t *counts, Scratch *scratch, const char *at, int is_float, int count, int bits,
                      int side) {
    Sums block = NONE;
    if (is_zero(at, is_float ? sizeof(float) : sizeof(double), count)) {
        block = (Sums){.count = count, .zeros = count};
        merge(sums, &block);
        if (!side) return;
        if (counts) counts[side] += count;
        else scratch->tables[0][side] += (uint32_t)count;
        return;
    }
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
    if (count && block.least == block.most && block.least != 0) { /* equal numbers: the first has the bin of all */
        if (counts) counts[bins[0]] += count;
        else scratch->tables[0][bins[0]] += (uint32_t)count;
        return;
    }
    if (counts) {
        for (; i + 2 <= count; i += 2) { /* one read gives two bins, whichever comes first */
            uint64_t pair;
            memcpy(&pair, bins + i, sizeof pair);
            counts[(uint32_t)pair]++;
            counts[pair >> 32]++;
        }
        for (; i < count; i++) counts[bins[i]]++;
        return;
    }
    Table *tables = scratch->tables;
    for (; i + TABLES <= count; i += TABLES) {
        uint64_t pairs[TABLES / 2];
        memcpy(pairs, bins + i, sizeof pairs);
        for (int table = 0; table < TABLES; table += 2) {
            tables[table][(uint32_t)pairs[table / 2]]++;
            tables[table + 1][pairs[table / 2] >> 32]++;
        }
    }
    for (; i < count; i++) tables[0][bins[i]]++;
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

static int add_tabled(Moments *self, const char *at, int is_float, int64_t size, Scratch *scratch) {
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
        measure(&sums, NULL, scratch, at + start * (Py_ssize_t)(is_float ? sizeof(float) : sizeof(double)), is_float,
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

static int add_numbers(Moments *self, const void *at, int is_float, int64_t size) {
    Scratch scratch;
    if (make_counts(self)) return -1;
    if (self->total <= TABLE_LIMIT && size >= SHARED) return add_tabled(self, at, is_float, size, &scratch);
    measure(&self->sums, self->counts, &scratch, at, is_float, size, self->bits, self->side);
    return 0;
}

static PyObject *moments_add(Moments *self, PyObject *numbers) {
    Py_buffer view;
    if (PyObject_GetBuffer(numbers, &view, PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
        PyErr_Clear(); /* no memory, no such element type, or no array in one piece */
        Py_RETURN_FALSE;
    }
    int floating = view.format && (!strcmp(view.format, "f") || !strcmp(view.format, "d")) &&
                   (!view.len || !((uintptr_t)view.buf % (uintptr_t)view.itemsize)); /* a view of bytes may begin anywhere */
    int failed = floating && view.len && add_numbers(self, view.buf, view.itemsize == sizeof(float), view.len / view.itemsize);
    PyBuffer_Release(&view);
    return failed ? NULL : PyBool_FromLong(floating);
}

static int merge_moments(Moments *self, const Moments *more) {
    if (more->counts) {
        if (make_counts(self)) return -1;
        for (int i = 0; i < self->total; i++) self->counts[i] += more->counts[i];
    }
    merge(&self->sums, &more->sums);
    return 0;
}

static PyObject *moments_merge(Moments *self, PyObject *value) {
    if (!PyObject_TypeCheck(value, Py_TYPE(self)) || ((Moments *)value)->total != self->total)
        return PyErr_Format(PyExc_TypeError, "Moments with the same bins are wanted, not %R", value);
    if (merge_moments(self, (Moments *)value)) return NULL;
    Py_RETURN_NONE;
}

/* ---- many arrays ---- */

/* Numbers as doubles; -1: of no type that is known here. */
static int widen(const char *at, char format, int count, double *numbers) {
#define AS(FORMAT, NUMBER)                                                            \
    case FORMAT:                                                                      \
        for (int i = 0; i < count; i++) numbers[i] = (double)((const NUMBER *)at)[i]; \
        return 0;
    switch (format) {
        AS('?', unsigned char) AS('b', signed char) AS('B', unsigned char) AS('h', short) AS('H', unsigned short)
        AS('i', int) AS('I', unsigned) AS('l', long) AS('L', unsigned long) AS('q', long long) AS('Q', unsigned long long)
    }
    return -1;
}

/* One of many arrays that are measured together. */
typedef struct {
    Py_buffer view;    /* obj is NULL: none is held */
    Moments *moments;  /* borrowed */
    Py_ssize_t number; /* its place among the arrays */
    int is_repeated;   /* memory of several arrays, of which an earlier one was measured */
} Measured;

static int is_floating(const Py_buffer *view) { return *view->format == 'f' || *view->format == 'd'; }
static Py_ssize_t numbers_in(const Py_buffer *view) { return view->itemsize ? view->len / view->itemsize : 0; }

static int by_memory(const void *left, const void *right) {
    const Measured *one = *(Measured *const *)left, *other = *(Measured *const *)right;
    uintptr_t at = (uintptr_t)one->view.buf, other_at = (uintptr_t)other->view.buf;
    if (at != other_at) return at < other_at ? -1 : 1;
    if (one->view.len != other->view.len) return one->view.len < other->view.len ? -1 : 1;
    return one->number < other->number ? -1 : 1;
}

static int is_same_memory(const Measured *one, const Measured *other) {
    return one->view.buf == other->view.buf && one->view.len == other->view.len && one->moments->total == other->moments->total;
}

static int add_view(Moments *moments, const Py_buffer *view) {
    double block[BLOCK];
    Py_ssize_t size = numbers_in(view);
    if (size && is_floating(view)) return add_numbers(moments, view->buf, *view->format == 'f', size);
    for (Py_ssize_t start = 0; start < size; start += BLOCK) {
        int count = size - start < BLOCK ? (int)(size - start) : BLOCK;
        widen((const char *)view->buf + start * view->itemsize, *view->format, count, block);
        if (add_numbers(moments, block, 0, count)) return -1;
    }
    return 0;
}

/* Measure arrays of the same memory once, and add what that gives to the moments of each. */
static int add_repeated(Measured **group, Py_ssize_t count) {
    Moments *first = group[0]->moments, *shared = (Moments *)Py_TYPE(first)->tp_alloc(Py_TYPE(first), 0);
    if (!shared) return -1;
    shared->sums = NONE;
    shared->bits = first->bits;
    shared->side = first->side;
    shared->total = first->total;
    int failed = add_view(shared, &group[0]->view);
    for (Py_ssize_t i = 0; !failed && i < count; i++) failed = merge_moments(group[i]->moments, shared);
    Py_DECREF(shared);
    return failed;
}

/* Measure floats of the same memory; -1: an exception. */
static int add_large(Measured **large, Py_ssize_t count) {
    qsort(large, (size_t)count, sizeof *large, by_memory);
    for (Py_ssize_t start = 0, end; start < count; start = end) {
        for (end = start + 1; end < count && is_same_memory(large[start], large[end]); end++) {}
        if (end - start == 1) continue;
        if (add_repeated(large + start, end - start)) return -1;
        for (Py_ssize_t i = start; i < end; i++) large[i]->is_repeated = 1;
    }
    return 0;
}

/* Get an array's memory, if it can be measured here and has as many numbers as are wanted, -1 for any. 0: it cannot. */
static int get_view(PyObject *array, Py_ssize_t length, Py_buffer *view) {
    double unused;
    if (array == Py_None || PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_ANY_CONTIGUOUS)) {
        PyErr_Clear(); /* no memory, no such element type, or no array in one piece */
        view->obj = NULL;
        return 0;
    }
    int fits = view->format && view->format[0] && !view->format[1] && (is_floating(view) || !widen(NULL, *view->format, 0, &unused));
    fits = fits && (!view->len || !((uintptr_t)view->buf % (uintptr_t)view->itemsize)); /* a view of bytes may begin anywhere */
    if (fits && (length < 0 || length == numbers_in(view))) return 1;
    PyBuffer_Release(view);
    return 0;
}

static int measure_all(PyObject *moments, PyObject *arrays, PyObject *lengths, Measured *items, Measured **large, PyObject *others) {
    Py_ssize_t count = PyTuple_GET_SIZE(arrays), large_count = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GET_ITEM(lengths, i));
        if (length == -1 && PyErr_Occurred()) return -1;
        items[i].moments = (Moments *)PyTuple_GET_ITEM(moments, i);
        items[i].number = i;
        if (get_view(PyTuple_GET_ITEM(arrays, i), length, &items[i].view)) {
            if (*items[i].view.format == 'f' && numbers_in(&items[i].view) >= REPEATED) large[large_count++] = &items[i];
            continue;
        }
        PyObject *number = PyLong_FromSsize_t(i);
        int failed = !number || PyList_Append(others, number);
        Py_XDECREF(number);
        if (failed) return -1;
    }
    if (add_large(large, large_count)) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (items[i].view.obj && !items[i].is_repeated && add_view(items[i].moments, &items[i].view)) return -1;
    return 0;
}

static PyTypeObject Moments_Type;

static PyObject *moments_add_all(PyObject *Py_UNUSED(none), PyObject *args) {
    PyObject *moments, *arrays, *lengths;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &moments, &PyTuple_Type, &arrays, &PyTuple_Type, &lengths)) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(arrays);
    int fits = PyTuple_GET_SIZE(moments) == count && PyTuple_GET_SIZE(lengths) == count;
    for (Py_ssize_t i = 0; fits && i < count; i++) fits = Py_IS_TYPE(PyTuple_GET_ITEM(moments, i), &Moments_Type);
    if (!fits) return PyErr_Format(PyExc_TypeError, "Moments and a length for each of %zd arrays are wanted", count);
    Measured *items = PyMem_Calloc((size_t)count + 1, sizeof *items);
    Measured **large = PyMem_Calloc((size_t)count + 1, sizeof *large);
    PyObject *others = PyList_New(0);
    if (!items || !large) PyErr_NoMemory();
    int failed = !items || !large || !others || measure_all(moments, arrays, lengths, items, large, others);
    for (Py_ssize_t i = 0; items && i < count; i++)
        if (items[i].view.obj) PyBuffer_Release(&items[i].view);
    PyMem_Free(items);
    PyMem_Free(large);
    if (failed) Py_CLEAR(others);
    return others;
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
    {"add_all", (PyCFunction)moments_add_all, METH_VARARGS | METH_STATIC,
     "add_all(moments, arrays, lengths): add the numbers of each array to its moments, all in tuples; return the positions\n"
     "of arrays that are None, have another type than floats, doubles, integers or truth values, are not in one piece of\n"
     "memory, or have another number of elements than is given; -1 stands for any.  Memory that several arrays share is\n"
     "read once."},
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

/* ---- of the values of an op ---- */

typedef struct {
    Observer base;
    PyObject *moments;    /* owned tuple; for each value Moments, or None for a value without numbers; NULL: not known */
    long long length;     /* of the values, all together; -1: any */
    long long executions; /* that native code has measured */
} MomentsObserver;

/* Measure each value, or none and leave them to Python. */
static Observation observe_moments(Observer *observer, Thread *Py_UNUSED(thread), const Reader *reader, PyObject *const *values,
                                   Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    MomentsObserver *self = (MomentsObserver *)observer;
    long long length = 0;
    Memory memory[MEASURED_LIMIT];
    if (!self->moments || PyTuple_GET_SIZE(self->moments) != count || count > MEASURED_LIMIT) return CALL_PYTHON;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_GET_ITEM(self->moments, i) == Py_None) {
            if (!reader_is_plain(reader, values[i])) return CALL_PYTHON;
        } else if (!reader_host_memory(reader, values[i], &memory[i]) || !memory[i].exponent || memory[i].width < 4 ||
                   !memory[i].is_dense)
            return CALL_PYTHON;
        else
            length += memory[i].count;
    }
    if (self->length >= 0 && length != self->length) return CALL_PYTHON;
    PyObject *moments = Py_NewRef(self->moments); /* others may run, and replace them, while large memory is read */
    int failed = 0;
    self->executions++; /* first, since others may start to count anew */
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *target = PyTuple_GET_ITEM(moments, i);
        if (target == Py_None || !memory[i].count) continue;
        failed = add_numbers((Moments *)target, memory[i].at, memory[i].width == sizeof(float), memory[i].count);
    }
    Py_DECREF(moments);
    return failed ? OBSERVER_FAILED : OBSERVED;
}

static PyObject *observer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    MomentsObserver *self = (MomentsObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_moments;
    self->base.reads = SELECTED_VALUES;
    self->length = -1;
    return (PyObject *)self;
}

static int observer_set(MomentsObserver *self, PyObject *moments, void *Py_UNUSED(none)) {
    int is_known = moments && moments != Py_None, fits = !is_known || PyTuple_CheckExact(moments);
    for (Py_ssize_t i = 0; is_known && fits && i < PyTuple_GET_SIZE(moments); i++) {
        PyObject *item = PyTuple_GET_ITEM(moments, i);
        fits = item == Py_None || Py_IS_TYPE(item, &Moments_Type);
    }
    if (!fits) {
        PyErr_Format(PyExc_TypeError, "a tuple of Moments and None is wanted, not %R", moments);
        return -1;
    }
    Py_XSETREF(self->moments, is_known ? Py_NewRef(moments) : NULL);
    return 0;
}

static PyObject *observer_get(MomentsObserver *self, void *Py_UNUSED(none)) {
    return Py_NewRef(self->moments ? self->moments : Py_None);
}

static int observer_traverse(MomentsObserver *self, visitproc visit, void *arg) {
    Py_VISIT(self->moments);
    return 0;
}

static void observer_dealloc(MomentsObserver *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->moments);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef observer_members[] = {
    {"length", T_LONGLONG, offsetof(MomentsObserver, length), 0,
     "Number of elements, of all values together, that native code measures; -1 for any."},
    {"executions", T_LONGLONG, offsetof(MomentsObserver, executions), 0, "Number of executions that native code has measured."}, {0}};

static PyGetSetDef observer_properties[] = {
    {"moments", (getter)observer_get, (setter)observer_set,
     "Moments for each value, None for a value that is no tensor; None at first: the routine itself is called.", NULL},
    {0}};

static PyTypeObject MomentsObserver_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.MomentsObserver",
    .tp_basicsize = sizeof(MomentsObserver),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "MomentsObserver(): base of observers that native code does not call, but adds the values' numbers to Moments.\n\n"
              "A subclass defines __call__(*values).  It is called until `moments` is set, and where a value is no float or\n"
              "double tensor in one piece of host memory.",
    .tp_new = observer_new,
    .tp_dealloc = (destructor)observer_dealloc,
    .tp_traverse = (traverseproc)observer_traverse,
    .tp_members = observer_members,
    .tp_getset = observer_properties,
};

int moments_boot(PyObject *names) {
    choose_vectors();
    return add_type(names, "Moments", &Moments_Type) || add_type(names, "MomentsObserver", &MomentsObserver_Type) ? -1 : 0;
}

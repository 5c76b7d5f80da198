/* Executions, counted by the shapes of their values without a call of Python. */
#ifndef AMANDA_TALLY_H
#define AMANDA_TALLY_H
#include "interception/base.h"

#define WORD_LIMIT 192

/* Shapes of an execution as words. For inputs, outputs, ...: the number of values, then of each tensor its rank and
   extents; of a list LISTED, the number of its tensors, and their shapes; of any other value SHAPELESS. */
typedef struct {
    int count; /* of words; -1: the shapes cannot be read as words, or are more than WORD_LIMIT */
    int64_t items[WORD_LIMIT];
} ShapeCode;

#define SHAPELESS (-1)
#define LISTED (-2)

typedef struct {
    uint64_t hash;
    int64_t calls;
    size_t start; /* of its words */
    int length;
} Row;

#define RECENT_LIMIT 24

typedef struct {
    PyObject_HEAD
    int64_t calls;                /* of the last row, which are not added to the row yet */
    uint32_t last;                /* number of the row of the last execution, counted from 1; 0: there is none */
    int length;                   /* of its words; WORD_LIMIT + 1: they are too many for `recent` */
    int64_t recent[RECENT_LIMIT]; /* its words, in the object itself, where they cost no miss of the cache */
    uint32_t count, limit;
    Row *rows;
    int64_t *words;
    size_t used, room; /* of words */
    uint32_t *slots, slot_count; /* hash table of row numbers, counted from 1; its size is a power of two */
    PyObject *others; /* owned dict; calls by shapes that cannot be read as words; NULL: none */
} Tally;

extern PyTypeObject Tally_Type;

static inline void add_word(ShapeCode *words, int64_t word) {
    if (words->count >= 0) {
        if (words->count < WORD_LIMIT) words->items[words->count++] = word;
        else words->count = -1;
    }
}

void encode_shapes(ShapeCode *words, PyObject *shapes); /* adds shapes that Python has; never an exception */
PyObject *decode_shapes(const ShapeCode *words);     /* new: the shapes as Python has them */
int tally_count(Tally *tally, const ShapeCode *words); /* 0: Python has to count; never an exception */

#endif

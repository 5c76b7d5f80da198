/* Executions, counted by the shapes of their values without a call of Python. */
#ifndef AMANDA_TALLY_H
#define AMANDA_TALLY_H
#include "interception/base.h"

#define WORD_LIMIT 192

/* Shapes of an execution: of each side its number of values, and of each value its rank and extents; LISTED, their
   number and shapes: of tensors in a list; SHAPELESS: of what has none. */
typedef struct {
    int count; /* -1: they have no such form, or too many extents */
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
    int64_t calls;                /* of the last row, besides those that it has */
    uint32_t last;                /* number of the row of the last execution, and 1; 0: there is none */
    int length;                   /* of its words; WORD_LIMIT + 1: they are too many for `recent` */
    int64_t recent[RECENT_LIMIT]; /* its words: here they cost no miss of the cache */
    uint32_t count, limit;
    Row *rows;
    int64_t *words;
    size_t used, room; /* of words */
    uint32_t *slots, slot_count; /* numbers of rows by their hash, each and 1; a power of two of them */
    PyObject *others; /* owned dict; calls by shapes that are no words; NULL: there are none */
} Tally;

extern PyTypeObject Tally_Type;

static inline void add_word(ShapeCode *words, int64_t word) {
    if (words->count >= 0) {
        if (words->count < WORD_LIMIT) words->items[words->count++] = word;
        else words->count = -1;
    }
}

void encode_shapes(ShapeCode *words, PyObject *shapes); /* of sides that Python has; never an exception */
PyObject *decode_shapes(const ShapeCode *words);     /* new, as Python has them */
int tally_count(Tally *tally, const ShapeCode *words); /* 0: Python has to; never an exception */

#endif

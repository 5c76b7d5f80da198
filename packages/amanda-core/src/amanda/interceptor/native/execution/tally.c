/* Tallies: executions by the shapes of their values. */
#include "execution/tally.h"
#include <string.h>

/* ---- shapes as words ---- */

static void add_shape(ShapeCode *words, PyObject *shape) {
    if (!PyTuple_CheckExact(shape)) {
        words->count = -1;
        return;
    }
    add_word(words, PyTuple_GET_SIZE(shape));
    for (Py_ssize_t i = 0; words->count >= 0 && i < PyTuple_GET_SIZE(shape); i++) {
        PyObject *extent = PyTuple_GET_ITEM(shape, i);
        int overflow = !PyLong_CheckExact(extent);
        long long word = overflow ? 0 : PyLong_AsLongLongAndOverflow(extent, &overflow);
        if (overflow) words->count = -1;
        else add_word(words, word);
    }
}

static void add_value(ShapeCode *words, PyObject *shape) {
    if (shape == Py_None) {
        add_word(words, SHAPELESS);
        return;
    }
    int listed = PyTuple_CheckExact(shape) && PyTuple_GET_SIZE(shape) && !PyLong_CheckExact(PyTuple_GET_ITEM(shape, 0));
    if (!listed) {
        add_shape(words, shape);
        return;
    }
    add_word(words, LISTED);
    add_word(words, PyTuple_GET_SIZE(shape));
    for (Py_ssize_t i = 0; words->count >= 0 && i < PyTuple_GET_SIZE(shape); i++) add_shape(words, PyTuple_GET_ITEM(shape, i));
}

void encode_shapes(ShapeCode *words, PyObject *shapes) {
    if (!PyTuple_CheckExact(shapes)) words->count = -1;
    for (Py_ssize_t i = 0; words->count >= 0 && i < PyTuple_GET_SIZE(shapes); i++) {
        PyObject *side = PyTuple_GET_ITEM(shapes, i);
        if (!PyTuple_CheckExact(side)) {
            words->count = -1;
            return;
        }
        add_word(words, PyTuple_GET_SIZE(side));
        for (Py_ssize_t j = 0; words->count >= 0 && j < PyTuple_GET_SIZE(side); j++) add_value(words, PyTuple_GET_ITEM(side, j));
    }
}

static PyObject *extents_of(const int64_t **at, int64_t rank) {
    PyObject *shape = PyTuple_New(rank);
    for (int64_t i = 0; shape && i < rank; i++) {
        PyObject *extent = PyLong_FromLongLong(*(*at)++);
        if (extent) PyTuple_SET_ITEM(shape, i, extent);
        else Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *value_of(const int64_t **at) {
    int64_t word = *(*at)++;
    if (word == SHAPELESS) Py_RETURN_NONE;
    if (word != LISTED) return extents_of(at, word);
    int64_t count = *(*at)++;
    PyObject *shapes = PyTuple_New(count);
    for (int64_t i = 0; shapes && i < count; i++) {
        int64_t rank = *(*at)++;
        PyObject *shape = extents_of(at, rank);
        if (shape) PyTuple_SET_ITEM(shapes, i, shape);
        else Py_CLEAR(shapes);
    }
    return shapes;
}

PyObject *decode_shapes(const ShapeCode *words) {
    const int64_t *at = words->items, *end = at + words->count;
    PyObject *sides = PyList_New(0);
    while (sides && at < end) {
        int64_t count = *at++;
        PyObject *side = PyTuple_New(count);
        for (int64_t i = 0; side && i < count; i++) {
            PyObject *shape = value_of(&at);
            if (shape) PyTuple_SET_ITEM(side, i, shape);
            else Py_CLEAR(side);
        }
        if (!side || PyList_Append(sides, side)) Py_CLEAR(sides);
        Py_XDECREF(side);
    }
    PyObject *shapes = sides ? PyList_AsTuple(sides) : NULL;
    Py_XDECREF(sides);
    return shapes;
}

/* ---- rows ---- */

static inline int is_row(const Tally *tally, const Row *row, const ShapeCode *words) {
    return row->length == words->count &&
           !memcmp(tally->words + row->start, words->items, (size_t)words->count * sizeof(int64_t));
}

static uint32_t slot_of(const Tally *tally, uint64_t hash, const ShapeCode *words) { /* that of the row, or a free one */
    uint32_t slot = (uint32_t)(hash >> 20) & (tally->slot_count - 1);
    while (tally->slots[slot]) {
        const Row *row = &tally->rows[tally->slots[slot] - 1];
        if (row->hash == hash && is_row(tally, row, words)) break;
        slot = (slot + 1) & (tally->slot_count - 1);
    }
    return slot;
}

static int make_room(Tally *tally, size_t words) {
    if (!tally->words || tally->used + words > tally->room) {
        size_t room = tally->room * 2 + words + 32;
        int64_t *larger = PyMem_Realloc(tally->words, room * sizeof *larger);
        if (!larger) return -1;
        tally->words = larger;
        tally->room = room;
    }
    if ((tally->count + 1) * 2 <= tally->slot_count) return 0;
    uint32_t size = tally->slot_count ? tally->slot_count * 2 : 4;
    Row *rows = PyMem_Realloc(tally->rows, size / 2 * sizeof *rows);
    if (rows) tally->rows = rows;
    uint32_t *slots = rows ? PyMem_Calloc(size, sizeof *slots) : NULL;
    if (!slots) return -1;
    for (uint32_t i = 0; i < tally->count; i++) {
        uint32_t slot = (uint32_t)(rows[i].hash >> 20) & (size - 1);
        while (slots[slot]) slot = (slot + 1) & (size - 1);
        slots[slot] = i + 1;
    }
    PyMem_Free(tally->slots);
    tally->slots = slots;
    tally->slot_count = size;
    return 0;
}

static void settle(Tally *tally) {
    if (tally->last) tally->rows[tally->last - 1].calls += tally->calls;
    tally->calls = 0;
}

static void turn_to(Tally *tally, uint32_t row, const ShapeCode *words) {
    settle(tally);
    tally->last = row;
    tally->calls = 1;
    tally->length = words->count > RECENT_LIMIT ? WORD_LIMIT + 1 : words->count;
    if (tally->length <= RECENT_LIMIT) memcpy(tally->recent, words->items, (size_t)words->count * sizeof(int64_t));
}

typedef enum { OUT_OF_MEMORY = -1, TOO_MANY_SHAPES, COUNTED } Counting; /* no exception is set */

static Counting count_shapes(Tally *tally, const ShapeCode *words, uint32_t limit) {
    uint64_t hash = 1;
    for (int i = 0; i < words->count; i++) hash = mix(hash, (uint64_t)words->items[i]);
    if (!tally->slots || !tally->slots[slot_of(tally, hash, words)]) {
        if (tally->count >= limit) return TOO_MANY_SHAPES;
        if (make_room(tally, (size_t)words->count)) return OUT_OF_MEMORY;
        tally->rows[tally->count] = (Row){hash, 0, tally->used, words->count};
        memcpy(tally->words + tally->used, words->items, (size_t)words->count * sizeof(int64_t));
        tally->used += (size_t)words->count;
        tally->slots[slot_of(tally, hash, words)] = ++tally->count;
    }
    turn_to(tally, tally->slots[slot_of(tally, hash, words)], words);
    return COUNTED;
}

int tally_count(Tally *tally, const ShapeCode *words) {
    if (tally->last && words->count == tally->length &&
        !memcmp(tally->recent, words->items, (size_t)words->count * sizeof(int64_t))) {
        tally->calls++;
        return 1;
    }
    return words->count >= 0 && count_shapes(tally, words, tally->limit) == COUNTED;
}

/* ---- for Python ---- */

static PyObject *tally_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    return type->tp_alloc(type, 0); /* subtypes take what they like */
}

static int tally_init(Tally *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", NULL};
    self->limit = 1024;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "|I", names, &self->limit) ? 0 : -1;
}

static PyObject *tally_add(Tally *self, PyObject *args) {
    ShapeCode words;
    PyObject *shapes;
    long long calls_more = 1;
    if (!PyArg_ParseTuple(args, "O|L", &shapes, &calls_more)) return NULL;
    words.count = 0;
    encode_shapes(&words, shapes);
    if (words.count >= 0) {
        if (count_shapes(self, &words, UINT32_MAX >> 2) != COUNTED) return PyErr_NoMemory();
        self->calls += calls_more - 1;
        Py_RETURN_NONE;
    }
    if (!self->others && !(self->others = PyDict_New())) return NULL;
    PyObject *others = Py_NewRef(self->others), *before = PyDict_GetItemWithError(others, shapes);
    long long calls = before ? PyLong_AsLongLong(before) : 0;
    PyObject *after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(calls + calls_more);
    int failed = !after || PyDict_SetItem(others, shapes, after);
    Py_XDECREF(after);
    Py_DECREF(others);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *tally_items(Tally *self, PyObject *Py_UNUSED(none)) {
    PyObject *items = PyList_New(0);
    settle(self);
    for (uint32_t i = 0; items && i < self->count; i++) { /* Python may run meanwhile */
        ShapeCode words;
        Row row = self->rows[i];
        words.count = row.length;
        memcpy(words.items, self->words + row.start, (size_t)row.length * sizeof(int64_t));
        PyObject *shapes = decode_shapes(&words);
        PyObject *item = shapes ? Py_BuildValue("NL", shapes, (long long)row.calls) : NULL;
        if (!item || PyList_Append(items, item)) Py_CLEAR(items);
        Py_XDECREF(item);
    }
    if (!items || !self->others) return items;
    PyObject *counted = Py_NewRef(self->others), *others = PyDict_Items(counted);
    PyObject *all = others ? PySequence_InPlaceConcat(items, others) : NULL;
    Py_DECREF(counted);
    Py_XDECREF(others);
    Py_DECREF(items);
    return all;
}

static PyObject *tally_clear_rows(Tally *self, PyObject *Py_UNUSED(none)) {
    PyMem_Free(self->rows);
    PyMem_Free(self->words);
    PyMem_Free(self->slots);
    self->rows = NULL;
    self->words = NULL;
    self->slots = NULL;
    self->last = self->count = self->slot_count = 0;
    self->calls = 0;
    self->used = self->room = 0;
    Py_CLEAR(self->others);
    Py_RETURN_NONE;
}

static Py_ssize_t tally_length(Tally *self) {
    return self->count + (self->others ? PyDict_GET_SIZE(self->others) : 0);
}

static int tally_traverse(Tally *self, visitproc visit, void *arg) {
    Py_VISIT(self->others);
    return 0;
}

static void tally_dealloc(Tally *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(tally_clear_rows(self, NULL));
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef tally_methods[] = {
    {"add", (PyCFunction)tally_add, METH_VARARGS,
     "add(shapes, calls=1): count executions; shapes: a tuple for inputs, outputs, ..., with a shape for each value."},
    {"items", (PyCFunction)tally_items, METH_NOARGS, "Return pairs of shapes and the number of executions with these shapes, in the order of the first execution."},
    {"clear", (PyCFunction)tally_clear_rows, METH_NOARGS, "Forget the executions."},
    {0}};

static PySequenceMethods tally_sequence = {.sq_length = (lenfunc)tally_length};

PyTypeObject Tally_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.ShapeCounter",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "ShapeCounter(limit=1024): counts executions by the shapes of their values; len() is the number of shapes.\n\n"
              "A program that has an object of a subtype as a step counts in native code, without a call of the object,\n"
              "up to `limit` different shapes; it calls the object for further shapes.",
    .tp_new = tally_new,
    .tp_init = (initproc)tally_init,
    .tp_dealloc = (destructor)tally_dealloc,
    .tp_traverse = (traverseproc)tally_traverse,
    .tp_methods = tally_methods,
    .tp_as_sequence = &tally_sequence,
};

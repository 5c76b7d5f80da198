/* Which values routines around an op are called with, and which of them may be replaced without Python. */
#include "execution/values.h"

void release_values(Execution *execution) {
    while (execution->replacement_count) Py_DECREF(execution->replacements[--execution->replacement_count]);
    Py_XDECREF(execution->shapes.objects);
    Py_XDECREF(execution->packed);
}

/* ---- inputs ---- */

static Py_ssize_t total_count(const Arguments *arguments) {
    return 1 + arguments->count + named_count(arguments) + (arguments->dict ? PyDict_GET_SIZE(arguments->dict) : 0);
}

int gather_inputs(Execution *execution, const Program *program, const Arguments *arguments) {
    PyObject *flat[VALUE_LIMIT], **values = execution->inputs.items;
    if (total_count(arguments) > VALUE_LIMIT) return 0;
    Py_ssize_t count = flatten_arguments(arguments, program->sources ? flat : values);
    if (!program->sources) {
        execution->count = count;
        return 1;
    }
    for (int i = 0; i < program->source_count; i++)
        if (program->sources[i] >= count) return 0;
    if (program->packed_input >= 0) {
        if (program->first > program->last || program->last > count) return 0;
        execution->packed = PyTuple_New(program->last - program->first);
        if (!execution->packed) return 0;
        for (int i = program->first; i < program->last; i++)
            PyTuple_SET_ITEM(execution->packed, i - program->first, Py_NewRef(flat[i]));
    }
    for (int i = 0; i < program->source_count; i++)
        values[i] = i == program->packed_input      ? execution->packed
                    : program->sources[i] < 0 ? PyTuple_GET_ITEM(program->constants, i)
                                              : flat[program->sources[i]];
    execution->count = program->source_count;
    return 1;
}

/* ---- outputs ---- */

/* As `outputs_of`, of what is no tensor: None, a tuple, a list of tensors, or a plain value. A call that returns None may
   have written its outputs into inputs, as `out=` of some ops. */
Py_ssize_t items_of_outputs(const Reader *reader, const Program *program, const Execution *execution,
                          PyObject *const *outputs, PyObject *const **values, PyObject **written) {
    if (*outputs == Py_None) {
        if (!program->written || execution->count == UNREAD) return 0;
        Py_ssize_t count = PyTuple_GET_SIZE(program->written);
        for (Py_ssize_t i = 0; i < count; i++)
            written[i] = execution->inputs.items[PyLong_AsSsize_t(PyTuple_GET_ITEM(program->written, i))];
        *values = written;
        return count;
    }
    if (reader_is_plain(reader, *outputs)) return 1;
    if (!PyTuple_Check(*outputs) && !PyList_CheckExact(*outputs)) return UNREAD;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(*outputs);
    int tensors = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(*outputs, i);
        int tensor = reader_is_tensor(reader, item);
        if (!tensor && !reader_is_plain(reader, item)) return UNREAD;
        tensors += tensor;
    }
    if (PyList_CheckExact(*outputs) && tensors < count) return tensors ? UNREAD : 1;
    if (PyList_CheckExact(*outputs) && !tensors) return 1;
    if (count > VALUE_LIMIT) return UNREAD;
    *values = PySequence_Fast_ITEMS(*outputs);
    return count;
}

/* ---- memory ---- */

/* Whether a value, or one in a list, lies in this memory, or may lie there: not all tensors tell. */
static int lies_in(const Reader *reader, PyObject *value, const void *memory) {
    if (reader_is_tensor(reader, value)) {
        const void *value_memory = reader_memory(reader, value);
        return !value_memory || value_memory == memory;
    }
    if (!PyTuple_Check(value) && !PyList_Check(value)) return 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
        if (lies_in(reader, PySequence_Fast_GET_ITEM(value, i), memory)) return 1;
    return 0;
}

/* Whether an output shares memory with an input that a routine has returned: later writes have to reach both. */
int shares_changed_memory(const Reader *reader, const Execution *execution, PyObject *const *values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < execution->count; i++) {
        if (!(execution->changed >> i & 1)) continue;
        const void *memory = reader_memory(reader, execution->inputs.items[i]);
        for (Py_ssize_t j = 0; j < count; j++)
            if (!memory || lies_in(reader, values[j], memory)) return 1;
    }
    return 0;
}

static int has_tensor(const Reader *reader, PyObject *value) {
    if (reader_is_tensor(reader, value)) return 1;
    if (PyTuple_Check(value) || PyList_Check(value))
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
            if (has_tensor(reader, PySequence_Fast_GET_ITEM(value, i))) return 1;
    return 0;
}

/* Whether native code may put a value in the place of an output. Only of an output that was computed from tensors:
   views of inputs, and leaves that need a gradient, are Python's work. A value in the memory of an input will do
   only after the last routine: if Python continued with it, Python would have to tie it.  last: no routine comes after. */
int may_replace_output(const Reader *reader, int gradients, const Execution *execution, PyObject *output, PyObject *value,
                       int last) {
    const void *memory = reader_memory(reader, output), *value_memory = reader_memory(reader, value);
    int tensors = 0;
    if (!memory || !value_memory) return 0;
    for (Py_ssize_t i = 0; i < execution->count; i++) {
        PyObject *input = execution->inputs.items[i];
        if (lies_in(reader, input, memory) || (!last && lies_in(reader, input, value_memory))) return 0;
        tensors |= has_tensor(reader, input);
    }
    if (!tensors) return 0;
    return !reader_needs_gradient(reader, output) || (gradients && !reader_is_leaf(reader, output));
}

/* ---- shapes ---- */

PyObject *shapes_as_objects(Shapes *shapes) {
    if (!shapes->objects) shapes->objects = decode_shapes(&shapes->code);
    return shapes->objects;
}

int add_shapes(const Reader *reader, PyObject **shapes, PyObject *const *values, Py_ssize_t count) {
    PyObject *side = reader_shapes(reader, values, count, NULL);
    PyObject *last = side ? PyTuple_Pack(1, side) : NULL, *before = *shapes;
    *shapes = last && before ? PySequence_Concat(before, last) : Py_XNewRef(last);
    Py_XDECREF(before);
    Py_XDECREF(last);
    Py_XDECREF(side);
    return *shapes ? 0 : -1;
}

/* Read the shapes of the inputs, in the forms that the program wants; -1: an exception. */
int shapes_of_inputs(const Reader *reader, Program *program, Execution *execution) {
    Shapes *shapes = &execution->shapes;
    if (program->needs_shape_codes) reader_shape_code(reader, execution->inputs.items, execution->count, &shapes->code);
    if (!program->needs_shapes && shapes->code.count >= 0) return 0;
    PyObject *side = reader_shapes(reader, execution->inputs.items, execution->count,
                                   program->shapes ? PyTuple_GET_ITEM(program->shapes, 0) : NULL);
    shapes->objects = side ? PyTuple_Pack(1, side) : NULL;
    Py_XDECREF(side);
    return shapes->objects ? 0 : -1;
}

/* Return the result of the op, once the shapes of its outputs have been read; takes over the reference. */
PyObject *shapes_of_outputs(const Reader *reader, Program *program, Execution *execution, PyObject *outputs) {
    Shapes *shapes = &execution->shapes;
    PyObject *const *values, *written[VALUE_LIMIT];
    Py_ssize_t count = outputs_of(reader, program, execution, &outputs, &values, written);
    if (count == UNREAD) {
        values = &outputs;
        count = 1;
    }
    if (program->needs_shape_codes && shapes->code.count >= 0) {
        int inputs = shapes->code.count;
        reader_shape_code(reader, values, count, &shapes->code);
        if (shapes->code.count >= 0 && !shapes->objects) return outputs;
        if (!shapes->objects) shapes->code.count = inputs; /* not all of the outputs have a code */
    }
    int coded = !shapes->objects;
    PyObject *items[VALUE_LIMIT]; /* owned: a list may lose them, if a collection runs */
    for (Py_ssize_t i = 0; i < count; i++) items[i] = Py_NewRef(values[i]);
    PyObject *inputs = shapes_as_objects(shapes); /* a tuple of one */
    if (coded) shapes->code.count = -1;
    /* Where they are those of the last call, its tuples serve again: a loop over one shape allocates none. */
    PyObject *before = Py_XNewRef(program->shapes), *first = inputs ? PyTuple_GET_ITEM(inputs, 0) : NULL;
    PyObject *side = inputs ? reader_shapes(reader, items, count, before ? PyTuple_GET_ITEM(before, 1) : NULL) : NULL;
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(items[i]);
    int same = side && before && PyTuple_GET_ITEM(before, 0) == first && PyTuple_GET_ITEM(before, 1) == side;
    shapes->objects = same ? Py_NewRef(before) : side ? PyTuple_Pack(2, first, side) : NULL;
    Py_XDECREF(side);
    if (!shapes->objects) Py_CLEAR(outputs);
    else if (!same) Py_XSETREF(program->shapes, Py_NewRef(shapes->objects));
    Py_XDECREF(inputs);
    Py_XDECREF(before);
    return outputs;
}

/* The calls of ops that have plans: run here, or handed over to Python. */
#include "execution/program.h"
#include "interception/call.h"

/* ---- steps ---- */

/* Values that a routine is given lie after a free place, which a method takes for its own object. */
typedef struct {
    PyObject *made; /* owned; NULL, or the one that was made for the routines */
    PyObject *free, *items[VALUE_LIMIT];
} Values;

typedef enum { FAILED = -1, UNCHANGED, CHANGED, UNSUITED } Outcome;

static void tell_failure(Program *program, Py_ssize_t index) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    disturb();
    if (error && trace) PyException_SetTraceback(error, trace);
    PyObject *told = error ? PyObject_CallMethod(program->told, "failed", "nO", index, error) : NULL;
    if (!told) PyErr_Clear(); /* the routine's own exception is the one to be seen */
    Py_XDECREF(told);
    PyErr_Restore(kind, error, trace);
}

static int is_same(PyObject *result, PyObject *const *values, Py_ssize_t count) {
    if (count == 1) return result == values[0] && !PyTuple_Check(result) && !PyList_Check(result);
    if (!PyTuple_CheckExact(result) && !PyList_CheckExact(result)) return 0;
    if (PySequence_Fast_GET_SIZE(result) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PySequence_Fast_GET_ITEM(result, i) != values[i]) return 0;
    return 1;
}

/* Lay out what a step is called with, in the array itself or after a free place in `stack`; NULL: it is unsuited. */
static PyObject **laid_out(const Step *step, PyObject **values, Py_ssize_t count, PyObject *shapes, PyObject **stack,
                           Py_ssize_t *picked) {
    *picked = step->everything ? count : step->count;
    if (step->everything && !step->names) return values;
    PyObject **given = stack + 1, *name, *value;
    for (Py_ssize_t i = 0; i < *picked; i++) {
        Py_ssize_t position = step->everything ? i : step->select[i];
        if (position >= count) return NULL;
        given[i] = values[position];
    }
    Py_ssize_t position = 0, i = *picked;
    while (step->kwargs && PyDict_Next(step->kwargs, &position, &name, &value)) given[i++] = value;
    if (step->shapes) given[i] = shapes;
    return given;
}

/* Call a routine on values after a free place. A method of Python code is called as its function, with the object in
   that place, which is what it would do itself; only that takes longer. */
static inline PyObject *call_routine(PyObject *func, PyObject **given, size_t count, PyObject *names) {
    if (!Py_IS_TYPE(func, &PyMethod_Type) || !Py_IS_TYPE(PyMethod_GET_FUNCTION(func), &PyFunction_Type))
        return PyObject_Vectorcall(func, given, count | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    PyFunctionObject *function = (PyFunctionObject *)PyMethod_GET_FUNCTION(func);
    given[-1] = PyMethod_GET_SELF(func);
    return function->vectorcall((PyObject *)function, given - 1, count + 1, names);
}

PyObject *told_shapes(Shapes *shapes) {
    if (!shapes->told) shapes->told = shapes_of_words(&shapes->words);
    return shapes->told;
}

static const Words NO_WORDS;

static Outcome call_step(Thread *thread, const Reader *reader, int gradients, Program *program, Py_ssize_t index,
                         PyObject **values, Py_ssize_t count, Shapes *to_tell, PyObject **result) {
    Step *step = &program->steps[index];
    PyObject *shapes = step->shapes ? told_shapes(to_tell) : NULL;
    if (step->shapes && !shapes) return FAILED;
    PyObject *stack[2 + 2 * VALUE_LIMIT], **given = values;
    uint64_t versions[VALUE_LIMIT];
    Py_ssize_t picked = count;
    if (!step->everything || step->names) given = laid_out(step, values, count, shapes, stack, &picked);
    if (!given) return UNSUITED;
    Outcome outcome = FAILED;
    if (lock_acquire(step->lock, thread)) goto done;
    if (step->isolated) {
        reader_versions(reader, given, picked, versions);
        if (gradients) reader_set_gradients(reader, thread, 0);
    }
    thread->off++;
    *result = call_routine(step->func, given, (size_t)(step->everything ? picked : step->positional), step->names);
    disturb();
    thread->off--;
    if (step->isolated) reader_set_gradients(reader, thread, gradients);
    if (*result) {
        outcome = *result == Py_None || is_same(*result, given, picked) ? UNCHANGED : CHANGED;
        Py_ssize_t written = step->isolated ? reader_written(reader, given, picked, versions) : -1;
        if (written >= 0) {
            PyObject *told = PyObject_CallMethod(program->told, "mutated", "nn", index, written);
            Py_XDECREF(told);
            outcome = FAILED;
        }
        if (outcome != CHANGED) Py_CLEAR(*result);
    }
    lock_release(step->lock);
done:
    if (outcome == FAILED) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a routine failed without an exception");
        tell_failure(program, index);
    }
    return outcome;
}

static inline Outcome run_step(Thread *thread, const Reader *reader, int gradients, Program *program, Py_ssize_t index,
                               PyObject **values, Py_ssize_t count, Shapes *shapes, PyObject **result) {
    Step *step = &program->steps[index];
    if (step->tally && tally_count(step->tally, step->shapes ? &shapes->words : &NO_WORDS)) return UNCHANGED;
    return call_step(thread, reader, gradients, program, index, values, count, shapes, result);
}

/* ---- running a program ---- */

/* How many inputs there are; -1: only Python can tell. An exception may be set by then. */
static Py_ssize_t gather_inputs(const Program *program, const Arguments *given, Values *inputs) {
    PyObject *flat[VALUE_LIMIT], **values = inputs->items;
    PyObject **into = program->sources ? flat : values;
    Py_ssize_t named = given->names ? PyTuple_GET_SIZE(given->names) : 0, count = 0;
    if (given->count + named + 1 + (given->dict ? PyDict_GET_SIZE(given->dict) : 0) > VALUE_LIMIT) return -1;
    if (given->self) into[count++] = given->self;
    for (Py_ssize_t i = 0; i < given->count + named; i++) into[count++] = given->items[i];
    if (given->dict) {
        PyObject *name, *value;
        Py_ssize_t position = 0;
        while (PyDict_Next(given->dict, &position, &name, &value)) into[count++] = value;
    }
    if (!program->sources) return count;
    if (program->spread >= 0) {
        if (program->first > program->last || program->last > count) return -1;
        inputs->made = PyTuple_New(program->last - program->first);
        if (!inputs->made) return -1;
        for (int i = program->first; i < program->last; i++)
            PyTuple_SET_ITEM(inputs->made, i - program->first, Py_NewRef(flat[i]));
    }
    for (int i = 0; i < program->source_count; i++) {
        if (program->sources[i] >= count) return -1;
        if (i == program->spread)
            values[i] = inputs->made;
        else
            values[i] = program->sources[i] < 0 ? PyTuple_GET_ITEM(program->constants, i) : flat[program->sources[i]];
    }
    return program->source_count;
}

/* An op's outputs: none, the elements of a tuple or of a list of tensors, or one; -1: Python shall say. */
static Py_ssize_t spread_outputs(const Reader *reader, PyObject *const *outputs, PyObject *const **values) {
    *values = outputs;
    if (*outputs == Py_None) return 0;
    if (reader_is_tensor(reader, *outputs) || reader_is_plain(reader, *outputs)) return 1;
    if (!PyTuple_Check(*outputs) && !PyList_CheckExact(*outputs)) return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(*outputs);
    int tensors = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(*outputs, i);
        int tensor = reader_is_tensor(reader, item);
        if (!tensor && !reader_is_plain(reader, item)) return -1;
        tensors += tensor;
    }
    if (PyList_CheckExact(*outputs)) {
        if (!tensors || tensors < count) return tensors ? -1 : 1;
        if (count > VALUE_LIMIT) return -1;
    } else if (count > VALUE_LIMIT)
        return -1;
    *values = PySequence_Fast_ITEMS(*outputs);
    return count;
}

/* The values of a call while a program runs: the inputs as routines have changed them. */
typedef struct {
    Values inputs;
    Py_ssize_t count; /* of inputs; -1: they have not been gathered */
    uint32_t changed; /* which inputs are no more those of the call */
    int held;
    PyObject *holds[VALUE_LIMIT]; /* owned; values that routines gave */
    Shapes shapes; /* of the inputs, and once the op has run, of the outputs */
} Run;

static void end_run(Run *run) {
    while (run->held) Py_DECREF(run->holds[--run->held]);
    Py_XDECREF(run->shapes.told);
    Py_XDECREF(run->inputs.made);
}

/* The outputs of a call: those that it returned, or, of one that returns None, the inputs that it wrote, for which
   there is room in `written`. */
static Py_ssize_t outputs_of(const Reader *reader, const Program *program, const Run *run, PyObject *const *outputs,
                             PyObject *const **values, PyObject **written) {
    if (*outputs != Py_None || !program->written || run->count < 0) return spread_outputs(reader, outputs, values);
    Py_ssize_t count = PyTuple_GET_SIZE(program->written);
    for (Py_ssize_t i = 0; i < count; i++)
        written[i] = run->inputs.items[PyLong_AsSsize_t(PyTuple_GET_ITEM(program->written, i))];
    *values = written;
    return count;
}

static PyObject *listed(PyObject *const *items, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
    return list;
}

static void leave_to_python(Reason reason) { /* a call that native code had begun */
    counts.native--;
    counts.handed[reason]++;
}

/* Python goes on after a step, whose routine returned `result` (stolen). */
static PyObject *go_on(Thread *thread, Call *call, Program *program, const Run *run, Py_ssize_t step, PyObject *result,
                       PyObject *outputs) {
    leave_to_python(RESULT);
    PyObject *inputs = run->changed ? listed(run->inputs.items, run->count) : Py_NewRef(Py_None);
    PyObject *done = inputs ? Py_BuildValue("OnNOO", program->plan, step, result ? result : Py_NewRef(Py_None),
                                            outputs ? outputs : Py_NotImplemented, inputs)
                            : NULL;
    PyObject *value = done ? hand_over(thread, call, 0, done) : NULL;
    if (!inputs) Py_XDECREF(result);
    Py_XDECREF(inputs);
    Py_XDECREF(done);
    return value;
}

/* Put what a routine returned in the place of what it was given, by position among `values`.
   1: done; 0: Python has to; -1: an exception. */
static int put_result(Thread *thread, const Reader *reader, int gradients, const Step *step, PyObject **values,
                      Py_ssize_t count, PyObject *result, Run *run, uint32_t *changed) {
    PyObject *originals[VALUE_LIMIT], *items[VALUE_LIMIT]; /* items: owned, since a list may lose them meanwhile */
    Py_ssize_t picked = step->everything ? count : step->count;
    int put = 1;
    if (run->held + picked > VALUE_LIMIT) return 0;
    if (picked != 1 && ((!PyTuple_CheckExact(result) && !PyList_CheckExact(result)) ||
                        PySequence_Fast_GET_SIZE(result) != picked))
        return 0;
    for (Py_ssize_t i = 0; i < picked; i++) {
        originals[i] = values[step->everything ? i : step->select[i]];
        items[i] = Py_NewRef(picked == 1 ? result : PySequence_Fast_GET_ITEM(result, i));
        put &= items[i] == originals[i] || (step->isolated ? reader_fits(reader, originals[i], items[i])
                                                          : reader_memory(reader, items[i]) != NULL);
    }
    for (Py_ssize_t i = 0; put > 0 && i < picked; i++) {
        if (items[i] == originals[i]) continue;
        Py_ssize_t position = step->everything ? i : step->select[i];
        thread->off++;
        PyObject *placed = step->isolated ? reader_placed(reader, originals[i], items[i], gradients) : Py_NewRef(items[i]);
        thread->off--;
        if (!placed) {
            put = -1;
            break;
        }
        run->holds[run->held++] = values[position] = placed;
        *changed |= (uint32_t)1 << position;
    }
    for (Py_ssize_t i = 0; i < picked; i++) Py_DECREF(items[i]);
    return put;
}

/* Whether a value, or one of a list, lies in this memory; where that cannot be told, too. */
static int lies_in(const Reader *reader, PyObject *value, const void *memory) {
    if (reader_is_tensor(reader, value)) {
        const void *own = reader_memory(reader, value);
        return !own || own == memory;
    }
    if (!PyTuple_Check(value) && !PyList_Check(value)) return 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++)
        if (lies_in(reader, PySequence_Fast_GET_ITEM(value, i), memory)) return 1;
    return 0;
}

/* Whether an output shares memory with an input that a routine gave: the program may write through it. */
static int shares_changed(const Reader *reader, const Run *run, PyObject *const *values, Py_ssize_t count) {
    for (Py_ssize_t i = 0; run->changed && i < run->count; i++) {
        if (!(run->changed >> i & 1)) continue;
        const void *memory = reader_memory(reader, run->inputs.items[i]);
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

/* Whether a value may take the place of an output: that was computed from tensors, and is none of their views,
   nor a leaf that needs a gradient. A value in an input's memory is no view that Python has to tie, unless Python
   goes on with it as the output. last: no routine comes after. */
static int is_computed(const Reader *reader, int gradients, const Run *run, PyObject *output, PyObject *value,
                       int last) {
    const void *memory = reader_memory(reader, output), *own = reader_memory(reader, value);
    int tensors = 0;
    if (!memory || !own) return 0;
    for (Py_ssize_t i = 0; i < run->count; i++) {
        PyObject *input = run->inputs.items[i];
        if (lies_in(reader, input, memory) || (!last && lies_in(reader, input, own))) return 0;
        tensors |= has_tensor(reader, input);
    }
    if (!tensors) return 0;
    return !reader_needs_gradient(reader, output) || (gradients && !reader_is_leaf(reader, output));
}

static int leave_trace(const Call *call, const Program *program, const Run *run, uint64_t begin, uint64_t start,
                       uint64_t end, PyObject *outputs) {
    int marks = Py_IS_TYPE(program->trace, &Leaving_Type);
    if (marks && !marks_written(program->trace))
        return leave_mark(program->trace, begin, start, end, outputs, NULL, run->shapes.told);
    Values inputs;
    inputs.made = NULL;
    Py_ssize_t count = gather_inputs(program, call->given, &inputs);
    if (marks && count > 0) {
        int wrong = leave_mark(program->trace, begin, start, end, outputs, inputs.items[0], run->shapes.told);
        Py_XDECREF(inputs.made);
        return wrong;
    }
    PyObject *told = NULL, *list = count < 0 ? NULL : listed(inputs.items, count);
    if (count < 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "the inputs of a call have changed");
    if (list)
        told = PyObject_CallFunction(program->trace, "KKKOO", (unsigned long long)begin, (unsigned long long)start,
                                     (unsigned long long)end, outputs, list);
    Py_XDECREF(inputs.made);
    Py_XDECREF(list);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

/* Tells the shapes of one more side of an execution; -1: an exception. */
int add_shapes(const Reader *reader, PyObject **shapes, PyObject *const *values, Py_ssize_t count) {
    PyObject *own = reader_shapes(reader, values, count, NULL);
    PyObject *last = own ? PyTuple_Pack(1, own) : NULL, *before = *shapes;
    *shapes = last && before ? PySequence_Concat(before, last) : Py_XNewRef(last);
    Py_XDECREF(before);
    Py_XDECREF(last);
    Py_XDECREF(own);
    return *shapes ? 0 : -1;
}

/* What the op gave, once the shapes of its outputs have been told; takes over the reference. */
static PyObject *add_shapes_of(const Reader *reader, Program *program, Run *run, PyObject *outputs) {
    PyObject *const *values, *written[VALUE_LIMIT];
    Py_ssize_t count = outputs_of(reader, program, run, &outputs, &values, written);
    if (count < 0) {
        values = &outputs;
        count = 1;
    }
    if (program->tallied && run->shapes.words.count >= 0) {
        int inputs = run->shapes.words.count;
        reader_words(reader, values, count, &run->shapes.words);
        if (run->shapes.words.count >= 0 && !run->shapes.told) return outputs;
        if (!run->shapes.told) run->shapes.words.count = inputs; /* of those of the outputs not all are words */
    }
    int worded = !run->shapes.told;
    PyObject *held[VALUE_LIMIT]; /* owned: a list may lose them, if a collection runs */
    for (Py_ssize_t i = 0; i < count; i++) held[i] = Py_NewRef(values[i]);
    PyObject *inputs = told_shapes(&run->shapes); /* a tuple of one */
    if (worded) run->shapes.words.count = -1;
    PyObject *before = Py_XNewRef(program->shapes), *first = inputs ? PyTuple_GET_ITEM(inputs, 0) : NULL;
    PyObject *own = inputs ? reader_shapes(reader, held, count, before ? PyTuple_GET_ITEM(before, 1) : NULL) : NULL;
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(held[i]);
    int same = own && before && PyTuple_GET_ITEM(before, 0) == first && PyTuple_GET_ITEM(before, 1) == own;
    run->shapes.told = same ? Py_NewRef(before) : own ? PyTuple_Pack(2, first, own) : NULL;
    Py_XDECREF(own);
    if (!run->shapes.told) Py_CLEAR(outputs);
    else if (!same) Py_XSETREF(program->shapes, Py_NewRef(run->shapes.told));
    Py_XDECREF(inputs);
    Py_XDECREF(before);
    return outputs;
}

static inline PyObject *with_shapes(const Reader *reader, Program *program, Run *run, PyObject *outputs) {
    return outputs && (program->shaped || program->tallied) ? add_shapes_of(reader, program, run, outputs) : outputs;
}

/* The op, and word of the backward ops that it made. */
FLAT PyObject *call_traced(Thread *thread, Call *call, Program *program, Run *run, uint64_t begin) {
    uint64_t start = reader_clock(call->site->reader);
    PyObject *outputs = call_op(thread, call);
    uint64_t end = reader_clock(call->site->reader);
    outputs = with_shapes(call->site->reader, program, run, outputs);
    if (!outputs || start == end) return outputs;
    thread->off++;
    int wrong = leave_trace(call, program, run, begin, start, end, outputs);
    thread->off--;
    if (wrong) Py_CLEAR(outputs);
    return outputs;
}

/* The steps before the op. 1: all have run, and the op is next; 0: `done` is what the call comes to, or NULL with an
   exception. */
static int run_before(Thread *thread, Call *call, int gradients, Program *program, Run *run, PyObject **done) {
    const Reader *reader = call->site->reader;
    PyObject *result = NULL;
    for (int i = 0; i < program->before; i++) {
        Outcome outcome = run_step(thread, reader, gradients, program, i, run->inputs.items, run->count, &run->shapes, &result);
        if (outcome == UNCHANGED) continue;
        if (outcome == FAILED) return 0;
        int put = outcome == CHANGED && program->substitutes
                      ? put_result(thread, reader, gradients, &program->steps[i], run->inputs.items, run->count,
                                   result, run, &run->changed)
                      : 0;
        if (!put) {
            *done = go_on(thread, call, program, run, outcome == CHANGED ? i : i - 1, result, NULL);
            return 0;
        }
        Py_CLEAR(result);
        if (put < 0) {
            tell_failure(program, i);
            return 0;
        }
    }
    return 1;
}

/* Give the call the inputs that routines have changed, after a free place in `flat`.
   1: done; 0: some have no argument of their own; -1: an exception. */
static int take_inputs(const Program *program, Call *call, Arguments *given, const Run *run, PyObject **flat,
                       PyObject **made) {
    const Arguments *own = call->given;
    Py_ssize_t named = own->names ? PyTuple_GET_SIZE(own->names) : 0, count = 0;
    flat++;
    if (own->self) flat[count++] = own->self;
    for (Py_ssize_t i = 0; i < own->count + named; i++) flat[count++] = own->items[i];
    if (own->dict) {
        PyObject *name, *value;
        Py_ssize_t position = 0;
        while (PyDict_Next(own->dict, &position, &name, &value)) flat[count++] = value;
    }
    for (Py_ssize_t i = 0; i < run->count; i++) {
        if (!(run->changed >> i & 1)) continue;
        int source = program->sources ? program->sources[i] : i;
        if (i == program->spread || source < 0) return 0;
        flat[source] = run->inputs.items[i];
    }
    return call_with(call, given, flat, made);
}

/* What runs instead of the op. */
static PyObject *run_replacement(Thread *thread, Program *program, Run *run) {
    Py_ssize_t index = program->before + program->after, picked;
    Step *step = &program->steps[index];
    PyObject *stack[1 + 2 * VALUE_LIMIT], *result = NULL;
    PyObject **given = laid_out(step, run->inputs.items, run->count, NULL, stack, &picked);
    if (!given)
        PyErr_SetString(PyExc_SystemError, "the inputs of a call have changed");
    else if (!lock_acquire(step->lock, thread)) {
        thread->off++;
        result = call_routine(step->func, given, step->positional, step->names);
        thread->off--;
        lock_release(step->lock);
    }
    if (!result) tell_failure(program, index);
    return result;
}

/* Whether Python has to run a call like the ones of the program; -1: an exception. */
static int is_refused(Thread *thread, const Arguments *given, Program *program) {
    Values inputs;
    inputs.made = NULL;
    if (gather_inputs(program, given, &inputs) < 1) return PyErr_Occurred() ? -1 : 1;
    thread->off++;
    PyObject *answer = PyObject_CallOneArg(program->refuse, inputs.items[0]);
    thread->off--;
    int refused = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(inputs.made);
    Py_XDECREF(answer);
    return refused;
}

/* The steps after the op, and what it gives in the end; takes over the reference. */
static PyObject *run_after(Thread *thread, Call *call, int gradients, Program *program, Run *run, PyObject *outputs) {
    const Reader *reader = call->site->reader;
    if (!program->after && !run->changed) return outputs;
    PyObject *const *values, *written[VALUE_LIMIT], *result = NULL, *changed = NULL;
    Values kept;
    Py_ssize_t count = outputs_of(reader, program, run, &outputs, &values, written);
    if (count < 0 || shares_changed(reader, run, values, count)) {
        result = go_on(thread, call, program, run, program->before - 1, NULL, outputs);
        Py_DECREF(outputs);
        return result;
    }
    if (!program->after) return outputs;
    int alone = values == &outputs && program->substitutes;
    uint32_t replaced = 0;
    for (Py_ssize_t i = 0; i < count; i++) kept.items[i] = Py_NewRef(values[i]); /* a list may lose them */
    PyObject *const output = count == 1 ? kept.items[0] : NULL;
    int end = program->before + program->after;
    for (int i = program->before; !changed && i < end; i++) {
        Outcome outcome = run_step(thread, reader, gradients, program, i, kept.items, count, &run->shapes, &result);
        if (outcome == UNCHANGED) continue;
        PyObject *now = alone && count ? kept.items[0] : NULL;
        if (now && outcome == CHANGED && run->count < 0) run->count = gather_inputs(program, call->given, &run->inputs);
        int put = outcome == CHANGED && now && run->count >= 0 && is_computed(reader, gradients, run, output, result, i + 1 == end)
                      ? put_result(thread, reader, gradients, &program->steps[i], kept.items, count, result, run,
                                   &replaced)
                      : 0;
        if (put > 0) {
            Py_INCREF(kept.items[0]);
            if (now != kept.items[0]) Py_DECREF(now);
            Py_CLEAR(result);
            continue;
        }
        if (put < 0) {
            tell_failure(program, i);
            Py_CLEAR(result);
        } else if (outcome != FAILED)
            changed = go_on(thread, call, program, run, outcome == CHANGED ? i : i - 1, result,
                            replaced ? kept.items[0] : outputs);
        if (!changed) {
            Py_CLEAR(outputs);
            break;
        }
    }
    if (replaced && outputs && !changed) Py_SETREF(outputs, Py_NewRef(kept.items[0]));
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(kept.items[i]);
    if (!changed) return outputs;
    Py_DECREF(outputs);
    return changed;
}

/* The op, or what replaces it, after the steps before it. */
FLAT PyObject *run_op(Thread *thread, Call *call, Program *program, Run *run, uint64_t begin) {
    if (program->replaces) {
        PyObject *result = run_replacement(thread, program, run);
        if (result != Py_NotImplemented) return with_shapes(call->site->reader, program, run, result);
        Py_DECREF(result);
    }
    if (program->trace != Py_None) return call_traced(thread, call, program, run, begin);
    return with_shapes(call->site->reader, program, run, call_op(thread, call));
}

FLAT PyObject *run_program(Thread *thread, Call *call, int gradients, Program *program) {
    const Reader *reader = call->site->reader;
    Run run;
    __builtin_prefetch(program->steps);
    run.inputs.made = NULL;
    run.count = -1;
    run.changed = run.held = 0;
    run.shapes.told = NULL;
    run.shapes.words.count = 0;
    if (program->refuse != Py_None) {
        int refused = is_refused(thread, call->given, program);
        if (refused > 0) leave_to_python(WRITTEN);
        if (refused) return refused < 0 ? NULL : hand_over(thread, call, 0, NULL);
    }
    uint64_t begin = program->trace == Py_None ? 0 : reader_clock(reader);
    if (program->before || program->replaces || program->shaped || program->tallied || program->written) {
        run.count = gather_inputs(program, call->given, &run.inputs);
        if (run.count < 0) {
            Py_XDECREF(run.inputs.made);
            leave_to_python(ARGUMENTS);
            return PyErr_Occurred() ? NULL : hand_over(thread, call, 0, NULL);
        }
        if (program->tallied) {
            run.shapes.words.count = 0;
            reader_words(reader, run.inputs.items, run.count, &run.shapes.words);
        }
        if (program->shaped || run.shapes.words.count < 0) {
            PyObject *own = reader_shapes(reader, run.inputs.items, run.count,
                                          program->shapes ? PyTuple_GET_ITEM(program->shapes, 0) : NULL);
            run.shapes.told = own ? PyTuple_Pack(1, own) : NULL;
            Py_XDECREF(own);
            if (!run.shapes.told) {
                end_run(&run);
                return NULL;
            }
        }
    }
    Call other, *made_with = call;
    Arguments given;
    PyObject *flat[VALUE_LIMIT + 1], *made[2] = {NULL, NULL}, *result = NULL;
    if (!run_before(thread, call, gradients, program, &run, &result)) goto done;
    if (run.changed) {
        other = *call;
        made_with = &other;
        int taken = take_inputs(program, made_with, &given, &run, flat, made);
        if (taken < 0) goto done;
        if (!taken) {
            result = go_on(thread, call, program, &run, program->before - 1, NULL, NULL);
            goto done;
        }
    }
    if (program->after) __builtin_prefetch(program->steps[program->before].tally);
    PyObject *outputs = run_op(thread, made_with, program, &run, begin);
    if (outputs && program->replaces && (PyTuple_CheckExact(outputs) || PyList_CheckExact(outputs))) {
        result = go_on(thread, call, program, &run, program->before - 1, NULL, outputs); /* it has a form to take */
        Py_DECREF(outputs);
    } else if (outputs)
        result = run_after(thread, call, gradients, program, &run, outputs);
done:
    Py_XDECREF(made[0]);
    Py_XDECREF(made[1]);
    end_run(&run);
    return result;
}

/* The steps on values that belong to no call: None, or what Python goes on from. */
PyObject *run_on_values(Program *self, const Reader *reader, PyObject *values, Shapes *shapes) {
    PyObject *result = NULL;
    Values given;
    Py_ssize_t count = PyTuple_GET_SIZE(values);
    if (count > VALUE_LIMIT || reader_is_kept_out(reader)) Py_RETURN_NOTIMPLEMENTED;
    for (Py_ssize_t i = 0; i < count; i++) {
        given.items[i] = PyTuple_GET_ITEM(values, i);
        if (!reader_is_tensor(reader, given.items[i]) && !reader_is_plain(reader, given.items[i]))
            Py_RETURN_NOTIMPLEMENTED;
    }
    Thread *thread = thread_state();
    int gradients = reader_gradients(reader, thread);
    for (int i = 0; i < self->before + self->after; i++) {
        Outcome outcome = run_step(thread, reader, gradients, self, i, given.items, count, shapes, &result);
        if (outcome == FAILED) return NULL;
        if (outcome == UNSUITED) return Py_BuildValue("(iO)", i - 1, Py_None);
        if (outcome == CHANGED) return Py_BuildValue("(iN)", i, result);
    }
    Py_RETURN_NONE;
}

/* ---- calls of ops ---- */

FLAT PyObject *memo_run(Thread *thread, Call *call) {
    Memo *memo = (Memo *)call->plan;
    const Reader *reader = call->site->reader;
    int gradients = 0;
    uint64_t variant = (uint64_t)thread->next.activation->variant; /* before anything else runs */
    uint64_t key = reader ? reader_key(reader, thread, call->given, memo->sized, &gradients) : 0;
    if (key) key ^= variant;
    PyObject *known = memo->usual.value;
    if (unlikely(key != memo->usual.key || !known)) known = key ? map_get(&memo->entries, key) : NULL;
    if (unlikely(!known)) {
        counts.handed[key ? NEW_FORM : !reader ? NO_READER : reader_is_kept_out(reader) ? MODE : ARGUMENTS]++;
        return hand_over(thread, call, key, NULL);
    }
    counts.native++;
    if (known == Py_None) return call_op(thread, call);
    Py_INCREF(known);
    PyObject *result = run_program(thread, call, gradients, (Program *)known);
    Py_DECREF(known);
    return result;
}

/* An op of known id that has a plan, or for which there is none yet: `thread->next` says more. It has few enough
   arguments for a call at the end of a function to be a jump. */
HOT PyObject *run_plan(Thread *thread, Site *site, PyObject *self, PyObject *a, PyObject *b, PyObject *c) {
    const Activation *activation = thread->next.activation;
    PyObject *plan = thread->next.plan, *result;
    Arguments given;
    read_arguments(site, &given, self, a, b, c);
    Call call = {site, activation->state, plan ? plan : Py_None, thread->next.id, &given, self, a, b, c};
    if (plan == Py_None || !is_targets(site, self)) return checked(thread, call_op(thread, &call));
    Py_INCREF(call.state);
    Py_INCREF(call.plan);
    if (likely(plan && activation->memos && Py_IS_TYPE(plan, &Memo_Type))) result = memo_run(thread, &call);
    else {
        counts.handed[plan || !activation->table ? SWITCHES : NEW_OP]++;
        result = hand_over(thread, &call, 0, NULL);
    }
    Py_DECREF(call.plan);
    Py_DECREF(call.state);
    return checked(thread, result);
}

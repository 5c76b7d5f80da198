/* Calls of ops that have plans: native code runs their programs, or hands the calls over to Python. */
#include "execution/values.h"
#include "interception/call.h"

/* ---- steps ---- */

/* FAILED: an exception is set.  UNSUITED: the routine selects a value that this call lacks, and was not called. */
typedef enum { FAILED = -1, UNCHANGED, CHANGED, UNSUITED } Outcome;

/* Tell the reporter of the exception that a step has raised; the exception stays set, with the notes that Python adds. */

static void report_failure(Program *program, Py_ssize_t index) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    disturb();
    if (error && trace) PyException_SetTraceback(error, trace);
    PyObject *answer = error ? PyObject_CallMethod(program->reporter, "failed", "nO", index, error) : NULL;
    if (!answer) PyErr_Clear(); /* the routine's own exception is the one to be seen */
    Py_XDECREF(answer);
    PyErr_Restore(kind, error, trace);
}

/* Whether a routine has returned the very values that it was called with, so that nothing changes. */
static int returns_its_values(PyObject *result, PyObject *const *values, Py_ssize_t count) {
    if (count == 1) return result == values[0] && !PyTuple_Check(result) && !PyList_Check(result);
    if (!PyTuple_CheckExact(result) && !PyList_CheckExact(result)) return 0;
    if (PySequence_Fast_GET_SIZE(result) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PySequence_Fast_GET_ITEM(result, i) != values[i]) return 0;
    return 1;
}

/* The arguments of a step's routine: the values themselves, or those selected, laid out after a free place in `stack`.
   NULL: the step is unsuited. */
static PyObject **step_arguments(const Step *step, PyObject **values, Py_ssize_t count, PyObject *shapes,
                                 PyObject **stack, Py_ssize_t *selected) {
    *selected = step->takes_all ? count : step->count;
    if (step->takes_all && !step->names) return values;
    PyObject **arguments = stack + 1, *name, *value;
    for (Py_ssize_t i = 0; i < *selected; i++) {
        Py_ssize_t position = step->takes_all ? i : step->select[i];
        if (position >= count) return NULL;
        arguments[i] = values[position];
    }
    Py_ssize_t position = 0, i = *selected;
    while (step->kwargs && PyDict_Next(step->kwargs, &position, &name, &value)) arguments[i++] = value;
    if (step->takes_shapes) arguments[i] = shapes;
    return arguments;
}

/* Call a routine on values that lie after a free place. A method of Python code is called as its function, with the
   object in the free place: the method would do the same, and take longer. */
static inline PyObject *call_routine(PyObject *func, PyObject **arguments, size_t count, PyObject *names) {
    if (!Py_IS_TYPE(func, &PyMethod_Type) || !Py_IS_TYPE(PyMethod_GET_FUNCTION(func), &PyFunction_Type))
        return PyObject_Vectorcall(func, arguments, count | PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    PyFunctionObject *function = (PyFunctionObject *)PyMethod_GET_FUNCTION(func);
    arguments[-1] = PyMethod_GET_SELF(func);
    return function->vectorcall((PyObject *)function, arguments - 1, count + 1, names);
}

static const ShapeCode NO_SHAPES;

static Outcome call_step(Thread *thread, const Reader *reader, int gradients, Program *program, Py_ssize_t index,
                         PyObject **values, Py_ssize_t count, Shapes *execution_shapes, PyObject **result) {
    Step *step = &program->steps[index];
    PyObject *shapes = step->takes_shapes ? shapes_as_objects(execution_shapes) : NULL;
    if (step->takes_shapes && !shapes) return FAILED;
    PyObject *stack[2 + 2 * VALUE_LIMIT], **arguments = values;
    uint64_t versions[VALUE_LIMIT];
    Py_ssize_t selected = count;
    if (!step->takes_all || step->names) arguments = step_arguments(step, values, count, shapes, stack, &selected);
    if (!arguments) return UNSUITED;
    Outcome outcome = FAILED;
    if (lock_acquire(step->lock, thread)) goto done;
    if (step->isolated) {
        reader_versions(reader, arguments, selected, versions);
        if (gradients) reader_set_gradients(reader, thread, 0);
    }
    thread->suspensions++;
    *result = call_routine(step->func, arguments, (size_t)(step->takes_all ? selected : step->positional), step->names);
    disturb();
    thread->suspensions--;
    if (step->isolated) reader_set_gradients(reader, thread, gradients);
    if (*result) {
        outcome = *result == Py_None || returns_its_values(*result, arguments, selected) ? UNCHANGED : CHANGED;
        Py_ssize_t written = step->isolated ? reader_written(reader, arguments, selected, versions) : -1;
        if (written >= 0) {
            Py_XDECREF(PyObject_CallMethod(program->reporter, "mutated", "nn", index, written));
            outcome = FAILED;
        }
        if (outcome != CHANGED) Py_CLEAR(*result);
    }
    lock_release(step->lock);
done:
    if (outcome == FAILED) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a routine failed without an exception");
        report_failure(program, index);
    }
    return outcome;
}

static inline Outcome run_step(Thread *thread, const Reader *reader, int gradients, Program *program, Py_ssize_t index,
                               PyObject **values, Py_ssize_t count, Shapes *shapes, const OpInputs *op_inputs, PyObject **result) {
    Step *step = &program->steps[index];
    if (step->tally && tally_count(step->tally, step->takes_shapes ? &shapes->code : &NO_SHAPES)) return UNCHANGED;
    if (step->observer) {
        PyObject *selection[VALUE_LIMIT];
        int selects = !step->takes_all && step->observer->reads == SELECTED_VALUES;
        for (int i = 0; selects && i < step->count; i++) {
            if (step->select[i] >= count) return UNSUITED;
            selection[i] = values[step->select[i]];
        }
        Observation observation = step->observer->observe(step->observer, thread, reader, selects ? selection : values,
                                                          selects ? step->count : count, op_inputs);
        if (observation == OBSERVED) return UNCHANGED;
        if (observation == OBSERVER_FAILED) {
            report_failure(program, index);
            return FAILED;
        }
    }
    return call_step(thread, reader, gradients, program, index, values, count, shapes, result);
}

/* ---- hand-over to Python ---- */

static PyObject *list_of(PyObject *const *items, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) PyList_SET_ITEM(list, i, Py_NewRef(items[i]));
    return list;
}

/* Count a call that native code has begun, and counted, as one that Python runs. */
static void recount(Reason reason) {
    counts.native--;
    counts.handed[reason]++;
}

/* Tell the observers among the steps from one on that Python runs these; -1: an exception. */
static int hand_over_steps(Thread *thread, const Reader *reader, Program *program, Py_ssize_t first, const OpInputs *op_inputs) {
    for (Py_ssize_t i = first; i < program->before + program->after; i++) {
        Observer *observer = program->steps[i].observer;
        if (!observer || !observer->hand_over || !observer->hand_over(observer, thread, reader, op_inputs)) continue;
        report_failure(program, i);
        return -1;
    }
    return 0;
}

/* Hand a call over to Python after a step, whose routine returned `result` (stolen); return what the call returns. */
static PyObject *resume_in_python(Thread *thread, const Call *call, Program *program, const Execution *execution,
                                  Py_ssize_t step, PyObject *result, PyObject *outputs) {
    recount(RESULT);
    const OpInputs op_inputs = {execution->inputs.items, execution->count == UNREAD ? 0 : execution->count};
    if (hand_over_steps(thread, call->site->reader, program, step + 1, &op_inputs)) {
        Py_XDECREF(result);
        return NULL;
    }
    PyObject *inputs = execution->changed ? list_of(execution->inputs.items, execution->count) : NULL;
    if (execution->changed && !inputs) {
        Py_XDECREF(result);
        return NULL;
    }
    PyObject *resumption = make_resumption(program->plan, step, result, outputs, inputs);
    PyObject *value = resumption ? call_handler(thread, call, 0, resumption) : NULL;
    Py_XDECREF(resumption);
    return value;
}

/* ---- values that routines return ---- */

typedef enum { SUBSTITUTION_FAILED = -1, LEFT_TO_PYTHON, SUBSTITUTED } Substitution; /* FAILED: an exception is set */

/* Put the values that a routine returned in the place of those that it was called with, and note their positions in
   `changed`. LEFT_TO_PYTHON: some value cannot stand there without Python, and none was put. */
static Substitution substitute_values(Thread *thread, const Reader *reader, int gradients, const Step *step,
                                      PyObject **values, Py_ssize_t count, PyObject *result, Execution *execution,
                                      uint32_t *changed) {
    PyObject *originals[VALUE_LIMIT], *items[VALUE_LIMIT]; /* items: owned, since a list may lose them meanwhile */
    Py_ssize_t selected = step->takes_all ? count : step->count;
    int suited = 1;
    if (execution->replacement_count + selected > VALUE_LIMIT) return LEFT_TO_PYTHON;
    if (selected != 1 && ((!PyTuple_CheckExact(result) && !PyList_CheckExact(result)) ||
                          PySequence_Fast_GET_SIZE(result) != selected))
        return LEFT_TO_PYTHON;
    for (Py_ssize_t i = 0; i < selected; i++) {
        originals[i] = values[step->takes_all ? i : step->select[i]];
        items[i] = Py_NewRef(selected == 1 ? result : PySequence_Fast_GET_ITEM(result, i));
        suited &= items[i] == originals[i] || (step->isolated ? can_substitute(reader, originals[i], items[i])
                                                             : reader_memory(reader, items[i]) != NULL);
    }
    Substitution substitution = suited ? SUBSTITUTED : LEFT_TO_PYTHON;
    for (Py_ssize_t i = 0; substitution == SUBSTITUTED && i < selected; i++) {
        if (items[i] == originals[i]) continue;
        Py_ssize_t position = step->takes_all ? i : step->select[i];
        thread->suspensions++;
        PyObject *value =
            step->isolated ? with_straight_through(reader, originals[i], items[i], gradients) : Py_NewRef(items[i]);
        thread->suspensions--;
        if (value) {
            execution->replacements[execution->replacement_count++] = values[position] = value;
            *changed |= (uint32_t)1 << position;
        } else
            substitution = SUBSTITUTION_FAILED;
    }
    for (Py_ssize_t i = 0; i < selected; i++) Py_DECREF(items[i]);
    return substitution;
}

/* Give the call the inputs that routines have changed, after a free place in `flat`. NO_CALL_WITH: one of them is no
   argument of the call by itself. */
static CallWith pass_changed_inputs(const Program *program, Call *call, const Execution *execution, PyObject **flat,
                            NewArguments *owned) {
    flat++;
    flatten_arguments(&call->arguments, flat);
    for (Py_ssize_t i = 0; i < execution->count; i++) {
        if (!(execution->changed >> i & 1)) continue;
        Py_ssize_t source = program->sources ? program->sources[i] : i;
        if (i == program->packed_input || source < 0) return NO_CALL_WITH;
        flat[source] = execution->inputs.items[i];
    }
    return call_with(call, flat, owned);
}

/* ---- the op ---- */

/* Leave the execution's trace with the backward ops that the op has made: by native code, or by Python. */
static int leave_trace(const Call *call, const Program *program, Execution *execution, uint64_t begin, uint64_t start,
                       uint64_t end, PyObject *outputs) {
    int marks = Py_IS_TYPE(program->trace, &BackwardMarker_Type);
    if (marks && !marker_reads_written(program->trace))
        return mark_backward_nodes(program->trace, begin, start, end, outputs, NULL, execution->shapes.objects);
    if (!read_inputs(execution, program, &call->arguments)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "the inputs of a call have changed");
        return -1;
    }
    PyObject *const *inputs = execution->inputs.items;
    if (marks && execution->count)
        return mark_backward_nodes(program->trace, begin, start, end, outputs, inputs[0], execution->shapes.objects);
    PyObject *list = list_of(inputs, execution->count), *answer = NULL;
    if (list)
        answer = PyObject_CallFunction(program->trace, "KKKOO", (unsigned long long)begin, (unsigned long long)start,
                                       (unsigned long long)end, outputs, list);
    Py_XDECREF(list);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Return the outputs, once their shapes have been read, if the program needs any; takes over the reference. */
static inline PyObject *with_shapes(const Reader *reader, Program *program, Execution *execution, PyObject *outputs) {
    int needed = outputs && (program->needs_shapes || program->needs_shape_codes);
    return needed ? shapes_of_outputs(reader, program, execution, outputs) : outputs;
}

/* Call the op between two readings of the clock, which counts the backward ops that the framework makes; leave the
   execution's trace at those of the op. */
FLAT PyObject *call_traced(Thread *thread, Call *call, Program *program, Execution *execution, uint64_t begin) {
    uint64_t start = reader_clock(call->site->reader);
    PyObject *outputs = call_op(thread, call);
    uint64_t end = reader_clock(call->site->reader);
    outputs = with_shapes(call->site->reader, program, execution, outputs);
    if (!outputs || start == end) return outputs;
    thread->suspensions++;
    int failed = leave_trace(call, program, execution, begin, start, end, outputs);
    thread->suspensions--;
    if (failed) Py_CLEAR(outputs);
    return outputs;
}

/* Call the routine that replaces the op. */
static PyObject *run_replacement(Thread *thread, Program *program, Execution *execution) {
    Py_ssize_t index = program->before + program->after, selected;
    Step *step = &program->steps[index];
    PyObject *stack[1 + 2 * VALUE_LIMIT], *result = NULL;
    PyObject **arguments = step_arguments(step, execution->inputs.items, execution->count, NULL, stack, &selected);
    if (!arguments)
        PyErr_SetString(PyExc_SystemError, "the inputs of a call have changed");
    else if (!lock_acquire(step->lock, thread)) {
        thread->suspensions++;
        result = call_routine(step->func, arguments, step->positional, step->names);
        thread->suspensions--;
        lock_release(step->lock);
    }
    if (!result) report_failure(program, index);
    return result;
}

/* Run the op, or what replaces it, after the steps before it. */
FLAT PyObject *run_op(Thread *thread, Call *call, Program *program, Execution *execution, uint64_t begin) {
    if (program->replaces) {
        PyObject *result = run_replacement(thread, program, execution);
        if (result != Py_NotImplemented) return with_shapes(call->site->reader, program, execution, result);
        Py_DECREF(result);
    }
    if (program->trace != Py_None) return call_traced(thread, call, program, execution, begin);
    return with_shapes(call->site->reader, program, execution, call_op(thread, call));
}

/* ---- programs ---- */

/* Run the steps before the op. 1: the op is next; 0: Python has run the rest of the call, which returns `end`, or NULL
   with an exception. */
static int run_before(Thread *thread, const Call *call, int gradients, Program *program, Execution *execution,
                      PyObject **end) {
    const Reader *reader = call->site->reader;
    PyObject *result = NULL, **inputs = execution->inputs.items;
    const OpInputs op_inputs = {NULL, 0};
    for (int i = 0; i < program->before; i++) {
        Outcome outcome = run_step(thread, reader, gradients, program, i, inputs, execution->count, &execution->shapes,
                                   &op_inputs, &result);
        if (outcome == UNCHANGED) continue;
        if (outcome == FAILED) return 0;
        Substitution substitution = LEFT_TO_PYTHON;
        if (outcome == CHANGED && program->substitutes)
            substitution = substitute_values(thread, reader, gradients, &program->steps[i], inputs, execution->count,
                                             result, execution, &execution->changed);
        if (substitution == LEFT_TO_PYTHON) {
            *end = resume_in_python(thread, call, program, execution, outcome == CHANGED ? i : i - 1, result, NULL);
            return 0;
        }
        Py_CLEAR(result);
        if (substitution == SUBSTITUTION_FAILED) {
            report_failure(program, i);
            return 0;
        }
    }
    return 1;
}

/* Run the steps after the op, and return what the call returns; takes over the reference to `outputs`.
   Python continues where an output shares memory with a changed input, and after a step whose value native code cannot
   put in the place of the output. */
static PyObject *run_after(Thread *thread, const Call *call, int gradients, Program *program, Execution *execution,
                           PyObject *outputs) {
    const Reader *reader = call->site->reader;
    if (!program->after && !execution->changed) return outputs;
    PyObject *const *values, *written[VALUE_LIMIT], *result = NULL, *end = NULL;
    Values current;
    Py_ssize_t count = outputs_of(reader, program, execution, &outputs, &values, written);
    if (count == UNREAD || (execution->changed && shares_changed_memory(reader, execution, values, count))) {
        result = resume_in_python(thread, call, program, execution, program->before - 1, NULL, outputs);
        Py_DECREF(outputs);
        return result;
    }
    if (!program->after) return outputs;
    int may_substitute = values == &outputs && program->substitutes && count; /* of a single output */
    uint32_t replaced = 0;
    for (Py_ssize_t i = 0; i < count; i++) current.items[i] = Py_NewRef(values[i]); /* a list may lose them */
    PyObject *const output = count == 1 ? current.items[0] : NULL;
    int last = program->before + program->after - 1;
    const OpInputs op_inputs = {execution->inputs.items, execution->count == UNREAD ? 0 : execution->count};
    for (int i = program->before; !end && i <= last; i++) {
        Outcome outcome = run_step(thread, reader, gradients, program, i, current.items, count, &execution->shapes,
                                   &op_inputs, &result);
        if (outcome == UNCHANGED) continue;
        PyObject *previous = may_substitute ? current.items[0] : NULL;
        Substitution substitution = LEFT_TO_PYTHON;
        if (outcome == CHANGED && may_substitute && read_inputs(execution, program, &call->arguments) &&
            may_replace_output(reader, gradients, execution, output, result, i == last))
            substitution = substitute_values(thread, reader, gradients, &program->steps[i], current.items, count, result,
                                             execution, &replaced);
        if (substitution == SUBSTITUTED) {
            Py_INCREF(current.items[0]);
            if (previous != current.items[0]) Py_DECREF(previous);
            Py_CLEAR(result);
            continue;
        }
        if (substitution == SUBSTITUTION_FAILED) {
            report_failure(program, i);
            Py_CLEAR(result);
        } else if (outcome != FAILED)
            end = resume_in_python(thread, call, program, execution, outcome == CHANGED ? i : i - 1, result,
                                   replaced ? current.items[0] : outputs);
        if (!end) {
            Py_CLEAR(outputs);
            break;
        }
    }
    if (replaced && outputs && !end) Py_SETREF(outputs, Py_NewRef(current.items[0]));
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(current.items[i]);
    if (!end) return outputs;
    Py_DECREF(outputs);
    return end;
}

typedef enum { REFUSAL_FAILED = -1, ACCEPTED, REFUSED } Refusal; /* FAILED: an exception is set */

/* Ask `refuse` whether Python has to run this call of the program's form. */
static Refusal is_refused(Thread *thread, const Call *call, Program *program, Execution *execution) {
    if (!read_inputs(execution, program, &call->arguments) || !execution->count)
        return PyErr_Occurred() ? REFUSAL_FAILED : REFUSED;
    thread->suspensions++;
    PyObject *answer = PyObject_CallOneArg(program->refuse, execution->inputs.items[0]);
    thread->suspensions--;
    int refused = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return refused < 0 ? REFUSAL_FAILED : refused ? REFUSED : ACCEPTED;
}

/* Run a program at a call: steps before the op, the op or its replacement, steps after it; return what the call returns.
   At any point Python may take over, and then returns the rest. */
FLAT PyObject *run_program(Thread *thread, Call *call, int gradients, Program *program) {
    const Reader *reader = call->site->reader;
    Execution execution;
    __builtin_prefetch(program->steps);
    execution_begin(&execution);
    Call *op_call = call, changed_call;
    NewArguments owned = {NULL, NULL};
    PyObject *flat[VALUE_LIMIT + 1], *result = NULL;
    if (program->refuse != Py_None) {
        Refusal refusal = is_refused(thread, call, program, &execution);
        if (refusal == REFUSED) {
            recount(WRITTEN);
            result = call_handler(thread, call, 0, NULL);
        }
        if (refusal != ACCEPTED) goto done;
    }
    uint64_t begin = program->trace == Py_None ? 0 : reader_clock(reader);
    if (program->before || program->replaces || program->needs_shapes || program->needs_shape_codes || program->written) {
        if (!read_inputs(&execution, program, &call->arguments)) {
            recount(ARGUMENTS);
            if (!PyErr_Occurred()) result = call_handler(thread, call, 0, NULL);
            goto done;
        }
        if ((program->needs_shapes || program->needs_shape_codes) && shapes_of_inputs(reader, program, &execution)) goto done;
    }
    if (!run_before(thread, call, gradients, program, &execution, &result)) goto done;
    if (execution.changed) {
        changed_call = *call;
        op_call = &changed_call;
        CallWith with = pass_changed_inputs(program, op_call, &execution, flat, &owned);
        if (with == NO_CALL_WITH)
            result = resume_in_python(thread, call, program, &execution, program->before - 1, NULL, NULL);
        if (with != CALL_WITH_READY) goto done;
    }
    if (program->after) __builtin_prefetch(program->steps[program->before].tally);
    PyObject *outputs = run_op(thread, op_call, program, &execution, begin);
    if (outputs && program->replaces && (PyTuple_CheckExact(outputs) || PyList_CheckExact(outputs))) {
        /* Python gives a replacement's outputs the form of the op's, such as a named tuple. */
        result = resume_in_python(thread, call, program, &execution, program->before - 1, NULL, outputs);
        Py_DECREF(outputs);
    } else if (outputs)
        result = run_after(thread, call, gradients, program, &execution, outputs);
done:
    Py_XDECREF(owned.args);
    Py_XDECREF(owned.kwargs);
    execution_end(&execution);
    return result;
}

static PyObject *resume_on_values(Reason reason, Py_ssize_t step, PyObject *result) {
    counts.handed[reason]++;
    return make_resumption(Py_None, step, result, NULL, NULL);
}

PyObject *run_on_values(Program *program, const Reader *reader, PyObject *values, PyObject *entered, int is_alone,
                        Shapes *shapes) {
    PyObject *result = NULL;
    Values current;
    Py_ssize_t count = PyTuple_GET_SIZE(values);
    int is_python_due = python_mode_active(reader);
    if (is_python_due && !is_alone) return resume_on_values(ARGUMENTS, -1, NULL); /* as the hook before the op did */
    Thread *thread = thread_state();
    int gradients = reader_gradients(reader, thread), unread = is_python_due || count > VALUE_LIMIT;
    const OpInputs op_inputs = {entered ? ((PyTupleObject *)entered)->ob_item : NULL, entered ? PyTuple_GET_SIZE(entered) : 0,
                                is_alone};
    for (Py_ssize_t i = 0; !unread && i < count; i++) {
        current.items[i] = PyTuple_GET_ITEM(values, i);
        unread = !reader_is_tensor(reader, current.items[i]) && !reader_is_plain(reader, current.items[i]);
    }
    if (unread) return hand_over_steps(thread, reader, program, 0, &op_inputs) ? NULL : resume_on_values(ARGUMENTS, -1, NULL);
    for (int i = 0; i < program->before + program->after; i++) {
        Outcome outcome = run_step(thread, reader, gradients, program, i, current.items, count, shapes, &op_inputs, &result);
        if (outcome == UNCHANGED) continue;
        if (outcome == FAILED) {
            counts.handed[RESULT]++;
            return NULL;
        }
        if (hand_over_steps(thread, reader, program, outcome == CHANGED ? i + 1 : i, &op_inputs)) {
            Py_XDECREF(result);
            return NULL;
        }
        return resume_on_values(RESULT, outcome == CHANGED ? i : i - 1, outcome == CHANGED ? result : NULL);
    }
    counts.native++;
    Py_RETURN_NONE;
}

/* ---- calls of ops ---- */

/* Run the program that the op's cache has for calls of this form; without one Python runs the call, and may store one. */
FLAT PyObject *run_cached(Thread *thread, Call *call, CallCache *cache, uint64_t variant) {
    const Reader *reader = call->site->reader;
    int gradients = 0;
    uint64_t key = reader ? reader_key(reader, thread, &call->arguments, cache->sized, &gradients) : 0;
    if (key) key ^= variant;
    PyObject *program = cache->last_learned.value;
    if (unlikely(key != cache->last_learned.key || !program)) program = key ? map_get(&cache->entries, key) : NULL;
    if (unlikely(!program)) {
        counts.handed[!reader ? NO_READER : python_mode_active(reader) ? MODE : key ? NEW_FORM : ARGUMENTS]++;
        return call_handler(thread, call, key, NULL);
    }
    counts.native++;
    if (program == Py_None) return call_op(thread, call);
    Py_INCREF(program); /* a routine may make the cache forget the program */
    PyObject *result = run_program(thread, call, gradients, (Program *)program);
    Py_DECREF(program);
    return result;
}

HOT PyObject *run_call(Thread *thread, const Activation *activation, Call *call) {
    PyObject *plan = call->plan, *result;
    if (plan == Py_None || !receiver_fits_target(call->site, call->self))
        return reraise_kept_failure(thread, call_op(thread, call));
    uint64_t variant = (uint64_t)activation->variant; /* read before any Python runs, which may end the activation */
    PyObject *state = Py_NewRef(call->state);
    Py_XINCREF(plan);
    if (likely(plan && activation->caches && Py_IS_TYPE(plan, &CallCache_Type)))
        result = run_cached(thread, call, (CallCache *)plan, variant);
    else {
        counts.handed[plan || !activation->table ? SWITCHES : NEW_OP]++;
        result = call_handler(thread, call, 0, NULL);
    }
    Py_XDECREF(plan);
    Py_DECREF(state);
    return reraise_kept_failure(thread, result);
}

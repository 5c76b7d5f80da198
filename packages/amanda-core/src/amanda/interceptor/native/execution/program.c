/* Programs: plans, compiled for calls of one form. */
#include "execution/program.h"
#include <structmember.h>

static int read_step(Step *step, PyObject *description) {
    PyObject *func, *select, *kwargs, *lock;
    int isolated, shapes = 0;
    if (!PyArg_ParseTuple(description, "OOO!O!p|p", &func, &select, &PyDict_Type, &kwargs, &Lock_Type, &lock, &isolated, &shapes))
        return -1;
    if (select != Py_None) {
        if (!PyTuple_Check(select) || PyTuple_GET_SIZE(select) > VALUE_LIMIT) goto unsuited;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(select); i++) {
            long position = PyLong_AsLong(PyTuple_GET_ITEM(select, i));
            if (position == -1 && PyErr_Occurred()) return -1;
            if (position < 0 || position >= VALUE_LIMIT) goto unsuited;
            step->select[step->count++] = (uint8_t)position;
        }
    }
    if (PyDict_GET_SIZE(kwargs) + step->count > VALUE_LIMIT) goto unsuited;
    step->positional = step->count;
    step->func = Py_NewRef(func);
    step->lock = (Lock *)Py_NewRef(lock);
    step->isolated = (char)isolated;
    step->takes_all = select == Py_None;
    step->takes_shapes = (char)shapes;
    if (PyType_IsSubtype(Py_TYPE(func), &Tally_Type) && !step->takes_all && !step->count && !PyDict_GET_SIZE(kwargs))
        step->tally = (Tally *)func;
    if (PyType_IsSubtype(Py_TYPE(func), &Observer_Type)) {
        Observer *observer = (Observer *)func;
        if (step->takes_all || observer->reads != ALL_VALUES) step->observer = observer;
    }
    if (!PyDict_GET_SIZE(kwargs) && !shapes) return 0;
    step->kwargs = PyDict_Copy(kwargs);
    step->names = step->kwargs ? PySequence_Tuple(step->kwargs) : NULL; /* a subclass may iterate otherwise */
    if (shapes && step->names) {
        PyObject *last = Py_BuildValue("(s)", "shapes");
        Py_SETREF(step->names, last ? PySequence_Concat(step->names, last) : NULL);
        Py_XDECREF(last);
    }
    return step->names ? 0 : -1;
unsuited:
    PyErr_Format(PyExc_ValueError, "no native program has a step like %R", description);
    return -1;
}

/* A step that runs instead of the op; its inputs by name come after the others. */
static int read_replacement(Step *step, PyObject *description) {
    PyObject *values_step, *named;
    if (!PyArg_ParseTuple(description, "O!O!", &PyTuple_Type, &values_step, &PyTuple_Type, &named)) return -1;
    if (read_step(step, values_step)) return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(named);
    if (step->takes_all || count > step->count) {
        PyErr_Format(PyExc_ValueError, "no native program has a replacement like %R", description);
        return -1;
    }
    if (!count) return 0;
    step->positional = (uint8_t)(step->count - count);
    PyObject *names = step->names ? PySequence_Concat(named, step->names) : Py_NewRef(named);
    Py_XSETREF(step->names, names);
    return names ? 0 : -1;
}

static int read_sources(Program *program, PyObject *sources) {
    Py_ssize_t count = PyTuple_GET_SIZE(sources);
    int in_order = 1, first, last;
    if (count > VALUE_LIMIT) goto too_many;
    program->sources = PyMem_Calloc((size_t)count + 1, 1);
    if (!program->sources) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *source = PyTuple_GET_ITEM(sources, i);
        if (!PyTuple_Check(source)) {
            long from = PyLong_AsLong(source);
            if (from == -1 && PyErr_Occurred()) return -1;
            if (from + 2 > VALUE_LIMIT) goto too_many;
            program->sources[i] = (int8_t)(from < 0 ? -1 : from);
            in_order &= from == i;
            continue;
        }
        in_order = 0;
        if (program->packed_input >= 0 || !PyArg_ParseTuple(source, "ii", &first, &last)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "one input at most is made of several arguments");
            return -1;
        }
        if (first < 0 || first + 1 > VALUE_LIMIT || last + 1 > VALUE_LIMIT) goto too_many;
        program->packed_input = (int8_t)i;
        program->first = (int8_t)first;
        program->last = (int8_t)(last < 0 ? 0 : last);
    }
    program->source_count = (int8_t)count;
    if (in_order) { /* as many inputs as arguments */
        PyMem_Free(program->sources);
        program->sources = NULL;
    }
    return 0;
too_many:
    PyErr_SetString(PyExc_ValueError, "too many inputs for a native program");
    return -1;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"before", "after", "reporter", "sources", "constants",
                            "plan", "trace", "refuse", "replace", "substitutes", "shaped", "written", NULL};
    PyObject *before, *after, *reporter, *sources = Py_None, *constants = Py_None, *plan = Py_None;
    PyObject *trace = Py_None, *refuse = Py_None, *replace = Py_None;
    PyObject *written = NULL;
    int substitutes = 0, shaped = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O|OOOOOOppO!", names, &PyTuple_Type, &before, &PyTuple_Type, &after,
                                     &reporter, &sources, &constants, &plan, &trace, &refuse, &replace, &substitutes, &shaped,
                                     &PyTuple_Type, &written))
        return NULL;
    for (Py_ssize_t i = 0; written && i < PyTuple_GET_SIZE(written); i++) {
        Py_ssize_t position = PyLong_AsSsize_t(PyTuple_GET_ITEM(written, i));
        if (position == -1 && PyErr_Occurred()) return NULL;
        if (position < 0 || sources == Py_None || position >= PyTuple_GET_SIZE(sources))
            return PyErr_Format(PyExc_ValueError, "no input %zd, which is written", position);
    }
    if (sources != Py_None && (!PyTuple_Check(sources) || !PyTuple_Check(constants) ||
                               PyTuple_GET_SIZE(sources) != PyTuple_GET_SIZE(constants)))
        return PyErr_Format(PyExc_TypeError, "sources and constants are tuples of one length");
    Py_ssize_t count = PyTuple_GET_SIZE(before) + PyTuple_GET_SIZE(after);
    int replaces = replace != Py_None;
    Program *program = (Program *)type->tp_alloc(type, count + replaces);
    if (!program) return NULL;
    program->replaces = (char)replaces;
    program->substitutes = (char)substitutes;
    program->needs_shapes = (char)shaped;
    program->reporter = Py_NewRef(reporter);
    program->constants = Py_NewRef(constants);
    program->plan = Py_NewRef(plan);
    program->trace = Py_NewRef(trace);
    program->refuse = Py_NewRef(refuse);
    program->written = written && PyTuple_GET_SIZE(written) ? Py_NewRef(written) : NULL;
    program->packed_input = -1;
    program->before = (int)PyTuple_GET_SIZE(before);
    program->after = (int)PyTuple_GET_SIZE(after);
    int failed = sources != Py_None && read_sources(program, sources);
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = read_step(&program->steps[i], i < program->before ? PyTuple_GET_ITEM(before, i)
                                                                 : PyTuple_GET_ITEM(after, i - program->before));
    if (replaces && !failed) failed = read_replacement(&program->steps[count], replace);
    for (Py_ssize_t i = 0; i < count; i++)
        *(program->steps[i].tally ? &program->needs_shape_codes : &program->needs_shapes) |= program->steps[i].takes_shapes;
    if (failed) Py_CLEAR(program);
    return (PyObject *)program;
}

static int program_traverse(Program *self, visitproc visit, void *arg) {
    Py_VISIT(self->reporter);
    Py_VISIT(self->constants);
    Py_VISIT(self->plan);
    Py_VISIT(self->trace);
    Py_VISIT(self->refuse);
    Py_VISIT(self->written);
    Py_VISIT(self->shapes);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_VISIT(self->steps[i].func);
        Py_VISIT(self->steps[i].kwargs);
    }
    return 0;
}

static void program_dealloc(Program *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->reporter);
    Py_CLEAR(self->constants);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->trace);
    Py_CLEAR(self->refuse);
    Py_CLEAR(self->written);
    Py_CLEAR(self->shapes);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_CLEAR(self->steps[i].func);
        Py_CLEAR(self->steps[i].kwargs);
        Py_CLEAR(self->steps[i].names);
        Py_CLEAR(self->steps[i].lock);
    }
    PyMem_Free(self->sources);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef program_methods[] = {
    {"hook", (PyCFunction)program_hook, METH_VARARGS,
     "hook(reader, resume, actions, idle, shapes=None): return a callable that runs the routines on a tuple of values.\n\n"
     "It returns None if the routines leave the values as they are, else the result of resume(actions, values, resumption),\n"
     "with which Python continues.  idle: for a hook after an op, the hook before it, which `is_idle` and is left out; None.  shapes: of the op;\n"
     "the shapes of the call's arguments are added, for routines that take shapes, and for resume, as its last argument."},
    {0}};

PyTypeObject Program_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Program",
    .tp_basicsize = sizeof(Program),
    .tp_itemsize = sizeof(Step),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Program(before, after, reporter, sources=None, constants=None, plan=None, trace=None, refuse=None,\n"
              "replace=None, substitutes=False, shaped=False, written=()): routines around an op.\n\n"
              "before, after: steps (func, select, kwargs, lock, isolated, shapes=False).  A ShapeCounter that selects no\n"
              "values counts the execution, by shapes if it takes shapes.\n"
              "reporter: failed(step, error) is called with an exception; mutated(step, index) raises for a written input.\n"
              "sources: for each input the index of its argument, positional and then by keyword; -1 for the constant at\n"
              "its position; a pair (first, end) for the one input that is a tuple of several arguments.\n"
              "plan: passed to the handler if Python continues, since the call may look different by then.\n"
              "trace(begin, start, end, outputs, inputs): called if the op has made backward ops, with the reader's clock\n"
              "before the routines, before the op and after it; or a marker of `Graphs.marker`.\n"
              "refuse(input): returns True if Python has to run a call with this first input.\n"
              "replace: a step that runs instead of the op, and the names of the last values that it selects.\n"
              "substitutes: whether native code may put values that routines return in the place of tensors.\n"
              "shaped: whether marks get the shapes of the op; steps that take shapes get them in any case.\n"
              "written: positions of the inputs that are the outputs of a call that returns None.",
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
    .tp_traverse = (traverseproc)program_traverse,
    .tp_methods = program_methods,
};

/* Hooks at a framework's backward ops: how the driver's are registered and removed, thousands in a pass. */
#include "execution/program.h"
#include "interception/place.h"
#include "pytorch/autograd.h"
#include <structmember.h>

#ifndef Py_TRASHCAN_BEGIN /* from CPython 3.14 on the interpreter does that for every type */
#define Py_TRASHCAN_BEGIN(object, dealloc)
#define Py_TRASHCAN_END
#endif

/* ---- hooks of a node that had none ---- */

/* A dict of hooks, as the framework keeps one at a node, and the handle of its first hook: one object in place of an
   OrderedDict with its list, a handle and a number. */
typedef struct {
    PyDictObject dict;
    PyObject *weak_references; /* of the framework's handles */
} NodeHooks;

static PyObject *key; /* of the first hook; the framework's own keys are numbers */

static PyObject *hooks_hook(PyObject *self, void *Py_UNUSED(closure)) {
    PyObject *hook = PyDict_GetItemWithError(self, key);
    return hook ? Py_NewRef(hook) : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *hooks_remove(PyObject *self, PyObject *Py_UNUSED(none)) {
    if (PyDict_DelItem(self, key)) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError)) return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

static PyObject *hooks_replace(PyObject *self, PyObject *hook) {
    int contains = PyDict_Contains(self, key);
    if (contains < 0 || (contains && PyDict_SetItem(self, key, hook))) return NULL;
    Py_RETURN_NONE;
}

static void hooks_dealloc(NodeHooks *self) {
    PyObject_GC_UnTrack(self); /* first: what hears of its end may collect garbage */
    Py_TRASHCAN_BEGIN(self, hooks_dealloc) /* a hook may hold the hooks of another node, and so on */
    if (self->weak_references) PyObject_ClearWeakRefs((PyObject *)self);
    PyDict_Type.tp_dealloc((PyObject *)self);
    Py_TRASHCAN_END
}

/* A copy has the framework's hooks, as the framework's handles copy them. */
static PyObject *hooks_reduce(PyObject *self, PyObject *Py_UNUSED(none)) {
    PyObject *hooks = PyDict_New();
    int failed = !hooks || PyDict_Update(hooks, self) || (PyDict_Contains(hooks, key) == 1 && PyDict_DelItem(hooks, key));
    PyObject *reduced = failed ? NULL : Py_BuildValue("O(O)", &PyODict_Type, hooks);
    Py_XDECREF(hooks);
    return reduced;
}

static PyMethodDef hooks_methods[] = {
    {"__reduce__", hooks_reduce, METH_NOARGS, "Copy the hooks without the first one, as an OrderedDict."},
    {"remove", hooks_remove, METH_NOARGS, "Remove the first hook, if it is still there."},
    {"replace", hooks_replace, METH_O, "replace(hook): put another hook in place of the first one, if that is still there."}, {0}};

static PyGetSetDef hooks_properties[] = {{"hook", hooks_hook, NULL, "The first hook; None once it is removed.", NULL}, {0}};

static PyTypeObject NodeHooks_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.NodeHooks",
    .tp_basicsize = sizeof(NodeHooks),
    .tp_base = &PyDict_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Hooks of a node, by their keys, and the handle of the first one.",
    .tp_weaklistoffset = offsetof(NodeHooks, weak_references),
    .tp_dealloc = (destructor)hooks_dealloc,
    .tp_methods = hooks_methods,
    .tp_getset = hooks_properties,
};

/* ---- a further hook of a node ---- */

typedef struct {
    PyObject_HEAD
    PyObject *hooks, *hook, *number; /* owned; hooks: number -> hook */
} HookHandle;

static PyTypeObject HookHandle_Type;
static long long last_number; /* downwards, as torch numbers its handles upwards from 0 */

static PyObject *handle_remove(HookHandle *self, PyObject *Py_UNUSED(none)) {
    int contains = PySequence_Contains(self->hooks, self->number);
    if (contains < 0 || (contains && PyObject_DelItem(self->hooks, self->number))) return NULL;
    Py_RETURN_NONE;
}

static PyObject *handle_replace(HookHandle *self, PyObject *hook) {
    int contains = PySequence_Contains(self->hooks, self->number);
    if (contains < 0 || (contains && PyObject_SetItem(self->hooks, self->number, hook))) return NULL;
    Py_XSETREF(self->hook, Py_NewRef(hook));
    Py_RETURN_NONE;
}

static int handle_traverse(HookHandle *self, visitproc visit, void *arg) {
    Py_VISIT(self->hooks);
    Py_VISIT(self->hook);
    return 0;
}

static void handle_dealloc(HookHandle *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->hooks);
    Py_XDECREF(self->hook);
    Py_XDECREF(self->number);
    PyObject_GC_Del(self);
}

static PyMemberDef handle_members[] = {
    {"hook", T_OBJECT, offsetof(HookHandle, hook), READONLY, "The hook."}, {0}};

static PyMethodDef handle_methods[] = {
    {"remove", (PyCFunction)handle_remove, METH_NOARGS, "Remove the hook from the node, if it is still there."},
    {"replace", (PyCFunction)handle_replace, METH_O, "replace(hook): put another hook in place of this one, if it is still there."}, {0}};

static PyTypeObject HookHandle_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.HookHandle",
    .tp_basicsize = sizeof(HookHandle),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Handle of a hook that was added to those of a node.",
    .tp_dealloc = (destructor)handle_dealloc,
    .tp_traverse = (traverseproc)handle_traverse,
    .tp_methods = handle_methods,
    .tp_members = handle_members,
};

/* ---- what the framework calls to register a hook ---- */

/* Return a node's hooks with a new one, and its handle.  hooks: None: the node has none yet. */
static PyObject *add_hook(PyObject *hooks, PyObject *hook) {
    if (hooks == Py_None) {
        PyObject *made = PyDict_Type.tp_new(&NodeHooks_Type, NULL, NULL);
        if (made && PyDict_SetItem(made, key, hook)) Py_CLEAR(made);
        PyObject *registered = made ? PyTuple_Pack(2, made, made) : NULL;
        Py_XDECREF(made);
        return registered;
    }
    HookHandle *handle = PyObject_GC_New(HookHandle, &HookHandle_Type);
    if (!handle) return NULL;
    handle->hooks = Py_NewRef(hooks);
    handle->hook = Py_NewRef(hook);
    handle->number = PyLong_FromLongLong(--last_number);
    PyObject_GC_Track(handle);
    PyObject *registered = handle->number && !PyObject_SetItem(hooks, handle->number, hook) ? PyTuple_Pack(2, hooks, (PyObject *)handle) : NULL;
    Py_DECREF(handle);
    return registered;
}

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *other; /* owned; registers hooks that are not native */
} HookRegistrar;

static PyObject *register_hook(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    if (PyVectorcall_NARGS(flags) != 2 || names || !Py_IS_TYPE(args[1], &Hook_Type))
        return PyObject_Vectorcall(((HookRegistrar *)self)->other, args, (size_t)PyVectorcall_NARGS(flags), names);
    return add_hook(args[0], args[1]);
}

static PyObject *registrar_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *other;
    if (!PyArg_ParseTuple(args, "O", &other)) return NULL;
    HookRegistrar *self = (HookRegistrar *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = register_hook;
    self->other = Py_NewRef(other);
    return (PyObject *)self;
}

static int registrar_traverse(HookRegistrar *self, visitproc visit, void *arg) {
    Py_VISIT(self->other);
    return 0;
}

static void registrar_dealloc(HookRegistrar *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->other);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *registrar_add(PyObject *Py_UNUSED(none), PyObject *args) {
    PyObject *hooks, *hook;
    return PyArg_ParseTuple(args, "OO", &hooks, &hook) ? add_hook(hooks, hook) : NULL;
}

/* ---- the hooks of a pass ---- */

static struct {
    PyObject *plan, *stack, *backward, *native_hooks, *is_idle, *variable, *before, *after, *remove;
} names;

/* Return the dict of hooks that the plan of a trace stores for backward ops; None if the plan is of another stack. */
static PyObject *stored_hooks(PyObject *trace, PyObject *stack) {
    PyObject *plan = PyObject_GetAttr(trace, names.plan), *hooks = NULL;
    PyObject *stack_of_plan = plan ? PyObject_GetAttr(plan, names.stack) : NULL;
    if (stack_of_plan && stack_of_plan != stack) hooks = Py_NewRef(Py_None);
    PyObject *backward = stack_of_plan && !hooks ? PyObject_GetAttr(plan, names.backward) : NULL;
    if (backward) hooks = PyObject_GetAttr(backward, names.native_hooks);
    if (hooks && hooks != Py_None && !PyDict_CheckExact(hooks)) {
        PyErr_SetString(PyExc_TypeError, "the native hooks of a plan are no dict");
        Py_CLEAR(hooks);
    }
    Py_XDECREF(backward);
    Py_XDECREF(stack_of_plan);
    Py_XDECREF(plan);
    return hooks;
}

typedef struct {
    PyObject *stack, *leaf, *parameter, *handles; /* borrowed; handles: list of pairs of a node and a handle */
    long long leaf_place;
    PyObject *trace, *hooks; /* owned; of the last node, as nodes of one execution often follow each other */
} Hooking;

/* Read the place of a node among the backward ops of its execution; -1: only Python knows it, -2: an exception. */
static long long place_of_node(const Hooking *pass, PyObject *node, const Mark *mark, PyObject *number) {
    if ((PyObject *)Py_TYPE(node) != pass->leaf) {
        long long sequence = PyLong_AsLongLong(number);
        return sequence == -1 && PyErr_Occurred() ? -2 : sequence - mark->start;
    }
    uint64_t ordinal;
    PyObject *variable = PyObject_GetAttr(node, names.variable);
    int is_parameter = variable ? PyObject_IsInstance(variable, pass->parameter) : -1;
    int failed = is_parameter < 0 || (is_parameter && ordinal_of(variable, &ordinal));
    Py_XDECREF(variable);
    return failed ? -2 : is_parameter ? pass->leaf_place + (long long)ordinal : -1;
}

/* Register a hook of a node by one of the node's methods, and keep the handle; -1: an exception. */
static int keep_handle(const Hooking *pass, PyObject *node, PyObject *method, PyObject *hook) {
    PyObject *args[] = {node, hook}, *handle = PyObject_VectorcallMethod(method, args, 2, NULL);
    PyObject *pair = handle ? PyTuple_Pack(2, node, handle) : NULL;
    int failed = !pair || PyList_Append(pass->handles, pair);
    Py_XDECREF(pair);
    Py_XDECREF(handle);
    return failed ? -1 : 0;
}

/* Register the hooks that are stored for a node. 0: none are, or they depend on the execution, -1: an exception. */
static int hook_node(Hooking *pass, PyObject *node, const Mark *mark, PyObject *number) {
    if (mark->order) return 0;
    if (pass->trace != mark->trace) {
        Py_XSETREF(pass->trace, Py_NewRef(mark->trace));
        Py_XSETREF(pass->hooks, stored_hooks(mark->trace, pass->stack));
        if (!pass->hooks) return -1;
    }
    if (pass->hooks == Py_None) return 0;
    long long place = place_of_node(pass, node, mark, number);
    if (place < 0) return place == -2 ? -1 : 0;
    PyObject *at = PyLong_FromLongLong(place), *key = at ? PyTuple_Pack(2, Py_TYPE(node), at) : NULL;
    PyObject *stored = key ? Py_XNewRef(PyDict_GetItemWithError(pass->hooks, key)) : NULL;
    Py_XDECREF(at);
    Py_XDECREF(key);
    if (!stored || !PyTuple_Check(stored) || PyTuple_GET_SIZE(stored) != 4 || PyTuple_GET_ITEM(stored, 3) != Py_None) {
        Py_XDECREF(stored);
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *before = PyTuple_GET_ITEM(stored, 0), *after = PyTuple_GET_ITEM(stored, 1);
    PyObject *after_alone = PyTuple_GET_ITEM(stored, 2);
    int failed = 0, idle = 0;
    if (before != Py_None && after_alone != Py_None) {
        PyObject *answer = PyObject_GetAttr(before, names.is_idle);
        failed = !answer || (idle = PyObject_IsTrue(answer)) < 0;
        Py_XDECREF(answer);
    }
    if (idle > 0) after = after_alone; /* a hook costs more than most routines */
    else if (before != Py_None) failed = failed || keep_handle(pass, node, names.before, before);
    failed = failed || (after != Py_None && keep_handle(pass, node, names.after, after));
    Py_DECREF(stored);
    return failed ? -1 : 1;
}

static PyObject *registrar_register(PyObject *Py_UNUSED(none), PyObject *args) {
    PyObject *marked;
    Hooking pass = {0};
    if (!PyArg_ParseTuple(args, "O!OO!O!LO!", &PyList_Type, &marked, &pass.stack, &PyType_Type, &pass.leaf, &PyType_Type,
                          &pass.parameter, &pass.leaf_place, &PyList_Type, &pass.handles))
        return NULL;
    PyObject *remaining = PyList_New(0);
    int failed = !remaining;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(marked); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(marked, i));
        int is_marked = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 3 && Py_IS_TYPE(PyTuple_GET_ITEM(item, 1), &Mark_Type);
        if (!is_marked) PyErr_Format(PyExc_TypeError, "no triple of a node, a mark and a number: %R", item);
        int hooked = !is_marked ? -1 : hook_node(&pass, PyTuple_GET_ITEM(item, 0), (Mark *)PyTuple_GET_ITEM(item, 1), PyTuple_GET_ITEM(item, 2));
        failed = hooked < 0 || (!hooked && PyList_Append(remaining, item));
        Py_DECREF(item);
    }
    Py_XDECREF(pass.trace);
    Py_XDECREF(pass.hooks);
    if (failed) Py_CLEAR(remaining);
    return remaining;
}

static PyObject *registrar_remove(PyObject *Py_UNUSED(none), PyObject *handles) {
    if (!PyList_Check(handles)) return PyErr_Format(PyExc_TypeError, "a list of handles is wanted, not %R", handles);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); i++) {
        PyObject *pair = PyList_GET_ITEM(handles, i);
        if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return PyErr_Format(PyExc_TypeError, "no pair of a node and a handle: %R", pair);
        PyObject *handle = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
        PyObject *answer = Py_IS_TYPE(handle, &NodeHooks_Type) ? hooks_remove(handle, NULL) : PyObject_CallMethodNoArgs(handle, names.remove);
        Py_DECREF(handle);
        if (!answer) return NULL;
        Py_DECREF(answer);
    }
    if (PyList_SetSlice(handles, 0, PyList_GET_SIZE(handles), NULL)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef registrar_methods[] = {
    {"register_all", registrar_register, METH_VARARGS | METH_STATIC,
     "register_all(marked, stack, leaf, parameter, leaf_place, handles): register the hooks that plans store for nodes.\n\n"
     "Returns the items of `marked` whose hooks are not stored, or depend on the execution; adds pairs of a node and a\n"
     "handle to `handles`.\n\n"
     "marked: triples of a node, its mark and its number.  stack: of the plans.  leaf: type of the nodes that accumulate\n"
     "the gradient of a `variable`.  parameter: type of variables that have a place of their own: `leaf_place` and up."},
    {"remove_all", registrar_remove, METH_O | METH_STATIC,
     "remove_all(handles): remove hooks from nodes, and empty the list of pairs of a node and a handle."},
    {"add", registrar_add, METH_VARARGS | METH_STATIC,
     "add(hooks, hook): add a hook to those of a node, None for none yet; return the hooks, and a handle with `remove()`, `replace(hook)` and `hook`."},
    {0}};

static PyTypeObject HookRegistrar_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.HookRegistrar",
    .tp_basicsize = sizeof(HookRegistrar),
    .tp_vectorcall_offset = offsetof(HookRegistrar, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "HookRegistrar(other): called with the hooks of a node and a new hook, it returns what `add` does for a native hook.\n\n"
              "other(hooks, hook): called for a hook that is no `Hook`.",
    .tp_new = registrar_new,
    .tp_dealloc = (destructor)registrar_dealloc,
    .tp_traverse = (traverseproc)registrar_traverse,
    .tp_methods = registrar_methods,
};

static int intern_names(void) {
    struct {
        PyObject **name;
        const char *text;
    } texts[] = {{&key, "amanda"}, {&names.plan, "plan"}, {&names.stack, "stack"}, {&names.backward, "backward"},
                 {&names.native_hooks, "native_hooks"}, {&names.is_idle, "is_idle"}, {&names.variable, "variable"},
                 {&names.before, "register_prehook"}, {&names.after, "register_hook"}, {&names.remove, "remove"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!*texts[i].name && !(*texts[i].name = PyUnicode_InternFromString(texts[i].text))) return -1;
    return 0;
}

int hooks_boot(PyObject *names) {
    return intern_names() || PyType_Ready(&NodeHooks_Type) || PyType_Ready(&HookHandle_Type) || add_type(names, "HookRegistrar", &HookRegistrar_Type) ? -1 : 0;
}

/* Hooks at a framework's backward ops: how the driver's are registered and removed, thousands in a pass. */
#include "execution/program.h"
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
    {"remove", hooks_remove, METH_NOARGS, "Remove the first hook, if it is still there."}, {0}};

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
    {"remove", (PyCFunction)handle_remove, METH_NOARGS, "Remove the hook from the node, if it is still there."}, {0}};

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

static PyMethodDef registrar_methods[] = {
    {"add", registrar_add, METH_VARARGS | METH_STATIC,
     "add(hooks, hook): add a hook to those of a node, None for none yet; return the hooks, and a handle with `remove()` and `hook`."},
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

int hooks_boot(PyObject *names) {
    if (!key) key = PyUnicode_InternFromString("amanda");
    return !key || PyType_Ready(&NodeHooks_Type) || PyType_Ready(&HookHandle_Type) || add_type(names, "HookRegistrar", &HookRegistrar_Type) ? -1 : 0;
}

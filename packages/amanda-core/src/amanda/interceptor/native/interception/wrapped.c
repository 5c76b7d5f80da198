#include "interception/wrapped.h"

PyObject *wrapped_new(PyTypeObject *type, vectorcallfunc call, PyObject *function, PyObject *site) {
    Wrapped *self = (Wrapped *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = call;
    self->function = Py_NewRef(function);
    self->site = Py_XNewRef(site);
    return (PyObject *)self;
}

static int wrapped_traverse(Wrapped *self, visitproc visit, void *arg) {
    Py_VISIT(self->function);
    Py_VISIT(self->site);
    return 0;
}

static void wrapped_dealloc(Wrapped *self) {
    PyObject_GC_UnTrack(self);
    if (self->references) PyObject_ClearWeakRefs((PyObject *)self);
    Py_CLEAR(self->function);
    Py_CLEAR(self->site);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *wrapped_bind(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type)) {
    return instance && instance != Py_None ? PyMethod_New(self, instance) : Py_NewRef(self);
}

static PyObject *wrapped_getattr(PyObject *self, PyObject *name) {
    if (!PyUnicode_Check(name)) return PyObject_GenericGetAttr(self, name); /* says what is wrong */
    if (PyUnicode_CompareWithASCIIString(name, "__doc__") == 0 || PyUnicode_CompareWithASCIIString(name, "__module__") == 0)
        return PyObject_GetAttr(((Wrapped *)self)->function, name); /* a type has its own */
    PyObject *value = PyObject_GenericGetAttr(self, name);
    if (value || !PyErr_ExceptionMatches(PyExc_AttributeError)) return value;
    PyErr_Clear();
    return PyObject_GetAttr(((Wrapped *)self)->function, name);
}

static PyObject *wrapped_function(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(((Wrapped *)self)->function);
}

/* Compared, shown, copied and pickled like the function. */

static PyObject *behind(PyObject *object) { /* borrowed */
    return PyObject_TypeCheck(object, &Wrapped_Type) ? ((Wrapped *)object)->function : object;
}

static PyObject *wrapped_compare(PyObject *self, PyObject *other, int operation) {
    return PyObject_RichCompare(behind(self), behind(other), operation);
}

static Py_hash_t wrapped_hash(PyObject *self) { return PyObject_Hash(((Wrapped *)self)->function); }

static PyObject *wrapped_repr(PyObject *self) { return PyObject_Repr(((Wrapped *)self)->function); }

static PyObject *wrapped_copy(PyObject *self, PyObject *Py_UNUSED(memo)) { return Py_NewRef(self); }

static PyObject *wrapped_reduce(PyObject *self, PyObject *protocol) {
    PyObject *module = PyImport_ImportModule("amanda.interceptor._copying");
    PyObject *result = module ? PyObject_CallMethod(module, "reduce_to_original", "OO", self, protocol) : NULL;
    Py_XDECREF(module);
    return result;
}

static PyMethodDef wrapped_methods[] = {{"__copy__", wrapped_copy, METH_NOARGS, NULL},
                                        {"__deepcopy__", wrapped_copy, METH_O, NULL},
                                        {"__reduce_ex__", wrapped_reduce, METH_O, NULL},
                                        {0}};

static PyObject *wrapped_class(PyObject *self, void *Py_UNUSED(closure)) {
    return Py_NewRef((PyObject *)Py_TYPE(((Wrapped *)self)->function));
}

static PyGetSetDef wrapped_getset[] = {
    {"__wrapped__", wrapped_function, NULL, NULL, NULL}, {"__class__", wrapped_class, NULL, NULL, NULL}, {0}};

PyTypeObject Wrapped_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Wrapped",
    .tp_basicsize = sizeof(Wrapped),
    .tp_flags = WRAPPED_FLAGS | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_dealloc = (destructor)wrapped_dealloc,
    .tp_traverse = (traverseproc)wrapped_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Wrapped, vectorcall),
    .tp_descr_get = wrapped_bind,
    .tp_getattro = wrapped_getattr,
    .tp_getset = wrapped_getset,
    .tp_methods = wrapped_methods,
    .tp_richcompare = wrapped_compare,
    .tp_hash = wrapped_hash,
    .tp_repr = wrapped_repr,
    .tp_weaklistoffset = offsetof(Wrapped, references),
};

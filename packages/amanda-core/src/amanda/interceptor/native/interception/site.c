/* Sites: the callables that are intercepted, and how a stub takes the place of their native code. */
#include "interception/site.h"
#include "interception/wrapped.h"
#include <structmember.h>

static int kind_of_method(int flags, Kind *kind) {
    switch (flags & (METH_VARARGS | METH_KEYWORDS | METH_NOARGS | METH_O | METH_FASTCALL | METH_METHOD)) {
    case METH_NOARGS: *kind = NOARGS; return 0;
    case METH_O: *kind = ONE; return 0;
    case METH_VARARGS: *kind = VARARGS; return 0;
    case METH_VARARGS | METH_KEYWORDS: *kind = KEYWORDS; return 0;
    case METH_FASTCALL: *kind = FAST; return 0;
    case METH_FASTCALL | METH_KEYWORDS: *kind = FAST_KEYWORDS; return 0;
    }
    return -1;
}

static int slot_kind(PyWrapperDescrObject *descriptor, Kind *kind) {
    int offset = descriptor->d_base->offset;
    if (strcmp(descriptor->d_base->name, "__delitem__") == 0) return -1; /* shares the slot of __setitem__ */
    if (offset == (int)offsetof(PyHeapTypeObject, as_mapping.mp_subscript)) *kind = SUBSCRIPT;
    else if (offset == (int)offsetof(PyHeapTypeObject, as_mapping.mp_ass_subscript)) *kind = ASSIGN;
    else return -1;
    return 0;
}

/* A copy of a definition as it is now, which is never freed: a callable made from the copy may outlive the site. */
static void *lasting_copy(const void *definition, size_t size) {
    static Map copies; /* address -> the last copy of what lies there */
    uint64_t key = (uint64_t)(uintptr_t)definition;
    void *copy = map_get(&copies, key);
    if (copy && memcmp(copy, definition, size) == 0) return copy;
    copy = PyMem_RawMalloc(size);
    if (!copy || map_set(&copies, key, copy)) {
        PyMem_RawFree(copy);
        return PyErr_NoMemory();
    }
    return memcpy(copy, definition, size);
}

/* What each reader below does, past a site that is placed on the target: set the kind, the place of the native pointer, the
   pointer itself, and a callable that holds the pointer whatever is placed. UNKNOWN_KIND: calls of such a target cannot be
   intercepted. FAILED: an exception may be set. */
typedef enum { READ_FAILED = -1, READ, UNKNOWN_KIND } Reading;

static Reading read_function(Site *site, PyCFunctionObject *function) {
    Site *placed = site_behind((void *)function->vectorcall);
    site->definition = placed ? placed->definition : function->m_ml;
    site->placed_definition = *site->definition;
    site->placed_definition.ml_flags |= METH_COEXIST;
    if (!(site->pristine = lasting_copy(site->definition, sizeof(PyMethodDef)))) return READ_FAILED;
    if (kind_of_method(site->pristine->ml_flags, &site->kind)) return UNKNOWN_KIND;
    site->original = PyCFunction_NewEx(site->pristine, function->m_self, function->m_module);
    site->kind = FUNCTION;
    site->where.function = function;
    site->self = PyCFunction_GET_SELF(function);
    site->native = placed ? placed->native : (void *)function->vectorcall;
    return site->original ? READ : READ_FAILED;
}

static Reading read_method(Site *site, PyMethodDescrObject *descriptor, int of_class) {
    PyTypeObject *type = PyDescr_TYPE((PyDescrObject *)descriptor);
    site->where.method = descriptor->d_method;
    Site *placed = site_behind((void *)site->where.method->ml_meth);
    site->pristine = placed ? placed->pristine : lasting_copy(site->where.method, sizeof(PyMethodDef));
    if (!site->pristine) return READ_FAILED;
    if (kind_of_method(site->pristine->ml_flags, &site->kind)) return UNKNOWN_KIND;
    site->original = of_class ? PyDescr_NewClassMethod(type, site->pristine) : PyDescr_NewMethod(type, site->pristine);
    site->native = (void *)site->pristine->ml_meth;
    return site->original ? READ : READ_FAILED;
}

static Reading read_property(Site *site, PyGetSetDescrObject *descriptor) {
    PyTypeObject *type = PyDescr_TYPE((PyDescrObject *)descriptor);
    site->where.get = descriptor->d_getset;
    Site *placed = site_behind((void *)site->where.get->get);
    site->pristine_get = placed ? placed->pristine_get : lasting_copy(site->where.get, sizeof(PyGetSetDef));
    if (!site->pristine_get) return READ_FAILED;
    site->kind = GET;
    site->native = (void *)site->pristine_get->get;
    PyObject *pristine = PyDescr_NewGetSet(type, site->pristine_get);
    site->original = pristine ? PyObject_GetAttrString(pristine, "__get__") : NULL;
    Py_XDECREF(pristine);
    return site->original && site->native ? READ : READ_FAILED;
}

static Reading read_slot(Site *site, PyWrapperDescrObject *slot) {
    if (slot_kind(slot, &site->kind)) return UNKNOWN_KIND;
    Site *placed = site_behind(slot->d_wrapped);
    site->where.slot = slot;
    site->native = placed ? placed->native : slot->d_wrapped;
    site->original = PyDescr_NewWrapper(PyDescr_TYPE((PyDescrObject *)slot), slot->d_base, site->native);
    return site->original ? READ : READ_FAILED;
}

static Reading read_target(Site *site, PyObject *target) {
    if (PyCFunction_Check(target)) return read_function(site, (PyCFunctionObject *)target);
    if (Py_IS_TYPE(target, &PyMethodDescr_Type)) return read_method(site, (PyMethodDescrObject *)target, 0);
    if (Py_IS_TYPE(target, &PyClassMethodDescr_Type)) return read_method(site, (PyMethodDescrObject *)target, 1);
    if (Py_IS_TYPE(target, &PyGetSetDescr_Type)) return read_property(site, (PyGetSetDescrObject *)target);
    if (Py_IS_TYPE(target, &PyWrapperDescr_Type)) return read_slot(site, (PyWrapperDescrObject *)target);
    if (!PyCallable_Check(target)) return UNKNOWN_KIND;
    site->kind = PYTHON;
    site->original = Py_NewRef(target);
    return READ;
}

static PyObject *site_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *target, *op, *key, *handler;
    unsigned long long hash;
    int flags = 0;
    PyObject *reader = Py_None;
    if (!PyArg_ParseTuple(args, "OOUKO|iO", &target, &op, &key, &hash, &handler, &flags, &reader)) return NULL;
    if (reader != Py_None && !Py_IS_TYPE(reader, &Reader_Type))
        return PyErr_Format(PyExc_TypeError, "a Reader or None is wanted, not %R", reader);
    Site *site = (Site *)type->tp_alloc(type, 0);
    if (!site) return NULL;
    site->index = -1;
    site->hash = hash;
    site->flags = flags;
    site->target = Py_NewRef(target);
    site->op = Py_NewRef(op);
    site->handler = Py_NewRef(handler);
    site->reader = reader == Py_None ? NULL : (Reader *)Py_NewRef(reader);
    site->key = Py_NewRef(key);
    PyUnicode_InternInPlace(&site->key);
    Reading reading = read_target(site, target);
    if (reading == READ) return (PyObject *)site;
    if (reading == UNKNOWN_KIND)
        PyErr_Format(PyExc_TypeError, "%R is not a kind of callable that can be intercepted", target);
    else if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%R cannot be read", target);
    Py_DECREF(site);
    return NULL;
}

/* A list of a type and of all types that inherit from it. */
static PyObject *with_heirs(PyTypeObject *type) {
    PyObject *types = Py_BuildValue("[O]", type);
    for (Py_ssize_t i = 0; types && i < PyList_GET_SIZE(types); i++) {
        Py_ssize_t end = PyList_GET_SIZE(types);
        PyObject *heirs = PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", PyList_GET_ITEM(types, i));
        if (!heirs || PyList_SetSlice(types, end, end, heirs)) Py_CLEAR(types);
        Py_XDECREF(heirs);
    }
    return types;
}

/* Swap the pointer in the descriptor of a slot, and in the types that have copied the slot of their base and still have the
   pointer.  All or none: the step that may fail comes first. */
static int swap_slots(Site *site, void *from, void *to) {
    PyObject *types = with_heirs(PyDescr_TYPE(site->where.slot));
    if (!types) return -1;
    if (site->where.slot->d_wrapped == from) site->where.slot->d_wrapped = to;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(types); i++) {
        PyMappingMethods *mapping = ((PyTypeObject *)PyList_GET_ITEM(types, i))->tp_as_mapping;
        if (mapping && site->kind == SUBSCRIPT && mapping->mp_subscript == (binaryfunc)from)
            mapping->mp_subscript = (binaryfunc)to;
        if (mapping && site->kind == ASSIGN && mapping->mp_ass_subscript == (objobjargproc)from)
            mapping->mp_ass_subscript = (objobjargproc)to;
    }
    Py_DECREF(types);
    return 0;
}

static void *pointer_at(Site *site) {
    switch (site->kind) {
    case GET: return (void *)site->where.get->get;
    case FUNCTION: return (void *)site->where.function->vectorcall;
    case SUBSCRIPT: case ASSIGN: return site->where.slot->d_wrapped;
    default: return (void *)site->where.method->ml_meth;
    }
}

/* Set the native pointer, unless something else has been set in the place of `expected`; -1 with an exception. */
static int swap_pointer(Site *site, void *pointer, void *expected) {
    switch (site->kind) {
    case GET:
        if (site->where.get->get == (getter)expected) site->where.get->get = (getter)pointer;
        return 0;
    case FUNCTION:
        if (site->where.function->vectorcall != (vectorcallfunc)expected) return 0;
        site->where.function->vectorcall = (vectorcallfunc)pointer;
        site->where.function->m_ml = pointer == site->native ? site->definition : &site->placed_definition;
        return 0;
    case SUBSCRIPT: case ASSIGN:
        return swap_slots(site, expected, pointer);
    default:
        if (site->where.method->ml_meth == (PyCFunction)expected)
            site->where.method->ml_meth = (PyCFunction)pointer;
        return 0;
    }
}

static PyObject *site_place(Site *site, PyObject *Py_UNUSED(none)) {
    if (site->kind == PYTHON) return PyErr_Format(PyExc_TypeError, "%R is detoured, not placed", site->op);
    if (!site->placed && (take_stub(site) || swap_pointer(site, stub_of(site), site->native))) return NULL;
    site->placed = pointer_at(site) == stub_of(site); /* where another site is, it stays */
    Py_RETURN_NONE;
}

static PyObject *site_remove(Site *site, PyObject *Py_UNUSED(none)) {
    if (site->placed && swap_pointer(site, site->native, stub_of(site))) return NULL;
    site->placed = 0;
    Py_RETURN_NONE;
}

static PyObject *site_invoke(Site *site, PyObject *args) {
    PyObject *positional, *keywords = NULL;
    if (!PyArg_ParseTuple(args, "O!|O!", &PyTuple_Type, &positional, &PyDict_Type, &keywords)) return NULL;
    Thread *thread = thread_state();
    PyObject *key = thread->key;
    int off = thread->suspensions;
    thread->suspensions = 0;
    thread->key = site->flags & TRANSPARENT ? NULL : site->key;
    PyObject *result = PyObject_Call(site->original, positional, keywords);
    thread->key = key;
    thread->suspensions = off;
    return result;
}

static PyObject *site_address(Site *site, void *Py_UNUSED(closure)) {
    if (site->kind == PYTHON) Py_RETURN_NONE;
    return PyLong_FromVoidPtr(pointer_at(site));
}

static int site_traverse(Site *self, visitproc visit, void *arg) {
    Py_VISIT(self->op);
    Py_VISIT(self->handler);
    Py_VISIT(self->target);
    Py_VISIT(self->original);
    return 0;
}

static void site_dealloc(Site *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->op);
    Py_CLEAR(self->handler);
    Py_CLEAR(self->target);
    Py_CLEAR(self->original);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->key);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef site_methods[] = {
    {"place", (PyCFunction)site_place, METH_NOARGS, "Put the stub in the place of the target's native code."},
    {"remove", (PyCFunction)site_remove, METH_NOARGS, "Put the target's native code back."},
    {"invoke", (PyCFunction)site_invoke, METH_VARARGS,
     "invoke(args, kwargs={}): call the target itself, without a stub; calls within it are intercepted."},
    {0}};

static PyMemberDef site_members[] = {
    {"op", T_OBJECT, offsetof(Site, op), READONLY, "The callable that tools are shown."},
    {"key", T_OBJECT, offsetof(Site, key), READONLY, "Canonical name."},
    {"target", T_OBJECT, offsetof(Site, target), READONLY, "What is intercepted."},
    {"original", T_OBJECT, offsetof(Site, original), READONLY, "The target, past interception."},
    {"placed", T_BOOL, offsetof(Site, placed), READONLY, "Whether calls pass the stub."},
    {0}};

static PyGetSetDef site_getset[] = {
    {"address", (getter)site_address, NULL, "The native pointer that is in place now.", NULL}, {0}};

PyTypeObject Site_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Site",
    .tp_basicsize = sizeof(Site),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Site(target, op, key, hash, handler, flags=0, reader=None): one callable, and the handler of its calls.",
    .tp_new = site_new,
    .tp_dealloc = (destructor)site_dealloc,
    .tp_traverse = (traverseproc)site_traverse,
    .tp_methods = site_methods,
    .tp_members = site_members,
    .tp_getset = site_getset,
};

int site_boot(PyObject *names) {
    return PyType_Ready(&Wrapped_Type) || add_type(names, "PlanTable", &PlanTable_Type) ||
                   add_type(names, "Site", &Site_Type) || add_type(names, "Detour", &Detour_Type)
               ? -1
               : 0;
}

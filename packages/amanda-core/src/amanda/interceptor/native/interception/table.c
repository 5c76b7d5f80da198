#include "interception/table.h"

static int map_grow(Map *map) {
    size_t live = 0;
    for (size_t i = 0; i < map->size; i++) live += map->cells[i].value != NULL;
    Map grown = {NULL, 16, 0};
    while (grown.size < live * 3) grown.size *= 2;
    grown.cells = PyMem_RawCalloc(grown.size, sizeof(Cell));
    if (!grown.cells) return -1;
    for (size_t i = 0; i < map->size; i++)
        if (map->cells[i].value) {
            grown.cells[map_slot(&grown, map->cells[i].key)] = map->cells[i];
            grown.used++;
        }
    PyMem_RawFree(map->cells);
    *map = grown;
    return 0;
}

int map_reserve(Map *map, size_t more) { return (map->used + more) * 3 > map->size * 2 ? map_grow(map) : 0; }

int map_set(Map *map, uint64_t key, void *value) {
    if ((map->used + 1) * 3 > map->size * 2 && map_grow(map)) return -1;
    Cell *cell = &map->cells[map_slot(map, key)];
    if (!cell->key) {
        cell->key = key;
        map->used++;
    }
    cell->value = value;
    return 0;
}

void *map_remove(Map *map, uint64_t key) {
    Cell *cell = map->size ? &map->cells[map_slot(map, key)] : NULL;
    void *value = cell ? cell->value : NULL;
    if (value) cell->value = NULL;
    return value;
}

void map_clear(Map *map) {
    PyMem_RawFree(map->cells);
    *map = (Map){NULL, 0, 0};
}

static int id_of(PyObject *object, uint64_t *id) {
    *id = PyLong_AsUnsignedLongLong(object);
    if (!*id) PyErr_SetString(PyExc_ValueError, "0 is no op id");
    return (!*id || *id == (uint64_t)-1) && PyErr_Occurred() ? -1 : 0;
}

static PyObject *table_get(PlanTable *self, PyObject *key) {
    uint64_t id;
    if (id_of(key, &id)) return NULL;
    PyObject *plan = map_get(&self->map, id);
    return Py_NewRef(plan ? plan : Py_NotImplemented);
}

static PyObject *table_set(PlanTable *self, PyObject *args) {
    PyObject *key, *plan;
    uint64_t id;
    if (!PyArg_ParseTuple(args, "OO", &key, &plan) || id_of(key, &id)) return NULL;
    PyObject *old = map_get(&self->map, id);
    if (map_set(&self->map, id, plan)) return PyErr_NoMemory();
    Py_INCREF(plan);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *table_discard(PlanTable *self, PyObject *key) {
    uint64_t id;
    if (id_of(key, &id)) return NULL;
    Py_XDECREF((PyObject *)map_remove(&self->map, id));
    Py_RETURN_NONE;
}

static Py_ssize_t table_length(PlanTable *self) {
    Py_ssize_t live = 0;
    for (size_t i = 0; i < self->map.size; i++) live += self->map.cells[i].value != NULL;
    return live;
}

static int table_traverse(PlanTable *self, visitproc visit, void *arg) {
    for (size_t i = 0; i < self->map.size; i++) Py_VISIT((PyObject *)self->map.cells[i].value);
    return 0;
}

static int table_clear(PlanTable *self) {
    Map map = self->map;
    self->map = (Map){NULL, 0, 0};
    for (size_t i = 0; i < map.size; i++) Py_XDECREF((PyObject *)map.cells[i].value);
    map_clear(&map);
    return 0;
}

static PyObject *table_empty(PlanTable *self, PyObject *Py_UNUSED(none)) {
    table_clear(self);
    Py_RETURN_NONE;
}

static void table_dealloc(PlanTable *self) {
    PyObject_GC_UnTrack(self);
    table_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef table_methods[] = {
    {"get", (PyCFunction)table_get, METH_O, "Return the plan of an op by its id, or NotImplemented."},
    {"set", (PyCFunction)table_set, METH_VARARGS, "Store the plan of an op id; None if nothing is inserted at the op."},
    {"discard", (PyCFunction)table_discard, METH_O, "Forget an op id."},
    {"clear", (PyCFunction)table_empty, METH_NOARGS, "Forget every op id."},
    {0}};

static PySequenceMethods table_sequence = {.sq_length = (lenfunc)table_length};

PyTypeObject PlanTable_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.PlanTable",
    .tp_basicsize = sizeof(PlanTable),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Plans by op id.",
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_traverse = (traverseproc)table_traverse,
    .tp_clear = (inquiry)table_clear,
    .tp_methods = table_methods,
    .tp_as_sequence = &table_sequence,
};

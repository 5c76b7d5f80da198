/* A framework's graph of backward ops, read from memory where its layout is known, else by the names of attributes:
   executions leave marks at the ops that they made, and a backward pass finds from these marks the execution of each
   op. */
#include "execution/tensors.h"
#include "pytorch/autograd.h"
#include <string.h>
#include <structmember.h>

#define OPS_PER_SAMPLE 61 /* prime, so that no regular shape of a graph keeps a path clear of every sample */
#define NESTING_LIMIT 3   /* of lists among the outputs of an op in which tensors are marked */

/* ---- marks ---- */

static Py_ssize_t alive;

static Mark *make_mark(PyTypeObject *type, PyObject *trace, long long begin, long long start, long long end, int order,
                       PyObject *shapes) {
    Mark *mark = (Mark *)type->tp_alloc(type, 0);
    if (!mark) return NULL;
    mark->trace = Py_NewRef(trace);
    mark->shapes = Py_NewRef(shapes ? shapes : Py_None);
    mark->begin = begin;
    mark->start = start;
    mark->end = end;
    mark->order = order;
    alive++;
    return mark;
}

static PyObject *mark_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *trace, *shapes = NULL;
    long long begin, start, end;
    int order = 0;
    if (!PyArg_ParseTuple(args, "OLLL|iO", &trace, &begin, &start, &end, &order, &shapes)) return NULL;
    return (PyObject *)make_mark(type, trace, begin, start, end, order, shapes);
}

static void mark_dealloc(Mark *self) {
    alive--;
    Py_CLEAR(self->trace);
    Py_CLEAR(self->shapes);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *mark_alive(PyObject *Py_UNUSED(type), PyObject *Py_UNUSED(none)) { return PyLong_FromSsize_t(alive); }

static PyMethodDef mark_methods[] = {
    {"alive", mark_alive, METH_NOARGS | METH_STATIC, "Return the number of living marks."}, {0}};

static PyMemberDef mark_members[] = {
    {"trace", T_OBJECT, offsetof(Mark, trace), READONLY, "Trace that the execution left."},
    {"begin", T_LONGLONG, offsetof(Mark, begin), READONLY, "Number before the routines of the execution, which may make ops too."},
    {"start", T_LONGLONG, offsetof(Mark, start), READONLY, "Number before the op."},
    {"end", T_LONGLONG, offsetof(Mark, end), READONLY, "Number after the op."},
    {"shapes", T_OBJECT, offsetof(Mark, shapes), READONLY, "Shapes of the op's inputs and outputs; None if no routine takes them."},
    {"order", T_INT, offsetof(Mark, order), READONLY,
     "0 for the backward ops of an op, 1 for those of its backward ops, and so on."},
    {0}};

PyTypeObject Mark_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Mark",
    .tp_basicsize = sizeof(Mark),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Mark(trace, begin, start, end, order=0, shapes=None): the execution that made backward ops, known by their numbers.",
    .tp_new = mark_new,
    .tp_dealloc = (destructor)mark_dealloc,
    .tp_methods = mark_methods,
    .tp_members = mark_members,
};

/* ---- graphs of any depth are freed ---- */

typedef struct DeferredRelease {
    PyObject_HEAD
    PyObject *objects; /* owned */
    struct DeferredRelease *next;
} DeferredRelease;

static PyObject *deferred_release_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *objects;
    if (!PyArg_ParseTuple(args, "O", &objects)) return NULL;
    DeferredRelease *self = (DeferredRelease *)type->tp_alloc(type, 0);
    if (self) self->objects = Py_NewRef(objects);
    return (PyObject *)self;
}

/* No Python frame runs here, in which a signal's handler could raise, and be lost as every exception of a finalizer is. */
static void deferred_release_dealloc(DeferredRelease *self) {
    static __thread DeferredRelease *waiting; /* their objects are freed by the running loop */
    static __thread int is_running;
    self->next = waiting;
    waiting = self;
    if (is_running) return;
    is_running = 1;
    while ((self = waiting)) {
        waiting = self->next;
        Py_CLEAR(self->objects);
        Py_TYPE(self)->tp_free(self);
    }
    is_running = 0;
}

static PyTypeObject DeferredRelease_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.DeferredRelease",
    .tp_basicsize = sizeof(DeferredRelease),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "DeferredRelease(objects): holds objects; when it is freed within another's freeing, they are freed after those.",
    .tp_new = deferred_release_new,
    .tp_dealloc = (destructor)deferred_release_dealloc,
};

/* ---- the graph ---- */

/* Offsets: in a Python object of an op, of the address of its node; in a node, of the address of that object, of the
   number, and of the addresses of its edges (the end is the next word) and of its metadata; in these, of the address of
   the notes.  An edge begins with the address of a node and ends with the number of one of its inputs. */
typedef struct {
    Py_ssize_t node, object, number, edges, metadata, notes, edge_size;
} NodeLayout;

typedef struct {
    PyObject_HEAD
    NodeLayout layout; /* edge_size 0: it is not known */
    Map types;         /* first word of a node, which tells its class -> static type of its Python objects; and each type -> itself */
    PyTypeObject *tensors, *leaf;                               /* owned */
    PyObject *maker, *base, *next, *notes, *number, *key, *sampled; /* owned */
} Graphs;

/* Call `sampled` with an op, of each OPS_PER_SAMPLE ops about one, by its address; -1: an exception. */
static int sample_node(const Graphs *graphs, PyObject *op) {
    if ((uintptr_t)op / 16 % OPS_PER_SAMPLE) return 0;
    PyObject *answer = PyObject_CallOneArg(graphs->sampled, op);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

static inline const char *pointer_at(const void *object, Py_ssize_t offset) {
    return *(const char *const *)((const char *)object + offset);
}

/* The node in memory of an op; NULL: its layout is not known, or no op of its type has been met. */
static const char *memory_of(const Graphs *graphs, PyObject *op) {
    return map_get(&graphs->types, (uint64_t)(uintptr_t)Py_TYPE(op)) ? pointer_at(op, graphs->layout.node) : NULL;
}

static int number_of(const Graphs *graphs, PyObject *op, long long *number) { /* -1: an exception */
    const char *address = memory_of(graphs, op);
    if (address) {
        *number = (long long)*(const uint64_t *)(address + graphs->layout.number);
        return 0;
    }
    PyObject *answer = PyObject_CallMethodNoArgs(op, graphs->number);
    if (!answer) return -1;
    *number = (long long)PyLong_AsUnsignedLongLongMask(answer); /* the largest, which no op is given, is -1 */
    Py_DECREF(answer);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Mark the op that made a tensor, if its number says that the mark's execution made it. The first mark stays. */
static int mark_maker(const Graphs *graphs, PyObject *tensor, Mark *mark) {
    long long number;
    disturb();
    PyObject *notes = NULL, *op = PyObject_GetAttr(tensor, graphs->maker);
    int failed = !op ? -1 : op == Py_None ? 0 : number_of(graphs, op, &number);
    if (!failed && op != Py_None && mark->start <= number && number < mark->end) {
        notes = PyObject_GetAttr(op, graphs->notes);
        if (notes && !PyDict_Check(notes)) PyErr_SetString(PyExc_TypeError, "the notes of an op are no dict");
        failed = PyErr_Occurred() || !PyDict_SetDefault(notes, graphs->key, (PyObject *)mark) || sample_node(graphs, op);
    }
    Py_XDECREF(notes);
    Py_XDECREF(op);
    return failed ? -1 : 0;
}

/* Mark the ops that made a value: a tensor, or the tensors in a list.  bases: also what the tensors are views of. */
static int mark_value(const Graphs *graphs, PyObject *value, Mark *mark, int bases, int depth) {
    if (PyObject_TypeCheck(value, graphs->tensors)) {
        if (mark_maker(graphs, value, mark)) return -1;
        if (!bases) return 0;
        PyObject *base = PyObject_GetAttr(value, graphs->base);
        int failed = !base || (base != Py_None && mark_maker(graphs, base, mark)) ? -1 : 0;
        Py_XDECREF(base);
        return failed;
    }
    if (depth && (PyTuple_Check(value) || PyList_Check(value)))
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            int failed = mark_value(graphs, item, mark, bases, depth - 1);
            Py_DECREF(item);
            if (failed) return -1;
        }
    return 0;
}

static PyObject *graphs_mark(Graphs *self, PyObject *args) {
    PyObject *values;
    Mark *mark;
    int bases = 1;
    if (!PyArg_ParseTuple(args, "OO!|p", &values, &Mark_Type, &mark, &bases)) return NULL;
    if (mark_value(self, values, mark, bases, NESTING_LIMIT)) return NULL;
    Py_RETURN_NONE;
}

/* ---- which execution each op comes from ---- */

typedef enum { NO_NUMBER = -1, UNNUMBERED, NUMBERED } Numbering; /* NO_NUMBER: an exception is set */

typedef struct {
    PyObject *op, *note;       /* owned; op: NULL if the walk reads memory; note: the mark in the op's notes, or NULL */
    const char *address;       /* of the node, if the walk reads memory */
    const PyTypeObject *type;  /* of the op */
    Mark *mark, *routine_mark; /* borrowed; of the execution whose op made this op, or whose routines made it; or NULL */
    long long number;
    uint64_t edges; /* hash of what the op leads on to */
    Numbering numbering;
    int leaf;
} Node;

typedef struct {
    Graphs *graphs;
    Node *nodes;
    size_t count, room;
    uint32_t *edges; /* pairs: parent, child */
    size_t edge_count, edge_room;
    Map index; /* op, or address of the node in memory -> its node, counted from 1 */
} GraphWalk;

static int grow(void **items, size_t *room, size_t size) {
    size_t more = *room ? *room * 2 : 64;
    void *grown = PyMem_Realloc(*items, more * size);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    *items = grown;
    *room = more;
    return 0;
}

/* Add a node without edges; return its number, counted from 1, or 0 with an exception set. */
static size_t add_node(GraphWalk *walk, const void *key, PyObject *op, const char *address, const PyTypeObject *type) {
    if (walk->count == walk->room && grow((void **)&walk->nodes, &walk->room, sizeof(Node))) return 0;
    if (map_set(&walk->index, (uint64_t)(uintptr_t)key, (void *)(uintptr_t)(walk->count + 1))) {
        PyErr_NoMemory();
        return 0;
    }
    walk->nodes[walk->count] = (Node){.op = Py_XNewRef(op), .address = address, .type = type, .leaf = type == walk->graphs->leaf};
    return ++walk->count;
}

/* The number of an op's node, counted from 1; the node is added if the op has none. 0 with an exception set. */
static size_t node_of(GraphWalk *walk, PyObject *op) {
    size_t index = (size_t)(uintptr_t)map_get(&walk->index, (uint64_t)(uintptr_t)op);
    return index ? index : add_node(walk, op, op, NULL, Py_TYPE(op));
}

/* Add an edge from a node to an input of another, of which the number counts from 1; -1: an exception. */
static int add_edge(GraphWalk *walk, size_t at, size_t child, uint64_t input) {
    walk->nodes[at].edges = mix(walk->nodes[at].edges, (uint64_t)child << 32 ^ input);
    if (walk->edge_count + 2 > walk->edge_room && grow((void **)&walk->edges, &walk->edge_room, sizeof(uint32_t))) return -1;
    walk->edges[walk->edge_count++] = (uint32_t)at;
    walk->edges[walk->edge_count++] = (uint32_t)(child - 1);
    return 0;
}

static int take_mark(GraphWalk *walk, size_t at, PyObject *notes) { /* -1: an exception */
    PyObject *mark = PyDict_Check(notes) ? PyDict_GetItemWithError(notes, walk->graphs->key) : NULL;
    if (mark && Py_IS_TYPE(mark, &Mark_Type)) {
        walk->nodes[at].note = Py_NewRef(mark);
        walk->nodes[at].mark = (Mark *)mark;
    }
    return !mark && PyErr_Occurred() ? -1 : 0;
}

static int read_mark(GraphWalk *walk, size_t at) {
    PyObject *notes = PyObject_GetAttr(walk->nodes[at].op, walk->graphs->notes);
    int failed = !notes || take_mark(walk, at, notes);
    Py_XDECREF(notes);
    return failed ? -1 : 0;
}

/* Keep the type of an op for its class, since a walk in memory meets nodes that have no Python object; -1: an exception.
   Types of programs, on the heap, are left out: their objects are functions in Python. */
static int keep_type(Graphs *graphs, PyObject *op) {
    PyTypeObject *type = Py_TYPE(op);
    if (!graphs->layout.edge_size || PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) return 0;
    const char *address = pointer_at(op, graphs->layout.node);
    if (!address || pointer_at(address, graphs->layout.object) != (const char *)op) return 0;
    uint64_t class = (uint64_t)(uintptr_t)pointer_at(address, 0);
    if (map_get(&graphs->types, class)) return 0;
    if (!map_set(&graphs->types, class, type) && !map_set(&graphs->types, (uint64_t)(uintptr_t)type, type)) return 0;
    PyErr_NoMemory();
    return -1;
}

/* Read the mark and the number of a node in memory; -1: an exception. */
static int read_memory(GraphWalk *walk, size_t at, const char *address) {
    const NodeLayout *layout = &walk->graphs->layout;
    const char *metadata = pointer_at(address, layout->metadata);
    walk->nodes[at].number = (long long)*(const uint64_t *)(address + layout->number);
    walk->nodes[at].numbering = NUMBERED;
    return metadata ? take_mark(walk, at, (PyObject *)pointer_at(metadata, layout->notes)) : 0;
}

/* Read the mark of a node, and add the ops that it leads on to. */
static int visit_node(GraphWalk *walk, size_t at) {
    if (walk->nodes[at].leaf) return keep_type(walk->graphs, walk->nodes[at].op);
    const char *address = memory_of(walk->graphs, walk->nodes[at].op);
    if ((address ? read_memory(walk, at, address) : read_mark(walk, at)) || sample_node(walk->graphs, walk->nodes[at].op)) return -1;
    PyObject *next = PyObject_GetAttr(walk->nodes[at].op, walk->graphs->next);
    int failed = !next || !PyTuple_Check(next);
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(next); i++) {
        PyObject *pair = PyTuple_GET_ITEM(next, i);
        PyObject *op = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) ? PyTuple_GET_ITEM(pair, 0) : Py_None;
        if (op == Py_None) {
            walk->nodes[at].edges = mix(walk->nodes[at].edges, 0);
            continue;
        }
        size_t child = node_of(walk, op);
        PyObject *output = PyTuple_GET_SIZE(pair) > 1 ? PyTuple_GET_ITEM(pair, 1) : NULL;
        uint64_t input = output && PyLong_CheckExact(output) ? PyLong_AsUnsignedLongLongMask(output) : 0;
        failed = !child || add_edge(walk, at, child, input);
    }
    Py_XDECREF(next);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the next of an op are not a tuple of pairs");
    return failed || keep_type(walk->graphs, walk->nodes[at].op) ? -1 : 0;
}

/* The number of an op, read at the first call: it takes a call of Python, and most nodes are never asked. */
static inline long long node_number(GraphWalk *walk, Node *node) {
    if (node->numbering == UNNUMBERED)
        node->numbering = number_of(walk->graphs, node->op, &node->number) ? NO_NUMBER : NUMBERED;
    return node->number;
}

typedef enum { SPREAD_FAILED = -1, ALL_SPREAD, SPREADING } Spread; /* FAILED: an exception is set */

/* One pass over the edges: give each op the mark of an op before it, if its number says that the same execution made it.
   An op that the execution's routines made is not marked, but passes the mark on. A leaf belongs to the op that
   used it first, also through ops of routines. SPREADING: some node got a mark, so another pass may find more. */
static Spread spread_marks(GraphWalk *walk) {
    Spread state = ALL_SPREAD;
    for (size_t i = 0; i < walk->edge_count; i += 2) {
        Node *parent = &walk->nodes[walk->edges[i]], *child = &walk->nodes[walk->edges[i + 1]];
        Mark *mark = parent->mark ? parent->mark : parent->routine_mark;
        if (!mark) continue;
        if (child->leaf) {
            if (!child->mark || mark->start < child->mark->start) child->mark = mark;
            continue;
        }
        if (child->mark && child->routine_mark) continue;
        long long number = node_number(walk, child);
        if (child->numbering == NO_NUMBER) return SPREAD_FAILED;
        if (!child->mark && mark->start <= number && number < mark->end) {
            child->mark = mark;
            state = SPREADING;
        } else if (!child->routine_mark && mark->begin <= number && number < mark->start) {
            child->routine_mark = mark;
            state = SPREADING;
        }
    }
    return state;
}

static PyObject *list_marks(GraphWalk *walk) {
    PyObject *marks = PyList_New(0);
    for (size_t i = 0; marks && i < walk->count; i++) {
        Node *node = &walk->nodes[i];
        if (!node->mark) continue;
        long long number = node->leaf ? 0 : node_number(walk, node);
        PyObject *sequence = node->numbering == NO_NUMBER ? NULL : PyLong_FromLongLong(number);
        PyObject *item = sequence ? PyTuple_Pack(3, node->op, (PyObject *)node->mark, sequence) : NULL;
        if (!item || PyList_Append(marks, item)) Py_CLEAR(marks);
        Py_XDECREF(item);
        Py_XDECREF(sequence);
    }
    return marks;
}

/* Visit the ops behind some, and find the execution of each; -1: an exception. */
static int walk_graph(GraphWalk *walk, PyObject *ops) {
    PyObject *roots = PySequence_Tuple(ops);
    int failed = !roots;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(roots); i++)
        failed = PyTuple_GET_ITEM(roots, i) != Py_None && !node_of(walk, PyTuple_GET_ITEM(roots, i));
    for (size_t at = 0; !failed && at < walk->count; at++) failed = visit_node(walk, at); /* which adds nodes */
    Spread spread = failed ? SPREAD_FAILED : SPREADING;
    while (spread == SPREADING) spread = spread_marks(walk);
    Py_XDECREF(roots);
    return spread == ALL_SPREAD ? 0 : -1;
}

typedef enum { WALK_FAILED = -1, UNKNOWN_CLASS, WALKED } MemoryWalk; /* FAILED: an exception is set */

/* The number of a node in memory, counted from 1; 0: its class is not known yet, or an exception is set. */
static size_t node_at(GraphWalk *walk, const char *address) {
    size_t index = (size_t)(uintptr_t)map_get(&walk->index, (uint64_t)(uintptr_t)address);
    if (index) return index;
    const PyTypeObject *type = map_get(&walk->graphs->types, (uint64_t)(uintptr_t)pointer_at(address, 0));
    return type ? add_node(walk, address, NULL, address, type) : 0;
}

/* Do for a node in memory what `visit_node` does, without an object of Python for each op. */
static MemoryWalk visit_memory(GraphWalk *walk, size_t at) {
    const NodeLayout *layout = &walk->graphs->layout;
    const char *address = walk->nodes[at].address;
    if (walk->nodes[at].leaf) return WALKED;
    if (read_memory(walk, at, address)) return WALK_FAILED;
    const char *edge = pointer_at(address, layout->edges), *end = pointer_at(address, layout->edges + (Py_ssize_t)sizeof(void *));
    for (; edge < end; edge += layout->edge_size) {
        const char *next = pointer_at(edge, 0);
        if (!next) {
            walk->nodes[at].edges = mix(walk->nodes[at].edges, 0);
            continue;
        }
        size_t child = node_at(walk, next);
        uint32_t input = *(const uint32_t *)(edge + layout->edge_size - (Py_ssize_t)sizeof(void *));
        if (!child) return PyErr_Occurred() ? WALK_FAILED : UNKNOWN_CLASS;
        if (add_edge(walk, at, child, input)) return WALK_FAILED;
    }
    return WALKED;
}

/* Do what `walk_graph` does, in memory. */
static MemoryWalk walk_memory(GraphWalk *walk, PyObject *ops) {
    if (!walk->graphs->layout.edge_size || !PyList_Check(ops)) return UNKNOWN_CLASS;
    MemoryWalk state = WALKED;
    for (Py_ssize_t i = 0; state == WALKED && i < PyList_GET_SIZE(ops); i++) {
        const char *address = memory_of(walk->graphs, PyList_GET_ITEM(ops, i));
        if (!address || !node_at(walk, address)) state = PyErr_Occurred() ? WALK_FAILED : UNKNOWN_CLASS;
    }
    for (size_t at = 0; state == WALKED && at < walk->count; at++) state = visit_memory(walk, at);
    Spread spread = state == WALKED ? SPREADING : ALL_SPREAD;
    while (spread == SPREADING) spread = spread_marks(walk);
    return spread == SPREAD_FAILED ? WALK_FAILED : state;
}

static void end_walk(GraphWalk *walk) {
    while (walk->count) {
        Node *node = &walk->nodes[--walk->count];
        Py_XDECREF(node->note);
        Py_XDECREF(node->op);
    }
    PyMem_Free(walk->nodes);
    PyMem_Free(walk->edges);
    map_clear(&walk->index);
}

static PyObject *graphs_marked(Graphs *self, PyObject *ops) {
    GraphWalk walk = {.graphs = self};
    PyObject *marks = walk_graph(&walk, ops) ? NULL : list_marks(&walk);
    end_walk(&walk);
    return marks;
}

/* The hash of a node in the form of its graph; 0: what it gives is not decided by the form.  -1 in `numbering`: an
   exception. */
static uint64_t form_of_node(GraphWalk *walk, Node *node) {
    const Mark *mark = node->mark;
    const PyTypeObject *type = node->type;
    /* A program's function in Python has a class of its own, one in C++ the class of all that have none. */
    if (PyType_HasFeature((PyTypeObject *)type, Py_TPFLAGS_HEAPTYPE) || !strcmp(type->tp_name, "CppFunction")) return 0;
    if (node->routine_mark || (mark && mark->order)) return 0;
    uint64_t hash = mix((uintptr_t)type, node->edges);
    if (!mark) return hash | 1;
    hash = mix(mix(hash, (uintptr_t)mark->trace), (uintptr_t)mark->shapes);
    return (node->leaf ? hash : mix(hash, (uint64_t)(node_number(walk, node) - mark->start))) | 1;
}

static PyObject *graphs_form(Graphs *self, PyObject *ops) {
    GraphWalk walk = {.graphs = self};
    MemoryWalk state = walk_memory(&walk, ops);
    if (state == UNKNOWN_CLASS) {
        end_walk(&walk);
        walk = (GraphWalk){.graphs = self};
    }
    int failed = state == WALK_FAILED || (state == UNKNOWN_CLASS && walk_graph(&walk, ops));
    uint64_t form = failed ? 0 : walk.count;
    for (size_t at = 0; form && at < walk.count; at++) {
        uint64_t node = form_of_node(&walk, &walk.nodes[at]);
        failed |= walk.nodes[at].numbering == NO_NUMBER;
        form = node && !failed ? mix(form, node) | 1 : 0;
    }
    end_walk(&walk);
    return failed ? NULL : PyLong_FromUnsignedLongLong(form);
}

static PyObject *graphs_behind(Graphs *self, PyObject *ops) {
    GraphWalk walk = {.graphs = self};
    PyObject *behind = walk_graph(&walk, ops) ? NULL : PyList_New(0);
    for (size_t at = 0; behind && at < walk.count; at++)
        if (PyList_Append(behind, walk.nodes[at].op)) Py_CLEAR(behind);
    end_walk(&walk);
    return behind;
}

/* ---- marks left by native code ---- */

typedef struct {
    PyObject_HEAD
    Graphs *graphs;  /* owned */
    PyObject *trace; /* owned */
    int bases;
} BackwardMarker;

static PyObject *graphs_marker(Graphs *self, PyObject *args) {
    PyObject *trace;
    int bases;
    if (!PyArg_ParseTuple(args, "Op", &trace, &bases)) return NULL;
    BackwardMarker *marker = PyObject_GC_New(BackwardMarker, &BackwardMarker_Type);
    if (!marker) return NULL;
    marker->graphs = (Graphs *)Py_NewRef(self);
    marker->trace = Py_NewRef(trace);
    marker->bases = bases;
    PyObject_GC_Track(marker);
    return (PyObject *)marker;
}

int marker_reads_written(PyObject *marker) { return ((BackwardMarker *)marker)->bases; }

int mark_backward_nodes(PyObject *marker, uint64_t begin, uint64_t start, uint64_t end, PyObject *outputs, PyObject *written,
               PyObject *shapes) {
    BackwardMarker *self = (BackwardMarker *)marker;
    Mark *mark = make_mark(&Mark_Type, self->trace, (long long)begin, (long long)start, (long long)end, 0, shapes);
    int failed = !mark || mark_value(self->graphs, outputs, mark, self->bases, NESTING_LIMIT) ||
                (written && written != outputs && mark_value(self->graphs, written, mark, self->bases, NESTING_LIMIT));
    Py_XDECREF(mark);
    return failed ? -1 : 0;
}

static int marker_traverse(BackwardMarker *self, visitproc visit, void *arg) {
    Py_VISIT(self->graphs);
    Py_VISIT(self->trace);
    return 0;
}

static void marker_dealloc(BackwardMarker *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->graphs);
    Py_CLEAR(self->trace);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

PyTypeObject BackwardMarker_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.BackwardMarker",
    .tp_basicsize = sizeof(BackwardMarker),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Marks the backward ops of executions that a program runs.",
    .tp_dealloc = (destructor)marker_dealloc,
    .tp_traverse = (traverseproc)marker_traverse,
};

/* ---- the type ---- */

static PyObject *graphs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tensors", "leaf", "maker", "base", "next", "notes", "number", "key", "sampled", "layout", NULL};
    PyObject *tensors, *leaf, *maker, *base, *next, *notes, *number, *key, *sampled, *offsets = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!UUUUUUO|O", names, &PyType_Type, &tensors, &PyType_Type, &leaf,
                                     &maker, &base, &next, &notes, &number, &key, &sampled, &offsets))
        return NULL;
    NodeLayout layout = {0};
    if (offsets != Py_None && (!PyTuple_Check(offsets) || !PyArg_ParseTuple(offsets, "nnnnnnn", &layout.node, &layout.object, &layout.number, &layout.edges, &layout.metadata, &layout.notes, &layout.edge_size))) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "the layout of nodes is a tuple of offsets, not %R", offsets);
        return NULL;
    }
    Graphs *graphs = (Graphs *)type->tp_alloc(type, 0);
    if (!graphs) return NULL;
    graphs->layout = layout;
    graphs->tensors = (PyTypeObject *)Py_NewRef(tensors);
    graphs->leaf = (PyTypeObject *)Py_NewRef(leaf);
    graphs->maker = Py_NewRef(maker);
    graphs->base = Py_NewRef(base);
    graphs->next = Py_NewRef(next);
    graphs->notes = Py_NewRef(notes);
    graphs->number = Py_NewRef(number);
    graphs->key = Py_NewRef(key);
    graphs->sampled = Py_NewRef(sampled);
    return (PyObject *)graphs;
}

static int graphs_traverse(Graphs *self, visitproc visit, void *arg) {
    Py_VISIT(self->tensors);
    Py_VISIT(self->leaf);
    Py_VISIT(self->sampled);
    return 0;
}

static void graphs_dealloc(Graphs *self) {
    PyObject_GC_UnTrack(self);
    PyObject **fields[] = {(PyObject **)&self->tensors, (PyObject **)&self->leaf, &self->maker, &self->base, &self->next,
                         &self->notes, &self->number, &self->key, &self->sampled};
    for (size_t i = 0; i < sizeof(fields) / sizeof(*fields); i++) Py_CLEAR(*fields[i]);
    map_clear(&self->types);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef graphs_methods[] = {
    {"mark", (PyCFunction)graphs_mark, METH_VARARGS,
     "mark(values, mark, bases=True): mark the ops that made these tensors, and those that made their bases."},
    {"marked", (PyCFunction)graphs_marked, METH_O,
     "marked(ops): return (op, mark, number) of each op behind these whose execution is known.\n\n"
     "An op without a mark of its own is found by its number and the marks of ops that lead to it; a leaf has number 0."},
    {"form", (PyCFunction)graphs_form, METH_O,
     "form(ops): return a number that is the same for graphs of the same form behind these ops; 0 if a program's own\n"
     "function, a routine's op, or a backward op of a backward op is among them.\n\n"
     "The form is: types of ops, what each leads on to, and their executions by traces, shapes and numbers. Whoever keeps\n"
     "the number keeps the traces and shapes of the marks too, which it knows by identity."},
    {"behind", (PyCFunction)graphs_behind, METH_O,
     "behind(ops): return these ops and all behind them, in an order that is the same for graphs of the same form."},
    {"marker", (PyCFunction)graphs_marker, METH_VARARGS,
     "marker(trace, writes): return a marker for a program, whose executions leave this trace.\n\n"
     "writes: whether the op writes its first input, whose base has a new node then."},
    {0}};

PyTypeObject Graphs_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.Graphs",
    .tp_basicsize = sizeof(Graphs),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Graphs(tensors, leaf, maker, base, next, notes, number, key, sampled, layout=None): graphs of backward ops.\n\n"
              "tensors: their type.  leaf: type of the ops that store a gradient.\n"
              "maker, base: attributes of a tensor: the op that made it, None for a leaf; what it is a view of.\n"
              "next, notes, number: attributes of an op: a tuple of pairs, of a following op or None and more; a dict that\n"
              "lives as long as the op; a method whose result grows with each op that is made on a thread.\n"
              "key: of the marks in the notes.\n"
              "sampled(op): called with some of the ops that are visited.\n"
              "layout: offsets by which `form` reads a graph from memory: in an op's object, of the address of its node; in a\n"
              "node, of the addresses of that object, of its number, its edges and its metadata; in these, of its notes; and\n"
              "the bytes of an edge.",
    .tp_new = graphs_new,
    .tp_dealloc = (destructor)graphs_dealloc,
    .tp_traverse = (traverseproc)graphs_traverse,
    .tp_methods = graphs_methods,
};

int graph_boot(PyObject *names) {
    if (PyType_Ready(&BackwardMarker_Type)) return -1;
    if (add_type(names, "Mark", &Mark_Type) || add_type(names, "DeferredRelease", &DeferredRelease_Type)) return -1;
    return add_type(names, "Graphs", &Graphs_Type);
}

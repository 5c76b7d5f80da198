/* Places: the call sites around an op, hashed, and the state of threads. */
#include "interception/fast_path.h"

#if PY_VERSION_HEX >= 0x030C0000
#define code_index PyUnstable_Eval_RequestCodeExtraIndex
#define code_get PyUnstable_Code_GetExtra
#define code_set PyUnstable_Code_SetExtra
#else
#define code_index _PyEval_RequestCodeExtraIndex
#define code_get _PyCode_GetExtra
#define code_set _PyCode_SetExtra
#endif

/* Notes on a code object, which the code object holds: its hash, and for each instruction word the first word of the
   call that the word belongs to, since an interpreter that specialises a call moves within it. */
typedef struct {
    uint64_t hash;
    unsigned epoch, length;
    int flags;
    uint32_t first[];
} CodeNote;

static struct {
    Py_ssize_t index;   /* under which code objects have their notes; -1: none yet */
    unsigned epoch;     /* notes of earlier ones are made again */
    PyObject *describe; /* owned */
} code_notes = {.index = -1, .epoch = 1};

FastCache fast_cache;
__thread Local local;
Thread other_interpreter = {.suspensions = 1};

Thread *new_thread(uint64_t owner) {
    local.thread = (Thread){0};
    local.owner = owner;
    return &local.thread;
}

Thread *thread_state(void) { return thread_of(running_thread()); }

/* Drop all cached answers, as code has changed its kind, or types enter ids that did not. */
void new_epoch(void) {
    code_notes.epoch++;
    memset(fast_cache.types, 0, sizeof fast_cache.types);
    memset(fast_cache.sites, 0, sizeof fast_cache.sites);
}

static CodeNote *describe(Thread *thread, PyCodeObject *code, CodeNote *old) {
    if (!code_notes.describe) {
        PyErr_SetString(PyExc_RuntimeError, "the interceptor is not configured");
        return NULL;
    }
    unsigned epoch = code_notes.epoch;
    disturb();
    PyObject *describe_code = Py_NewRef(code_notes.describe);
    thread->suspensions++;
    PyObject *answer = PyObject_CallOneArg(describe_code, (PyObject *)code);
    thread->suspensions--;
    Py_DECREF(describe_code);
    if (!answer) return NULL;
    unsigned long long hash;
    int flags;
    Py_buffer first;
    if (!PyArg_ParseTuple(answer, "Kiy*", &hash, &flags, &first)) {
        Py_DECREF(answer);
        return NULL;
    }
    if (!old) code_get((PyObject *)code, code_notes.index, (void **)&old); /* what was called may have described it too */
    CodeNote *note = old ? old : PyMem_RawMalloc(sizeof(CodeNote) + (size_t)first.len);
    if (note && !old) {
        note->length = (unsigned)(first.len / sizeof(uint32_t));
        memcpy(note->first, first.buf, (size_t)first.len);
    }
    PyBuffer_Release(&first);
    Py_DECREF(answer);
    if (!note) return (CodeNote *)PyErr_NoMemory();
    note->hash = hash;
    note->flags = flags;
    note->epoch = epoch;
    if (!old && code_set((PyObject *)code, code_notes.index, note)) {
        PyMem_RawFree(note);
        return PyErr_Occurred() ? NULL : (CodeNote *)PyErr_NoMemory(); /* it may fail and not say so */
    }
    return note;
}

static inline CodeNote *note_of(Thread *thread, PyCodeObject *code) {
    void *note = NULL;
    if (code_get((PyObject *)code, code_notes.index, &note)) return NULL;
    if (note && ((CodeNote *)note)->epoch == code_notes.epoch) return note;
    return describe(thread, code, note);
}

static inline uint64_t site_hash(const CodeNote *note, int instruction) {
    if (instruction >= 0 && (unsigned)instruction < note->length)
        instruction = (int)note->first[instruction];
    return note->hash + (uint64_t)(instruction + 1) * 0x9E3779B97F4A7C15ULL;
}

/* Cache the hash of a call site by its instruction. Not ahead of the first traceable instruction, where a frame is
   incomplete unless it is a generator's: the instruction alone does not tell which. */
static inline void remember_instruction(const Walk *walk, const CodeNote *note, uint64_t mark) {
#if AMANDA_INTERNAL_FRAMES
    const void *where = frame_instruction(walk->frame);
    PyCodeObject *code = walk_code((Walk *)walk);
    if (note->epoch != code_notes.epoch || where < (const void *)(_PyCode_CODE(code) + code->_co_firsttraceable)) return;
    unsigned kind = (unsigned)note->flags & (FRAMEWORK | BOUNDARY | SKIPPED);
    *cached_site(where) = (CachedSite){where, mark, kind & FRAMEWORK ? kind : kind | USER, 0};
#else
    (void)walk, (void)note, (void)mark;
#endif
}

/* A code object dies, and another may come to lie at its address: drop the cached call sites. */
static void free_note(void *note) {
    memset(fast_cache.sites, 0, sizeof fast_cache.sites);
    PyMem_RawFree(note);
}

int walk_sites(Thread *thread, Region *region, Sites *sites) { /* -1: an exception */
    Walk walk;
    int rooted = at_root(region), most = WALK_LIMIT;
    sites->count = sites->way_count = 0;
    for (walk_start(&walk); walk_frame(&walk) && walk_frame(&walk) != region->entry; walk_next(&walk)) {
        if (sites->count == WALK_LIMIT || sites->way_count > WAY_LIMIT || (sites->way_count && !most--)) break;
        CodeNote *note = note_of(thread, walk_code(&walk));
        if (!note) {
            walk_end(&walk);
            return -1;
        }
        uint64_t site = site_hash(note, walk_instruction(&walk));
        remember_instruction(&walk, note, site);
        if (!rooted && note->flags & BOUNDARY) break;
        if (note->flags & SKIPPED) continue;
        if (!sites->way_count) sites->items[sites->count++] = site;
        if (rooted && !(note->flags & FRAMEWORK)) sites->way[sites->way_count++] = site;
    }
    walk_end(&walk);
    const uint64_t *way = region->tail + region->tail_length;
    for (int i = 0; !sites->way_count && i < region->tail_length && sites->count < WALK_LIMIT; i++)
        sites->items[sites->count++] = region->tail[i];
    for (int i = 0; i < region->way_length && sites->way_count <= WAY_LIMIT; i++)
        sites->way[sites->way_count++] = way[i];
    return 0;
}

int place_of(Thread *thread, uint64_t op_hash, uint64_t *place, uint64_t *way) {
    Region *region = current_region(thread);
    Sites sites;
    if (!region || walk_sites(thread, region, &sites)) return -1;
    *place = mix(region->hash, op_hash);
    *way = 0;
    for (int i = 0; i < sites.count; i++) *place = mix(*place, sites.items[i]);
    for (int i = 1; i < sites.way_count; i++) *way = mix(*way, sites.way[i]);
    return 0;
}

/* ---- functions ---- */

static PyObject *configure(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *describe, *on_death, *adopt = NULL;
    if (!PyArg_ParseTuple(args, "OO|O", &describe, &on_death, &adopt)) return NULL;
    Py_XSETREF(code_notes.describe, Py_NewRef(describe));
    ordinals_configure(on_death, adopt);
    new_epoch();
    Py_RETURN_NONE;
}

static PyObject *forget_code(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    new_epoch();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS,
     "configure(describe, on_death, adopt=None): set the functions that describe code, are called with the ordinals of\n"
     "dead objects, and return the ordinals of objects in slots."},
    {"forget_code", forget_code, METH_NOARGS, "Forget the descriptions of code, whose kind may have changed."},
    {0}};

int place_boot(PyObject *names) {
    fast_cache.interpreter = PyInterpreterState_Get();
    if (code_notes.index < 0) code_notes.index = code_index(free_note); /* a reload keeps what there is */
    if (code_notes.index < 0) {
        PyErr_SetString(PyExc_RuntimeError, "no room for notes on code objects");
        return -1;
    }
    for (PyMethodDef *def = functions; def->ml_name; def++)
        if (add_function(names, def)) return -1;
    return 0;
}

/* Storages of tensors: how many bytes are alive, which op has allocated them, and the most at once. */
#include "execution/observer.h"
#include "execution/saved.h"
#include "interception/table.h"
#include <string.h>
#include <structmember.h>

#define OLDER (-1) /* owner of what no observed op has allocated: parameters, inputs, older tensors */

typedef struct {
    int64_t alive, at_peak_since; /* at_peak_since: what was added to `alive` since the peak */
    char is_changed;              /* since the peak, and listed in `changed` */
} Owned;

typedef struct {
    int64_t when, bytes;
} Change;

typedef struct {
    PyObject *device; /* owned; its name */
    int64_t alive, older, peak; /* peak: -1: none yet */
    Owned *owned;               /* by owner, plus 1 */
    uint32_t owner_count;
    uint32_t *changed, changed_count; /* owners, plus 1; as many places as owners */
    Change *history;
    Py_ssize_t history_count, history_room;
} Account;

typedef struct {
    PyObject_HEAD
    Map live_storages; /* address of a storage -> LiveStorage */
    Account *accounts;
    int account_count;
    int64_t *allocated; /* bytes, by number of the op, while recording */
    uint32_t allocated_count;
    Py_ssize_t limit;
    char recording;
} StorageTracker;

/* A storage that is followed; also the callback of the weak reference to it, called when the storage ends. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    StorageTracker *tracker; /* borrowed; NULL: the tracker has ended, or has forgotten the storage */
    PyObject *reference;     /* owned */
    uint64_t address;
    const void *data; /* address of its memory, by which a resize is seen; NULL: none, or not read */
    int64_t size;
    int owner, account;
} LiveStorage;

typedef struct StorageObserver {
    Observer base;
    StorageTracker *tracker; /* owned */
    struct StorageObserver *before; /* owned; the observer before the op; NULL: this one is */
    SavedTensorReader *saved; /* owned; reads what the op has saved for its backward ops; NULL: Python does */
    int number;          /* of the op */
    char notes_number;   /* whether an execution of the op notes the clock in `number_by_thread` */
    Map number_by_thread; /* the reader's clock before the execution under way on a thread, plus 1 */
} StorageObserver;

static PyTypeObject StorageTracker_Type, LiveStorage_Type;
static PyObject *name_untyped_storage, *name_cpu;

/* ---- accounts ---- */

static int grow_owners(Account *account, uint32_t place) { /* -1: an exception */
    if (place < account->owner_count) return 0;
    uint32_t count = place + place / 2 + 64;
    Owned *owned = PyMem_Realloc(account->owned, count * sizeof *owned);
    if (owned) account->owned = owned;
    uint32_t *changed = owned ? PyMem_Realloc(account->changed, count * sizeof *changed) : NULL;
    if (!changed) {
        PyErr_NoMemory();
        return -1;
    }
    account->changed = changed;
    memset(owned + account->owner_count, 0, (count - account->owner_count) * sizeof *owned);
    account->owner_count = count;
    return 0;
}

/* Take the present bytes as the peak if these are as many: of equal peaks the last has the fewest changes since. */
static void note_peak(Account *account) {
    if (account->peak >= 0 && account->alive < account->peak) return;
    account->peak = account->alive;
    for (uint32_t i = 0; i < account->changed_count; i++) {
        account->owned[account->changed[i]].at_peak_since = 0;
        account->owned[account->changed[i]].is_changed = 0;
    }
    account->changed_count = 0;
}

static void add_to_history(StorageTracker *tracker, Account *account) { /* without memory the history ends */
    if (account->history_count >= tracker->limit) return;
    if (account->history_count == account->history_room) {
        Py_ssize_t room = account->history_room * 2 + 256;
        Change *history = PyMem_Realloc(account->history, (size_t)room * sizeof *history);
        if (!history) return;
        account->history = history;
        account->history_room = room;
    }
    account->history[account->history_count++] = (Change){nanoseconds(), account->alive - account->older};
}

/* Add bytes, negative ones as they are freed, to an owner that has a place. */
static void change_bytes(StorageTracker *tracker, Account *account, int owner, int64_t size) {
    Owned *owned = &account->owned[owner + 1];
    owned->alive += size;
    owned->at_peak_since += size;
    if (!owned->is_changed) account->changed[account->changed_count++] = (uint32_t)(owner + 1);
    owned->is_changed = 1;
    account->alive += size;
    if (!tracker->recording) return;
    if (size > 0) note_peak(account); /* only an allocation can raise the peak */
    add_to_history(tracker, account);
}

static int account_of(StorageTracker *tracker, PyObject *device) { /* -1: an exception */
    for (int i = 0; i < tracker->account_count; i++) {
        int equal = device == tracker->accounts[i].device ? 1 : PyObject_RichCompareBool(device, tracker->accounts[i].device, Py_EQ);
        if (equal) return equal < 0 ? -1 : i;
    }
    Account *accounts = PyMem_Realloc(tracker->accounts, (size_t)(tracker->account_count + 1) * sizeof *accounts);
    if (!accounts) {
        PyErr_NoMemory();
        return -1;
    }
    tracker->accounts = accounts;
    Account *account = &accounts[tracker->account_count];
    *account = (Account){.device = Py_NewRef(device), .peak = tracker->recording ? 0 : -1};
    PyUnicode_InternInPlace(&account->device); /* as native code's own name is: found without a comparison of texts */
    return tracker->account_count++;
}

/* Add the bytes of a storage that is new: an op has allocated them, or they were alive, and so at the peak, before. */
static int add_bytes(StorageTracker *tracker, Account *account, int owner, int64_t size) { /* -1: an exception */
    if (grow_owners(account, (uint32_t)(owner + 1))) return -1;
    if (owner == OLDER) {
        account->owned[0].alive += size;
        account->alive += size;
        account->older += size;
        if (account->peak >= 0) account->peak += size;
        return 0;
    }
    uint32_t number = (uint32_t)owner;
    if (tracker->recording && number >= tracker->allocated_count) {
        uint32_t count = number + number / 2 + 64;
        int64_t *allocated = PyMem_Realloc(tracker->allocated, count * sizeof *allocated);
        if (!allocated) {
            PyErr_NoMemory();
            return -1;
        }
        for (uint32_t i = tracker->allocated_count; i < count; i++) allocated[i] = -1;
        tracker->allocated = allocated;
        tracker->allocated_count = count;
    }
    if (tracker->recording) {
        if (tracker->allocated[number] < 0) tracker->allocated[number] = 0;
        tracker->allocated[number] += size;
    }
    change_bytes(tracker, account, owner, size);
    return 0;
}

/* ---- live storages ---- */

static void drop_live_storage(LiveStorage *live) {
    live->tracker = NULL;
    Py_CLEAR(live->reference);
    Py_DECREF(live);
}

/* Subtract the bytes of a storage that has ended. */
static void forget_storage(StorageTracker *tracker, uint64_t address) {
    LiveStorage *live = map_remove(&tracker->live_storages, address);
    if (!live) return;
    change_bytes(tracker, &tracker->accounts[live->account], live->owner, -live->size);
    drop_live_storage(live);
}

static PyObject *call_at_end(PyObject *self, PyObject *const *Py_UNUSED(args), size_t Py_UNUSED(flags), PyObject *Py_UNUSED(names)) {
    LiveStorage *live = (LiveStorage *)self;
    if (live->tracker) forget_storage(live->tracker, live->address);
    Py_RETURN_NONE;
}

static void resize(StorageTracker *tracker, LiveStorage *live, const void *data, int64_t size) {
    live->data = data;
    if (live->size != size) change_bytes(tracker, &tracker->accounts[live->account], live->owner, size - live->size);
    live->size = size;
}

static int is_of(const LiveStorage *live, PyObject *storage) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(live->reference, &object) < 0) PyErr_Clear();
    Py_XDECREF(object); /* the caller has one more */
    return object == storage;
#else
    return PyWeakref_GET_OBJECT(live->reference) == storage;
#endif
}

/* Follow a storage from now on; a known one keeps its owner.  data: address of its memory; NULL: none, or not read.
   -1: an exception. */
static int follow(StorageTracker *tracker, PyObject *storage, uint64_t address, const void *data, int64_t size, int account, int owner) {
    LiveStorage *live = map_get(&tracker->live_storages, address);
    if (live && is_of(live, storage)) {
        resize(tracker, live, data, size);
        return 0;
    }
    LiveStorage *added = PyObject_New(LiveStorage, &LiveStorage_Type);
    if (!added) return -1;
    added->vectorcall = call_at_end;
    added->tracker = NULL;
    added->reference = PyWeakref_NewRef(storage, (PyObject *)added); /* a garbage collection may run Python here */
    added->address = address;
    added->data = data;
    added->size = size;
    added->owner = owner;
    added->account = account;
    live = added->reference ? map_get(&tracker->live_storages, address) : NULL;
    if (live && is_of(live, storage)) {
        drop_live_storage(added);
        resize(tracker, live, data, size);
        return 0;
    }
    if (live) forget_storage(tracker, address); /* its death was not heard */
    if (!added->reference || map_set(&tracker->live_storages, address, added)) {
        if (!PyErr_Occurred()) PyErr_NoMemory();
        drop_live_storage(added);
        return -1;
    }
    added->tracker = tracker;
    if (!add_bytes(tracker, &tracker->accounts[account], owner, size)) return 0;
    map_remove(&tracker->live_storages, address);
    drop_live_storage(added);
    return -1;
}

/* ---- observers ---- */

typedef enum { FOLLOW_FAILED = -1, LEFT, FOLLOWED } Following; /* FAILED: an exception is set; LEFT: Python has to look */

static Following follow_tensor(const StorageObserver *self, const Reader *reader, PyObject *value) {
    const void *data;
    int64_t size;
    StorageTracker *tracker = self->tracker;
    const void *address = reader_storage(reader, value, &data, &size);
    if (!address) return LEFT;
    LiveStorage *live = map_get(&tracker->live_storages, (uint64_t)(uintptr_t)address);
    if (live && data && live->data == data) return FOLLOWED;
    Memory memory;
    if (!reader_host_memory(reader, value, &memory)) return LEFT;
    PyObject *storage = PyObject_CallMethodNoArgs(value, name_untyped_storage);
    int account = storage ? account_of(tracker, name_cpu) : -1, failed = 1;
    if (account >= 0)
        failed = follow(tracker, storage, (uint64_t)(uintptr_t)address, data, size, account, self->before ? self->number : OLDER);
    Py_XDECREF(storage);
    return failed ? FOLLOW_FAILED : FOLLOWED;
}

/* Follow the storages of all tensors of a value.  ops: gets the backward ops of outputs, which may have saved others; NULL:
   none are looked for. */
static Following follow_value(const StorageObserver *self, const Reader *reader, PyObject *value, BackwardOps *ops) {
    if (reader_is_tensor(reader, value)) {
        Following following = follow_tensor(self, reader, value);
        if (following != FOLLOWED || !ops || !reader_needs_gradient(reader, value) || reader_is_leaf(reader, value)) return following;
        return !self->saved ? LEFT : add_maker(self->saved, value, ops) ? FOLLOW_FAILED : FOLLOWED;
    }
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return reader_is_plain(reader, value) || PySlice_Check(value) ? FOLLOWED : LEFT;
    Following following = FOLLOWED;
    for (Py_ssize_t i = 0; following == FOLLOWED && i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i)); /* a list may lose it */
        following = PyList_Check(item) || PyTuple_Check(item) ? LEFT : follow_value(self, reader, item, ops);
        Py_DECREF(item);
    }
    return following;
}

typedef struct {
    const StorageObserver *observer;
    const Reader *reader;
    Following following;
} SavedContext;

static int follow_saved(PyObject *value, void *context) {
    SavedContext *saved = context;
    saved->following = follow_value(saved->observer, saved->reader, value, NULL);
    return saved->following == FOLLOWED ? 0 : saved->following == LEFT ? 1 : -1;
}

/* Follow what the backward ops of the outputs have saved that the execution under way has made; they are released. */
static Following follow_all_saved(const StorageObserver *self, Thread *thread, const Reader *reader, BackwardOps *ops, Following outputs) {
    uint64_t key = (uint64_t)(uintptr_t)thread, next = (uint64_t)(uintptr_t)map_get(&self->before->number_by_thread, key);
    if (outputs == FOLLOWED && !next) outputs = LEFT; /* Python has begun the execution */
    SavedContext context = {self, reader, outputs};
    int visited = visit_saved(self->saved, ops, next ? next - 1 : 0, outputs == FOLLOWED ? reader_clock(reader) : 0, follow_saved, &context);
    if (visited < 0) return FOLLOW_FAILED;
    if (context.following == FOLLOWED) map_remove(&self->before->number_by_thread, key);
    return context.following;
}

static Observation observe_storages(Observer *observer, Thread *thread, const Reader *reader, PyObject *const *values,
                                    Py_ssize_t count, const OpInputs *Py_UNUSED(op_inputs)) {
    StorageObserver *self = (StorageObserver *)observer;
    if (!self->tracker) return CALL_PYTHON;
    if (!self->before && self->notes_number &&
        map_set(&self->number_by_thread, (uint64_t)(uintptr_t)thread, (void *)(uintptr_t)(reader_clock(reader) + 1)))
        return CALL_PYTHON;
    Following following = FOLLOWED;
    BackwardOps ops = {0};
    thread->suspensions++;
    for (Py_ssize_t i = 0; following == FOLLOWED && i < count; i++)
        following = follow_value(self, reader, values[i], self->before ? &ops : NULL);
    if (ops.count) following = follow_all_saved(self, thread, reader, &ops, following);
    thread->suspensions--;
    return following == FOLLOWED ? OBSERVED : following == LEFT ? CALL_PYTHON : OBSERVER_FAILED;
}

/* ---- for Python ---- */

static PyTypeObject LiveStorage_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.LiveStorage",
    .tp_basicsize = sizeof(LiveStorage),
    .tp_vectorcall_offset = offsetof(LiveStorage, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Callback of a storage's weak reference.",
};

static PyObject *tracker_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    return type->tp_alloc(type, 0);
}

static int tracker_init(StorageTracker *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"limit", NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &self->limit) ? 0 : -1;
}

static void free_account(Account *account) {
    PyMem_Free(account->owned);
    PyMem_Free(account->changed);
    PyMem_Free(account->history);
    Py_DECREF(account->device);
}

static void tracker_dealloc(StorageTracker *self) {
    Map live_storages = self->live_storages;
    self->live_storages = (Map){0};
    for (size_t i = 0; i < live_storages.size; i++)
        if (live_storages.cells[i].value) drop_live_storage(live_storages.cells[i].value);
    map_clear(&live_storages);
    for (int i = 0; i < self->account_count; i++) free_account(&self->accounts[i]);
    PyMem_Free(self->accounts);
    PyMem_Free(self->allocated);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *tracker_follow(StorageTracker *self, PyObject *args) {
    PyObject *storage, *device;
    unsigned long long address;
    long long size;
    int owner;
    if (!PyArg_ParseTuple(args, "OKLUi", &storage, &address, &size, &device, &owner)) return NULL;
    if (!address) return PyErr_Format(PyExc_ValueError, "the address of a storage is 0");
    if (owner >= NUMBER_LIMIT) return PyErr_Format(PyExc_ValueError, "the number of an op is at most %d, not %d", NUMBER_LIMIT - 1, owner);
    int account = account_of(self, device);
    if (account < 0 || follow(self, storage, address, NULL, size, account, owner < 0 ? OLDER : owner)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *tracker_record(StorageTracker *self, PyObject *argument) {
    int recording = PyObject_IsTrue(argument);
    if (recording < 0) return NULL;
    self->recording = (char)recording;
    for (int i = 0; recording && i < self->account_count; i++) note_peak(&self->accounts[i]);
    Py_RETURN_NONE;
}

static PyObject *tracker_clear(StorageTracker *self, PyObject *Py_UNUSED(none)) {
    for (int i = 0; i < self->account_count; i++) {
        self->accounts[i].peak = -1;
        self->accounts[i].history_count = 0;
        if (self->recording) note_peak(&self->accounts[i]);
    }
    self->allocated_count = 0;
    Py_RETURN_NONE;
}

static PyObject *tracker_take_allocated(StorageTracker *self, PyObject *argument) {
    unsigned long number = PyLong_AsUnsignedLong(argument);
    if (PyErr_Occurred()) return NULL;
    if (number >= self->allocated_count || self->allocated[number] < 0) Py_RETURN_NONE;
    int64_t allocated = self->allocated[number];
    self->allocated[number] = -1;
    return PyLong_FromLongLong(allocated);
}

/* A dict of the owners of some bytes.  bytes: by owner, plus 1. */
static PyObject *owners_of(const int64_t *bytes, uint32_t count) {
    PyObject *owners = PyDict_New();
    for (uint32_t i = 0; owners && i < count; i++) {
        if (!bytes[i]) continue;
        PyObject *owner = PyLong_FromLong((long)i - 1), *size = PyLong_FromLongLong(bytes[i]);
        if (!owner || !size || PyDict_SetItem(owners, owner, size)) Py_CLEAR(owners);
        Py_XDECREF(owner);
        Py_XDECREF(size);
    }
    return owners;
}

static PyObject *tracker_accounts(StorageTracker *self, PyObject *Py_UNUSED(none)) {
    PyObject *accounts = PyList_New(0);
    for (int i = 0; accounts && i < self->account_count; i++) {
        /* A copy of all numbers of one moment: to make a dict may run Python, and ops. */
        const Account account = self->accounts[i];
        int64_t *bytes = PyMem_Malloc((account.owner_count + 1) * sizeof *bytes);
        for (uint32_t j = 0; bytes && j < account.owner_count; j++) bytes[j] = account.owned[j].alive - account.owned[j].at_peak_since;
        PyObject *history = PyBytes_FromStringAndSize((char *)account.history, account.history_count * (Py_ssize_t)sizeof(Change));
        PyObject *owners = bytes && history ? owners_of(bytes, account.owner_count) : bytes ? NULL : PyErr_NoMemory();
        PyObject *item = owners ? Py_BuildValue("OLLOO", account.device, (long long)account.peak, (long long)account.older, owners, history) : NULL;
        if (!item || PyList_Append(accounts, item)) Py_CLEAR(accounts);
        PyMem_Free(bytes);
        Py_XDECREF(owners);
        Py_XDECREF(history);
        Py_XDECREF(item);
    }
    return accounts;
}

static PyObject *tracker_reduce(StorageTracker *self, PyObject *Py_UNUSED(none)) {
    PyObject *accounts = tracker_accounts(self, NULL);
    if (!accounts) return NULL;
    return Py_BuildValue("O(n)(iNy#)", Py_TYPE(self), self->limit, (int)self->recording, accounts,
                         self->allocated_count ? (char *)self->allocated : "",
                         (Py_ssize_t)(self->allocated_count * sizeof *self->allocated));
}

/* Take over the peaks, but no live storages: what was alive at a peak is taken to have ended since. */
static PyObject *tracker_setstate(StorageTracker *self, PyObject *state) {
    int recording;
    PyObject *accounts, *owner, *size;
    const char *allocated;
    Py_ssize_t allocated_size;
    if (!PyArg_ParseTuple(state, "iO!y#", &recording, &PyList_Type, &accounts, &allocated, &allocated_size)) return NULL;
    if (self->account_count || self->allocated) return PyErr_Format(PyExc_ValueError, "the tracker has followed storages already");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(accounts); i++) {
        PyObject *device, *owners;
        long long peak, older;
        const char *history;
        Py_ssize_t history_size, position = 0;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(accounts, i), "ULLO!y#", &device, &peak, &older, &PyDict_Type, &owners, &history, &history_size))
            return NULL;
        int index = account_of(self, device);
        if (index < 0) return NULL;
        Account *account = &self->accounts[index];
        account->peak = peak;
        account->history = PyMem_Malloc((size_t)history_size + 1);
        if (!account->history) return PyErr_NoMemory();
        memcpy(account->history, history, (size_t)history_size);
        account->history_count = account->history_room = history_size / (Py_ssize_t)sizeof(Change);
        for (Py_ssize_t j = 0; j < account->history_count; j++) account->history[j].bytes += older; /* `older` is 0 from now on */
        while (PyDict_Next(owners, &position, &owner, &size)) {
            long place = PyLong_AsLong(owner) + 1;
            long long bytes = PyLong_AsLongLong(size);
            if (!PyErr_Occurred() && (place < 0 || place > NUMBER_LIMIT)) PyErr_Format(PyExc_ValueError, "no op has the number %ld", place - 1);
            if (PyErr_Occurred() || grow_owners(account, (uint32_t)place)) return NULL;
            account->owned[place] = (Owned){0, -bytes, 1};
            account->changed[account->changed_count++] = (uint32_t)place;
        }
    }
    self->recording = (char)recording;
    self->allocated = PyMem_Malloc((size_t)allocated_size + 1);
    if (!self->allocated) return PyErr_NoMemory();
    memcpy(self->allocated, allocated, (size_t)allocated_size);
    self->allocated_count = (uint32_t)(allocated_size / (Py_ssize_t)sizeof *self->allocated);
    Py_RETURN_NONE;
}

static PyMethodDef tracker_methods[] = {
    {"follow", (PyCFunction)tracker_follow, METH_VARARGS,
     "follow(storage, address, size, device, owner): follow a storage until its end; one that is followed keeps its owner.\n\n"
     "size: bytes.  owner: number of the op that has allocated it, -1: none."},
    {"record", (PyCFunction)tracker_record, METH_O, "record(recording): begin or stop to update the peaks."},
    {"clear", (PyCFunction)tracker_clear, METH_NOARGS, "Forget the peaks and what was allocated, but not the live storages."},
    {"take_allocated", (PyCFunction)tracker_take_allocated, METH_O,
     "take_allocated(number): return and forget the bytes that an op has allocated while recording; None: it has not."},
    {"accounts", (PyCFunction)tracker_accounts, METH_NOARGS,
     "Return for each device its name, the peak (-1: none), the bytes of older storages, a dict of the owners' bytes at the\n"
     "peak, and the history: two int64 for each change, nanoseconds and bytes alive without older ones."},
    {"__reduce__", (PyCFunction)tracker_reduce, METH_NOARGS, "Copy the peaks: a copy follows no storages."},
    {"__setstate__", (PyCFunction)tracker_setstate, METH_O, "Take over the peaks of a copied tracker."},
    {0}};

static PyTypeObject StorageTracker_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.StorageTracker",
    .tp_basicsize = sizeof(StorageTracker),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "StorageTracker(limit): bytes of live storages, by device and by the number of the op that allocated them.\n\n"
              "limit: number of changes in the history of a device.",
    .tp_new = tracker_new,
    .tp_init = (initproc)tracker_init,
    .tp_dealloc = (destructor)tracker_dealloc,
    .tp_methods = tracker_methods,
};

static PyObject *observer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    StorageObserver *self = (StorageObserver *)type->tp_alloc(type, 0); /* subtypes take what they like */
    if (!self) return NULL;
    self->base.observe = observe_storages;
    self->base.reads = SELECTED_VALUES;
    self->notes_number = 1;
    return (PyObject *)self;
}

static int observer_init(StorageObserver *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"tracker", "number", "before", "saved", NULL};
    PyObject *tracker, *before = NULL, *saved = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!i|O!O!", names, &StorageTracker_Type, &tracker, &self->number, Py_TYPE(self),
                                     &before, &SavedTensorReader_Type, &saved))
        return -1;
    Py_XSETREF(self->tracker, (StorageTracker *)Py_NewRef(tracker));
    Py_XSETREF(self->before, (StorageObserver *)Py_XNewRef(before));
    Py_XSETREF(self->saved, (SavedTensorReader *)Py_XNewRef(saved));
    return 0;
}

static int observer_traverse(StorageObserver *self, visitproc visit, void *arg) {
    Py_VISIT(self->tracker);
    Py_VISIT(self->before);
    Py_VISIT(self->saved);
    return 0;
}

static void observer_dealloc(StorageObserver *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->tracker);
    Py_CLEAR(self->before);
    Py_CLEAR(self->saved);
    map_clear(&self->number_by_thread);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *observer_take_number(StorageObserver *self, PyObject *Py_UNUSED(none)) {
    uintptr_t number = (uintptr_t)map_remove(&self->number_by_thread, (uint64_t)(uintptr_t)thread_state());
    return PyLong_FromLongLong((long long)number - 1);
}

static PyMethodDef observer_methods[] = {
    {"take_number", (PyCFunction)observer_take_number, METH_NOARGS,
     "Return and forget the number of the next backward op, as it was before the execution under way on this thread; -1 if\n"
     "native code has not begun the execution."},
    {0}};

static PyMemberDef observer_members[] = {
    {"notes_number", T_BOOL, offsetof(StorageObserver, notes_number), 0,
     "Whether native code notes the number of the next backward op before the op, for `take_number`; true at first."},
    {0}};

static PyTypeObject StorageObserver_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "amanda.interceptor.StorageObserver",
    .tp_basicsize = sizeof(StorageObserver),
    .tp_base = &Observer_Type,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "StorageObserver(tracker, number, [before, [saved]]): base of observers that follow the storages of an op's values.\n\n"
              "A subclass defines __call__(*values, **options), which native code calls where it cannot follow a value itself.\n"
              "Without `before` the object is the routine before an op, with it the one after it.  saved: SavedTensorReader, to follow\n"
              "what the op has saved for its backward ops; without these the object is called where the op has made some.",
    .tp_new = observer_new,
    .tp_init = (initproc)observer_init,
    .tp_dealloc = (destructor)observer_dealloc,
    .tp_traverse = (traverseproc)observer_traverse,
    .tp_methods = observer_methods,
    .tp_members = observer_members,
};

int storages_boot(PyObject *names) {
    name_untyped_storage = PyUnicode_InternFromString("untyped_storage");
    name_cpu = PyUnicode_InternFromString("cpu");
    if (!name_untyped_storage || !name_cpu || PyType_Ready(&LiveStorage_Type)) return -1;
    return add_type(names, "StorageTracker", &StorageTracker_Type) || add_type(names, "StorageObserver", &StorageObserver_Type);
}

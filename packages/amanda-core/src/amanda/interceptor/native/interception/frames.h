/* Walking the Python frames of the running thread, innermost first.

   CPython 3.11 to 3.15 keep frames in structures of their own; reading these costs a few
   nanoseconds where the public functions would make a frame object for each. Other versions
   take the public functions. The code is compiled against the headers of the interpreter that
   runs it, so the layout is the right one; the self-test at boot compares both ways. */
#ifndef AMANDA_FRAMES_H
#define AMANDA_FRAMES_H
#include "interception/base.h"

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x03100000
#define AMANDA_INTERNAL_FRAMES 1
#define Py_BUILD_CORE
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* of CPython's headers */
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#else
#include <internal/pycore_frame.h>
#endif
#pragma GCC diagnostic pop
#undef Py_BUILD_CORE

typedef struct {
    _PyInterpreterFrame *frame;
} Walk;

static inline _PyInterpreterFrame *complete(_PyInterpreterFrame *frame) {
    while (frame && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
    return frame;
}

static inline _PyInterpreterFrame *current_frame(const PyThreadState *thread) {
#if PY_VERSION_HEX >= 0x030D0000
    return thread->current_frame;
#else
    return thread->cframe->current_frame;
#endif
}

/* Where it is in its code object, by which it is known while that lives. */
static inline const void *frame_instruction(const _PyInterpreterFrame *frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return frame->instr_ptr;
#else
    return frame->prev_instr;
#endif
}

static inline void walk_start(Walk *walk) { walk->frame = complete(current_frame(PyThreadState_Get())); }

static inline PyCodeObject *walk_code(Walk *walk) {
#if PY_VERSION_HEX >= 0x030D0000
    return _PyFrame_GetCode(walk->frame);
#else
    return walk->frame->f_code;
#endif
}

static inline int walk_instruction(Walk *walk) { return _PyInterpreterFrame_LASTI(walk->frame); }
static inline void walk_next(Walk *walk) { walk->frame = complete(walk->frame->previous); }
static inline void *walk_frame(Walk *walk) { return walk->frame; }
static inline void walk_end(Walk *walk) { walk->frame = NULL; }

#else
#include <frameobject.h>

typedef struct {
    PyFrameObject *frame; /* owned */
} Walk;

static inline void walk_start(Walk *walk) { walk->frame = PyThreadState_GetFrame(PyThreadState_Get()); }

static inline PyCodeObject *walk_code(Walk *walk) {
    PyCodeObject *code = PyFrame_GetCode(walk->frame);
    Py_DECREF(code); /* the frame keeps it */
    return code;
}

static inline int walk_instruction(Walk *walk) {
#if PY_VERSION_HEX >= 0x030B0000
    return PyFrame_GetLasti(walk->frame) / 2;
#else
    return walk->frame->f_lasti;
#endif
}

static inline void walk_next(Walk *walk) {
    PyFrameObject *back = PyFrame_GetBack(walk->frame);
    Py_DECREF(walk->frame);
    walk->frame = back;
}

static inline void *walk_frame(Walk *walk) { return walk->frame; }
static inline void walk_end(Walk *walk) { Py_CLEAR(walk->frame); }
#endif
#endif

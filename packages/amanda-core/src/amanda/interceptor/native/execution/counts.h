/* How many calls of ops with plans ran in native code, and how many in Python, and why. */
#ifndef AMANDA_COUNTS_H
#define AMANDA_COUNTS_H
#include "interception/base.h"

typedef enum { NEW_OP, NEW_FORM, NO_READER, MODE, ARGUMENTS, SWITCHES, RESULT, WRITTEN, REASONS } Reason;

extern struct Counts {
    uint64_t native, learned, handed[REASONS]; /* under the GIL; handed: to Python, by reason */
} counts;

int statistics_boot(PyObject *names);

#endif

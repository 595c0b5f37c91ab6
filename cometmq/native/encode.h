/* Records as the SDK sends them, one by one or many in a go: cometmq/client/sending/encoder.py. */

#ifndef COMETMQ_ENCODE_H
#define COMETMQ_ENCODE_H

#include "accelerator.h"

#define RUN_COUNT_MAX 1024 /* a batch has no more */
#define TIMER_AT 1         /* cometmq.format.timers.TimerForm */
#define TIMER_AFTER 2

/* What all records of a run have. */
typedef struct run {
    PyObject *topic, *middles, *wait_store;
    PyObject *reserved;      /* bytes: names that no property of an application has, each behind its length */
    Py_ssize_t prefix_bytes; /* of the properties, before those of the message */
    long delay_level;
    int timer;    /* TIMER_AT, TIMER_AFTER: each message names its time; 0: none does */
    long long time_ms; /* what the message named that was appended last */
    int is_marked; /* a message has the property TRACE_ON */
    int is_keyed; /* all messages have a sharding key, or none has */
    uint32_t queue_id, sys_flag;
    uint64_t born_time;
    size_t rest;            /* bytes of a record beside its body and its middle */
    Py_ssize_t body_max;    /* of a body that is stored as it is */
    PyObject *tag, *middle; /* found last */
} run;

/* `form`: a tuple of topic, middles, prefix_bytes, delay_level, wait_store, reserved, timer. 0 with an exception set, and
 * nothing to clear. */
int run_begin(run *run, PyObject *form, int is_keyed, Py_ssize_t body_max, int queue_id, int host_flags,
              long long born_time);

void run_clear(run *run);

/* Bytes of a record beside its body and its middle, which has the lengths of topic and properties. */
size_t bytes_beside(uint32_t sys_flag);

/* Whether a run can have so many records, and a batch so many bytes. */
int is_run_allowed(Py_ssize_t count, Py_ssize_t bytes_max, long long counter);

/* Appends a message's record to the bytearray; its size. 0 when the run does not know how to, or the buffer would have
 * more than `bytes_max`, also with an exception set. With `for_two` there has to be room for a second one of that size. */
size_t append_message(PyObject *object, run *run, PyObject *buffer, Py_ssize_t bytes_max, int for_two, uint32_t counter);

#endif

/* A message as an application sends it: cometmq/model.py. */

#ifndef COMETMQ_MESSAGE_H
#define COMETMQ_MESSAGE_H

#include "accelerator.h"

/* The fields, in the order of the constructor. */
enum { TOPIC, BODY, TAG, KEYS, PROPERTIES, FLAG, QUEUE, DELAY_LEVEL, SHARDING_KEY, WAIT_STORE,
       DELIVER_AT_MS, DELAY_MS, FIELDS };

typedef struct {
    PyObject_HEAD
    PyObject *fields[FIELDS]; /* NULL: somebody deleted it */
} message;

/* Whether the object is a message, and not of a class made from it. */
int is_message(PyObject *object);

/* Whether the object is a number of 32 bits, and not of a class made from int (True is). */
int is_number(PyObject *object, long *number);

#endif

/* Futures of messages that were sent one by one: sent.c. */

#ifndef COMETMQ_SENT_H
#define COMETMQ_SENT_H

#include "accelerator.h"

/* The next message of a SendEach, with a future of its own; NULL with an exception set. */
PyObject *send_each_take(PyObject *each);

/* There are no more messages. 0 with an exception set. */
int send_each_end(PyObject *each);

int is_send_each(PyObject *object);

#endif

/* What other files read of a received message: received.c. */

#ifndef COMETMQ_RECEIVED_H
#define COMETMQ_RECEIVED_H

#include "accelerator.h"

int is_received(PyObject *object);

/* Where the message's properties lie; good as long as the message is there. */
span received_properties(PyObject *object);

/* The queue that it came from; borrowed. NULL when somebody has deleted the attribute. */
PyObject *received_queue(PyObject *object);

/* How often it was delivered before. */
long received_tries_before(PyObject *object);

#endif

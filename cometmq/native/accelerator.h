/* The functions of the module, one file each. What they do for their callers: interface.py. */

#ifndef COMETMQ_ACCELERATOR_H
#define COMETMQ_ACCELERATOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "text.h"

/* Work on fewer bytes keeps the GIL: another thread that takes it may keep it for milliseconds, and this much is done
 * in a few microseconds. */
#define RELEASE_BYTES_MIN (32 * 1024)

#define BEGIN_WORK(bytes) \
    PyThreadState *released = (bytes) >= RELEASE_BYTES_MIN ? PyEval_SaveThread() : NULL;
#define END_WORK \
    if (released != NULL) \
        PyEval_RestoreThread(released);

static inline span span_of(const Py_buffer *buffer)
{
    return (span){(const uint8_t *)buffer->buf, (size_t)buffer->len};
}

PyObject *accelerator_stamp(PyObject *module, PyObject *arguments);
PyObject *accelerator_scan(PyObject *module, PyObject *arguments);
PyObject *accelerator_decode(PyObject *module, PyObject *arguments);
PyObject *accelerator_choose(PyObject *module, PyObject *arguments);
PyObject *accelerator_of_queue(PyObject *module, PyObject *arguments);
PyObject *accelerator_at_places(PyObject *module, PyObject *arguments);
PyObject *accelerator_match(PyObject *module, PyObject *arguments);
PyObject *accelerator_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *accelerator_encode_run(PyObject *module, PyObject *arguments);
PyObject *accelerator_index_keys(PyObject *module, PyObject *arguments);
PyObject *accelerator_index_put(PyObject *module, PyObject *arguments);
PyObject *accelerator_timer_entries(PyObject *module, PyObject *arguments);
PyObject *accelerator_sort_timers(PyObject *module, PyObject *object);
PyObject *accelerator_delivery_targets(PyObject *module, PyObject *arguments);
PyObject *accelerator_half_targets(PyObject *module, PyObject *arguments);
PyObject *accelerator_half_run(PyObject *module, PyObject *arguments);
PyObject *accelerator_relay(PyObject *module, PyObject *arguments);
int levels_add(PyObject *module); /* the type; -1 with an exception set */
int received_add(PyObject *module);
int message_add(PyObject *module);
int sent_add(PyObject *module);
int run_add(PyObject *module);
int trace_add(PyObject *module);

#endif

/* The open run of a producer's batch: messages of one queue are checked and encoded behind each other, each with a
 * future. cometmq/client/sending/batcher.py begins and ends it. */

#include "accelerator.h"

#include "encode.h"
#include "sent.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    run run;
    PyObject *buffer, *each;
    Py_ssize_t count, count_max, bytes_max;
    uint32_t counter;
    int is_ended;
    int64_t *times; /* what each message names; NULL when none does */
    uint32_t starts[RUN_COUNT_MAX];
} open_run;

static PyObject *run_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    PyObject *buffer, *each, *form;
    Py_ssize_t count_max, bytes_max, body_max;
    int queue_id, host_flags;
    long long born_time, counter;
    run run;
    if (keywords != NULL)
        return PyErr_Format(PyExc_TypeError, "OpenRun takes no keywords");
    if (!PyArg_ParseTuple(arguments, "O!OnO!nniiLL:OpenRun", &PyByteArray_Type, &buffer, &each, &count_max,
                          &PyTuple_Type, &form, &bytes_max, &body_max, &queue_id, &host_flags, &born_time,
                          &counter))
        return NULL;
    if (!is_send_each(each))
        return PyErr_Format(PyExc_TypeError, "OpenRun: the messages are a SendEach's, not %R's", each);
    if (!is_run_allowed(count_max, bytes_max, counter))
        return PyErr_Format(PyExc_ValueError, "OpenRun: a number is out of range");
    if (!run_begin(&run, form, 0, body_max, queue_id, host_flags, born_time))
        return NULL;
    int64_t *times = run.timer ? malloc(RUN_COUNT_MAX * sizeof *times) : NULL;
    open_run *self = run.timer && times == NULL ? (open_run *)PyErr_NoMemory() : PyObject_New(open_run, type);
    if (self == NULL) {
        free(times);
        run_clear(&run);
        return NULL;
    }
    self->run = run;
    self->buffer = Py_NewRef(buffer);
    self->each = Py_NewRef(each);
    self->count = 0;
    self->count_max = count_max;
    self->bytes_max = bytes_max;
    self->counter = (uint32_t)counter;
    self->is_ended = 0;
    self->times = times;
    return (PyObject *)self;
}

static PyObject *run_put(PyObject *object, PyObject *message)
{
    open_run *self = (open_run *)object;
    if (self->is_ended || self->count + 1 >= self->count_max)
        Py_RETURN_NONE;
    uint32_t start = (uint32_t)PyByteArray_Size(self->buffer);
    if (!append_message(message, &self->run, self->buffer, self->bytes_max, 1, self->counter + (uint32_t)self->count))
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    PyObject *future = send_each_take(self->each);
    if (future == NULL) {
        PyByteArray_Resize(self->buffer, start);
        return NULL;
    }
    if (self->times != NULL)
        self->times[self->count] = self->run.time_ms;
    self->starts[self->count++] = start;
    return future;
}

static PyObject *run_end(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    open_run *self = (open_run *)object;
    self->is_ended = 1;
    if (!send_each_end(self->each))
        return NULL;
    return PyBytes_FromStringAndSize((const char *)self->starts, self->count * (Py_ssize_t)sizeof(uint32_t));
}

static PyObject *run_times(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    open_run *self = (open_run *)object;
    Py_ssize_t count = self->times == NULL ? 0 : self->count;
    return PyBytes_FromStringAndSize((const char *)self->times, count * (Py_ssize_t)sizeof(int64_t));
}

static void run_dealloc(PyObject *object)
{
    open_run *self = (open_run *)object;
    PyTypeObject *type = Py_TYPE(object);
    run_clear(&self->run);
    free(self->times);
    Py_DECREF(self->buffer);
    Py_DECREF(self->each);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef run_methods[] = {
    {"put", run_put, METH_O, NULL},
    {"end", run_end, METH_NOARGS, NULL},
    {"times", run_times, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef run_members[] = {
    {"count", T_PYSSIZET, offsetof(open_run, count), READONLY, NULL},
    {"is_marked", T_INT, offsetof(open_run, run) + offsetof(run, is_marked), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot run_slots[] = {
    {Py_tp_new, run_new},
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_methods, run_methods},
    {Py_tp_members, run_members},
    {0, NULL},
};

static PyType_Spec run_spec = {
    .name = "cometmq.native._accelerator.OpenRun",
    .basicsize = sizeof(open_run),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = run_slots,
};

int run_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &run_spec, NULL);
    if (type == NULL)
        return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

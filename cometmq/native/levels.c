/* How far a log is appended, wanted and flushed, and syncing it without the GIL: cometmq/store/log/levels.py.
 *
 * The appending thread stores a position, then its time; the syncing one loads in the other order. So a time is never
 * paired with the position of an older record, and what was written before a position was stored is in the file when
 * the sync that covers it begins. All loads and stores are sequentially consistent. */

#include "accelerator.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The thread that syncs waits so long for somebody who waits, before it goes back to the interpreter. Callers who were
 * just released come again a few microseconds later, and small messages that consumers wait for some milliseconds. A
 * thread that has gone back costs each of them two changes of threads and two waits for the GIL. */
#define LINGER_NS (20 * 1000 * 1000)

typedef struct {
    PyObject_HEAD
    _Atomic int64_t appended, appended_ms;
    _Atomic int64_t demanded;
    _Atomic int64_t flushed, flushed_ms;
    _Atomic uint32_t demands; /* how often somebody came; a futex */
    _Atomic int lingers;
} levels;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* What a sync that begins now brings to the disk. */
typedef struct {
    int64_t position, time_ms;
} reach;

/* Whether somebody waits for what a sync of the file would bring to the disk now, and what that is. The position is looked at
 * and taken in one: a moment later it may lie in the next file. */
static int is_wanted(levels *self, int64_t stop, reach *next)
{
    next->time_ms = self->appended_ms;
    next->position = self->appended;
    return self->demanded > self->flushed && next->position > self->flushed && next->position <= stop;
}

/* One sync, which began behind what it brings to the disk; 0 when the disk refuses. */
static int sync_once(levels *self, int fd, reach next)
{
    int result;
    do
        result = fdatasync(fd);
    while (result < 0 && errno == EINTR);
    if (result < 0)
        return 0;
    self->flushed = next.position;
    self->flushed_ms = next.time_ms;
    return 1;
}

/* Waits until somebody waits, for a moment at most; 0 when nobody does, or for what is not in this file. */
static int linger(levels *self, int64_t stop, reach *next)
{
    struct timespec moment = {0, LINGER_NS};
    uint32_t seen = self->demands;
    self->lingers = 1;
    if (self->demanded <= self->flushed)
        syscall(SYS_futex, &self->demands, FUTEX_WAIT_PRIVATE, seen, &moment, NULL, 0);
    self->lingers = 0;
    return is_wanted(self, stop, next);
}

/* Syncs while it is wanted; how often, or -1 when the disk refuses. */
static long sync_all(levels *self, int fd, int64_t stop, int write_fd)
{
    long count = 0;
    reach next;
    for (; is_wanted(self, stop, &next) || (count && linger(self, stop, &next)); count++) {
        int64_t begun_ns = now_ns();
        if (!sync_once(self, fd, next))
            return -1;
        int64_t spent_ns = now_ns() - begun_ns;
        if (write(write_fd, &spent_ns, sizeof spent_ns) < 0)
            continue; /* it is full: who listens has been woken long ago */
    }
    return count;
}

static PyObject *levels_sync(PyObject *object, PyObject *arguments)
{
    int fd, write_fd;
    long long stop;
    if (!PyArg_ParseTuple(arguments, "iLi:sync", &fd, &stop, &write_fd))
        return NULL;
    long count;
    int error;
    Py_BEGIN_ALLOW_THREADS
    count = sync_all((levels *)object, fd, stop, write_fd);
    error = errno;
    Py_END_ALLOW_THREADS
    if (count < 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromLong(count);
}

static PyObject *levels_append_to(PyObject *object, PyObject *arguments)
{
    levels *self = (levels *)object;
    long long position, time_ms;
    if (!PyArg_ParseTuple(arguments, "LL:append_to", &position, &time_ms))
        return NULL;
    self->appended = position;
    self->appended_ms = time_ms;
    Py_RETURN_NONE;
}

static PyObject *levels_demand(PyObject *object, PyObject *position)
{
    long long value = PyLong_AsLongLong(position);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    levels *self = (levels *)object;
    self->demanded = value;
    self->demands++;
    if (self->lingers)
        syscall(SYS_futex, &self->demands, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    Py_RETURN_NONE;
}

static PyObject *levels_flush_to(PyObject *object, PyObject *arguments)
{
    levels *self = (levels *)object;
    long long position, time_ms;
    if (!PyArg_ParseTuple(arguments, "LL:flush_to", &position, &time_ms))
        return NULL;
    self->flushed = position;
    self->flushed_ms = time_ms;
    Py_RETURN_NONE;
}

static PyObject *levels_flushed(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    levels *self = (levels *)object;
    int64_t time_ms = self->flushed_ms, position = self->flushed;
    return Py_BuildValue("LL", (long long)position, (long long)time_ms);
}

static PyMethodDef levels_methods[] = {
    {"append_to", levels_append_to, METH_VARARGS, NULL},
    {"demand", levels_demand, METH_O, NULL},
    {"flush_to", levels_flush_to, METH_VARARGS, NULL},
    {"flushed", levels_flushed, METH_NOARGS, NULL},
    {"sync", levels_sync, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot levels_slots[] = {
    {Py_tp_methods, levels_methods},
    {0, NULL},
};

static PyType_Spec levels_spec = {
    .name = "cometmq.native._accelerator.SharedOffsets",
    .basicsize = sizeof(levels),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = levels_slots,
};

int levels_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &levels_spec, NULL);
    if (type == NULL)
        return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

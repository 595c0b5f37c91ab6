/* A received message, whose fields are read from its record when they are looked at: cometmq/client/received.py, which
 * also adds what is not hot.
 *
 * The garbage collector does not track it: it refers to bytes, texts and what the consumer shares among its messages,
 * never back to itself. It has its own copy of the record, so a message that is kept keeps nothing that came with it. The
 * body is an object of its own, because nearly every listener wants it: it is copied once. */

#include "received.h"

#include "bytes.h"
#include "record.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

typedef struct {
    PyObject_VAR_HEAD
    PyObject *queue, *shown_name;
    PyObject *stored_body; /* bytes */
    PyObject *body;        /* as it was sent; NULL until it is decompressed */
    PyObject *properties;  /* NULL until they are set */
    int attempt;
    uint32_t head_bytes;
    uint8_t parts[]; /* of the record: the fields before the body, then what is behind it */
} received;

static PyTypeObject *received_type;

static received *new_received(PyTypeObject *type, const record *found, PyObject *queue, PyObject *shown_name)
{
    size_t head_bytes = (size_t)(found->body.start - found->start);
    size_t rest_bytes = found->size - head_bytes - found->body.length;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    received *self = (received *)allocate(type, (Py_ssize_t)(head_bytes + rest_bytes));
    if (self == NULL)
        return NULL;
    self->stored_body = PyBytes_FromStringAndSize((const char *)found->body.start, (Py_ssize_t)found->body.length);
    if (self->stored_body == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    if (!(found->sys_flag & COMPRESSED))
        self->body = Py_NewRef(self->stored_body);
    self->queue = Py_NewRef(queue);
    self->shown_name = Py_NewRef(shown_name);
    self->attempt = 1;
    self->head_bytes = (uint32_t)head_bytes;
    memcpy(self->parts, found->start, head_bytes);
    memcpy(self->parts + head_bytes, found->body.start + found->body.length, rest_bytes);
    return self;
}

static void received_dealloc(PyObject *object)
{
    received *self = (received *)object;
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(self->queue);
    Py_XDECREF(self->shown_name);
    Py_XDECREF(self->stored_body);
    Py_XDECREF(self->body);
    Py_XDECREF(self->properties);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *received_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"raw", "queue", "shown_name", NULL};
    Py_buffer raw;
    PyObject *queue, *shown_name = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "y*O|O", names, &raw, &queue, &shown_name))
        return NULL;
    record found;
    PyObject *self = NULL;
    if (record_at(raw.buf, (size_t)raw.len, &found) && found.size == (size_t)raw.len)
        self = (PyObject *)new_received(type, &found, queue, shown_name);
    else
        PyErr_SetString(PyExc_ValueError, "not one whole record");
    PyBuffer_Release(&raw);
    return self;
}

static PyObject *run_of(PyTypeObject *type, span buffer, PyObject *queue, PyObject *shown_name)
{
    PyObject *list = PyList_New(0);
    size_t at = 0;
    record found;
    while (list != NULL && record_at(buffer.start + at, buffer.length - at, &found)) {
        PyObject *one = (PyObject *)new_received(type, &found, queue, shown_name);
        if (one == NULL || PyList_Append(list, one) < 0)
            Py_CLEAR(list);
        Py_XDECREF(one);
        at += found.size;
    }
    return list == NULL ? NULL : Py_BuildValue("nN", (Py_ssize_t)at, list);
}

static PyObject *received_decode_run(PyObject *type, PyObject *arguments)
{
    Py_buffer buffer;
    PyObject *queue, *shown_name;
    if (!PyArg_ParseTuple(arguments, "y*OO:_decode_run", &buffer, &queue, &shown_name))
        return NULL;
    PyObject *result = run_of((PyTypeObject *)type, span_of(&buffer), queue, shown_name);
    PyBuffer_Release(&buffer);
    return result;
}

/* --- fields ------------------------------------------------------------------------------------------------------- */

static PyObject *int32_field(PyObject *object, void *at)
{
    return PyLong_FromLong((int32_t)load32(((received *)object)->parts + (uintptr_t)at));
}

static PyObject *int64_field(PyObject *object, void *at)
{
    return PyLong_FromLongLong((int64_t)load64(((received *)object)->parts + (uintptr_t)at));
}

/* The fixed fields end with these; the store host, before the reconsume times, has 8 or 20 bytes. */
#define TAIL_BYTES (4 + 8 + 4)

static int32_t reconsume_times_of(const received *self)
{
    return (int32_t)load32(self->parts + self->head_bytes - TAIL_BYTES);
}

static PyObject *reconsume_times(PyObject *object, void *nothing)
{
    (void)nothing;
    return PyLong_FromLong(reconsume_times_of((received *)object));
}

static PyObject *store_time(PyObject *object, void *nothing)
{
    (void)nothing;
    received *self = (received *)object;
    size_t born_host_bytes = load32(self->parts + AT_SYS_FLAG) & BORN_HOST_V6 ? 20 : 8;
    return PyLong_FromLongLong((int64_t)load64(self->parts + AT_BORN_HOST + born_host_bytes));
}

static span properties_of(const received *self)
{
    const uint8_t *topic = self->parts + self->head_bytes;
    const uint8_t *properties = topic + 1 + topic[0];
    return (span){properties + 2, load16(properties)};
}

int is_received(PyObject *object)
{
    return Py_TYPE(object) == received_type;
}

span received_properties(PyObject *object)
{
    return properties_of((received *)object);
}

PyObject *received_queue(PyObject *object)
{
    return ((received *)object)->queue;
}

long received_tries_before(PyObject *object)
{
    const received *self = (received *)object;
    return (long)reconsume_times_of(self) + self->attempt - 1;
}

static PyObject *raw_properties(PyObject *object, void *nothing)
{
    (void)nothing;
    span properties = properties_of((received *)object);
    return PyBytes_FromStringAndSize((const char *)properties.start, (Py_ssize_t)properties.length);
}

/* The tag: the value of the last TAGS. When that is empty, an earlier one may count: Python finds it. */
static PyObject *tag(PyObject *object, void *nothing)
{
    (void)nothing;
    span all = properties_of((received *)object);
    size_t at = all.length; /* behind the pair that is looked at, from the last one on */
    for (;;) {
        size_t begin = at;
        while (begin > 0 && all.start[begin - 1] != PAIR_SEPARATOR)
            begin--;
        span pair = {all.start + begin, at - begin};
        if (starts_with(pair, "TAGS\x01", 5)) {
            if (pair.length == 5)
                return PyObject_CallMethod(object, "_plain_tag", NULL);
            return PyUnicode_DecodeUTF8((const char *)pair.start + 5, (Py_ssize_t)pair.length - 5, "replace");
        }
        if (begin == 0)
            return PyUnicode_FromStringAndSize(NULL, 0);
        at = begin - 1;
    }
}

static PyObject *raw(PyObject *object, void *nothing)
{
    (void)nothing;
    received *self = (received *)object;
    const char *parts = (const char *)self->parts, *body = PyBytes_AsString(self->stored_body);
    size_t head_bytes = self->head_bytes, body_bytes = (size_t)PyBytes_Size(self->stored_body);
    size_t size = load32(self->parts + AT_SIZE);
    PyObject *joined = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (joined == NULL)
        return NULL;
    char *at = PyBytes_AsString(joined);
    memcpy(at, parts, head_bytes);
    memcpy(at + head_bytes, body, body_bytes);
    memcpy(at + head_bytes + body_bytes, parts + head_bytes, size - head_bytes - body_bytes);
    return joined;
}

static PyObject *body(PyObject *object, void *nothing)
{
    (void)nothing;
    received *self = (received *)object;
    if (self->body == NULL) {
        PyObject *plain = PyObject_CallMethod(object, "_decompressed", NULL);
        if (self->body != NULL) /* by another thread meanwhile */
            Py_XDECREF(plain);
        else
            self->body = plain;
    }
    return Py_XNewRef(self->body);
}

static PyGetSetDef received_fields[] = {
    {"size", int32_field, NULL, NULL, (void *)AT_SIZE},
    {"flag", int32_field, NULL, NULL, (void *)AT_FLAG},
    {"queue_offset", int64_field, NULL, NULL, (void *)AT_QUEUE_OFFSET},
    {"log_offset", int64_field, NULL, NULL, (void *)AT_LOG_OFFSET},
    {"sys_flag", int32_field, NULL, NULL, (void *)AT_SYS_FLAG},
    {"born_time_ms", int64_field, NULL, NULL, (void *)AT_BORN_TIME},
    {"store_time_ms", store_time, NULL, NULL, NULL},
    {"reconsume_times", reconsume_times, NULL, NULL, NULL},
    {"raw_properties", raw_properties, NULL, NULL, NULL},
    {"tag", tag, NULL, NULL, NULL},
    {"raw", raw, NULL, NULL, NULL},
    {"body", body, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef received_members[] = {
    {"queue", T_OBJECT, offsetof(received, queue), 0, NULL},
    {"stored_body", T_OBJECT, offsetof(received, stored_body), READONLY, NULL},
    {"attempt", T_INT, offsetof(received, attempt), 0, NULL},
    {"_properties", T_OBJECT, offsetof(received, properties), 0, NULL},
    {"_shown_name", T_OBJECT, offsetof(received, shown_name), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef received_methods[] = {
    {"_decode_run", received_decode_run, METH_VARARGS | METH_CLASS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot received_slots[] = {
    {Py_tp_new, received_new},
    {Py_tp_dealloc, received_dealloc},
    {Py_tp_getset, received_fields},
    {Py_tp_members, received_members},
    {Py_tp_methods, received_methods},
    {0, NULL},
};

static PyType_Spec received_spec = {
    .name = "cometmq.client.received.ReceivedMessage",
    .basicsize = offsetof(received, parts),
    .itemsize = 1,
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = received_slots,
};

int received_add(PyObject *module)
{
    received_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &received_spec, NULL);
    return received_type == NULL ? -1 : PyModule_AddType(module, received_type);
}

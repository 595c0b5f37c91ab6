/* Records as cometmq.format.record.Record: a tuple of the fields before the body, then body, topic, properties. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <string.h>

#define FIELDS 18

static PyObject *int32_at(const uint8_t *at)
{
    return PyLong_FromLong((int32_t)load32(at));
}

static PyObject *int64_at(const uint8_t *at)
{
    return PyLong_FromLongLong((int64_t)load64(at));
}

static PyObject *bytes_of(const uint8_t *start, size_t length)
{
    return PyBytes_FromStringAndSize((const char *)start, (Py_ssize_t)length);
}

/* The text of the topic, made once for a run of records of one topic. */
static PyObject *topic_text(span topic, span *recent, PyObject **text)
{
    if (*text == NULL || !is_same(topic, *recent)) {
        PyObject *decoded = PyUnicode_DecodeUTF8((const char *)topic.start, (Py_ssize_t)topic.length, "replace");
        if (decoded == NULL)
            return NULL;
        Py_XDECREF(*text);
        *text = decoded;
        *recent = topic;
    }
    return Py_NewRef(*text);
}

/* Puts the fields into a tuple that has none yet; -1 with an exception set. */
static int fill(PyObject *tuple, const record *found, PyObject *topic)
{
    const uint8_t *start = found->start, *store_host = found->store_time + 8;
    PyObject *fields[FIELDS] = {
        int32_at(start + AT_SIZE),
        int32_at(start + AT_MAGIC),
        int32_at(start + AT_BODY_CRC),
        int32_at(start + AT_QUEUE_ID),
        int32_at(start + AT_FLAG),
        int64_at(start + AT_QUEUE_OFFSET),
        int64_at(start + AT_LOG_OFFSET),
        int32_at(start + AT_SYS_FLAG),
        int64_at(start + AT_BORN_TIME),
        bytes_of(start + AT_BORN_HOST, found->born_host_bytes),
        int64_at(found->store_time),
        bytes_of(store_host, found->store_host_bytes),
        int32_at(found->reconsume_times),
        int64_at(found->reconsume_times + 4),
        int32_at(found->reconsume_times + 4 + 8),
        bytes_of(found->body.start, found->body.length),
        topic,
        bytes_of(found->properties.start, found->properties.length),
    };
    int result = 0;
    for (int at = 0; at < FIELDS; at++)
        if (fields[at] == NULL || PyTuple_SetItem(tuple, at, fields[at]) < 0)
            result = -1;
    return result;
}

static int append_record(PyObject *list, PyTypeObject *type, const record *found, PyObject *topic)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *tuple = topic == NULL ? NULL : allocate(type, FIELDS);
    if (tuple == NULL) {
        Py_XDECREF(topic);
        return -1;
    }
    int result = fill(tuple, found, topic) < 0 ? -1 : PyList_Append(list, tuple);
    Py_DECREF(tuple);
    return result;
}

static PyObject *decoded(span buffer, Py_ssize_t at, Py_ssize_t stop, PyTypeObject *type)
{
    PyObject *list = PyList_New(0), *text = NULL;
    span recent = {buffer.start, 0};
    record found;
    while (list != NULL && at < stop && record_at(buffer.start + at, buffer.length - (size_t)at, &found)) {
        if (append_record(list, type, &found, topic_text(found.topic, &recent, &text)) < 0)
            Py_CLEAR(list);
        at += (Py_ssize_t)found.size;
    }
    Py_XDECREF(text);
    return list == NULL ? NULL : Py_BuildValue("nN", at, list);
}

PyObject *accelerator_decode(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer buffer;
    Py_ssize_t at, stop;
    PyObject *type;
    if (!PyArg_ParseTuple(arguments, "y*nnO:decode", &buffer, &at, &stop, &type))
        return NULL;
    PyObject *result = NULL;
    if (at < 0 || at > buffer.len || stop > buffer.len)
        PyErr_SetString(PyExc_ValueError, "decode: a place outside the buffer");
    else if (!PyType_Check(type) || !PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type))
        PyErr_SetString(PyExc_TypeError, "decode: records are tuples");
    else
        result = decoded(span_of(&buffer), at, stop, (PyTypeObject *)type);
    PyBuffer_Release(&buffer);
    return result;
}

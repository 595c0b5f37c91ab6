/* A record as the SDK sends it: cometmq/client/encoder.py. */

#include "accelerator.h"

#include "bytes.h"
#include "crc32.h"
#include "record.h"

#include <string.h>

#define ARGUMENTS 7
#define COUNTER_DIGITS 8

/* Writes the record, whose bytes are zero so far where the broker fills something in. */
static void write_record(uint8_t *to, size_t size, uint32_t queue_id, uint32_t flag, uint32_t sys_flag,
                         uint64_t born_time, span body, span middle, uint32_t counter)
{
    size_t head = size - body.length - middle.length - COUNTER_DIGITS - 1;
    memset(to, 0, head);
    store32(to + AT_SIZE, (uint32_t)size);
    store32(to + AT_MAGIC, MAGIC_V1);
    store32(to + AT_BODY_CRC, crc32_of(body.start, body.length) & BODY_CRC_MASK);
    store32(to + AT_QUEUE_ID, queue_id);
    store32(to + AT_FLAG, flag);
    store32(to + AT_SYS_FLAG, sys_flag);
    store64(to + AT_BORN_TIME, born_time);
    store32(to + head - 4, (uint32_t)body.length);
    memcpy(to + head, body.start, body.length);
    memcpy(to + head + body.length, middle.start, middle.length);
    uint8_t *digits = to + size - COUNTER_DIGITS - 1;
    for (int at = 0; at < COUNTER_DIGITS; at++)
        digits[at] = (uint8_t)"0123456789ABCDEF"[counter >> (28 - 4 * at) & 0xf];
    digits[COUNTER_DIGITS] = 2; /* behind the last property */
}

static int is_bytes(PyObject *object, span *content)
{
    char *start;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(object, &start, &length) < 0)
        return 0;
    *content = (span){(const uint8_t *)start, (size_t)length};
    return 1;
}

PyObject *accelerator_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    span body, middle;
    if (count != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "encode takes %d arguments, not %zd", ARGUMENTS, count);
    long long queue_id = PyLong_AsLongLong(arguments[0]);
    long long flag = PyLong_AsLongLong(arguments[1]);
    long long sys_flag = PyLong_AsLongLong(arguments[2]);
    long long born_time = PyLong_AsLongLong(arguments[3]);
    long long counter = PyLong_AsLongLong(arguments[6]);
    if (PyErr_Occurred() || !is_bytes(arguments[4], &body) || !is_bytes(arguments[5], &middle))
        return NULL;
    size_t hosts = (sys_flag & BORN_HOST_V6 ? 12 : 0) + (sys_flag & STORE_HOST_V6 ? 12 : 0);
    size_t rest = RECORD_BYTES_MIN - 3 + hosts + COUNTER_DIGITS + 1; /* the middle has the two lengths */
    if (queue_id < INT32_MIN || queue_id > INT32_MAX || flag < INT32_MIN || flag > INT32_MAX
        || (sys_flag & ~(COMPRESSION | HOSTS_V6)) || counter < 0 || counter > UINT32_MAX || body.length > INT32_MAX - rest
        || middle.length > INT32_MAX - rest - body.length) {
        PyErr_SetString(PyExc_ValueError, "encode: a field of the record does not fit");
        return NULL;
    }
    size_t size = rest + body.length + middle.length;
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (result == NULL)
        return NULL;
    uint8_t *to = (uint8_t *)PyBytes_AsString(result);
    BEGIN_WORK(size)
    write_record(to, size, (uint32_t)queue_id, (uint32_t)flag, (uint32_t)sys_flag, (uint64_t)born_time, body, middle,
                 (uint32_t)counter);
    END_WORK
    return result;
}

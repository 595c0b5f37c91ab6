/* Records as the SDK sends them: cometmq/client/encoder.py. */

#include "accelerator.h"

#include "bytes.h"
#include "crc32.h"
#include "encode.h"
#include "message.h"
#include "record.h"

#include <string.h>

#define ARGUMENTS 8
#define COUNTER_DIGITS 8
#define BUFFER_BYTES_MAX INT32_MAX /* of a buffer that a record is appended to */

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

size_t bytes_beside(uint32_t sys_flag)
{
    size_t hosts = (sys_flag & BORN_HOST_V6 ? 12 : 0) + (sys_flag & STORE_HOST_V6 ? 12 : 0);
    return RECORD_BYTES_MIN - 3 + hosts + COUNTER_DIGITS + 1;
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

/* Makes room at the end of a bytearray. It would grow by an eighth at a time, and a batch be copied eight times while
 * messages are added: its room doubles instead. */
static int grow(PyObject *buffer, Py_ssize_t at, size_t size)
{
    Py_ssize_t end = at + (Py_ssize_t)size;
    int is_doubled = (at ^ end) > at; /* the end has a higher bit */
    if (is_doubled && PyByteArray_Resize(buffer, 2 * end) < 0)
        return 0;
    return PyByteArray_Resize(buffer, end) == 0;
}

PyObject *accelerator_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    (void)module;
    span body, middle;
    if (count != ARGUMENTS)
        return PyErr_Format(PyExc_TypeError, "encode takes %d arguments, not %zd", ARGUMENTS, count);
    PyObject *buffer = arguments[0];
    long long queue_id = PyLong_AsLongLong(arguments[1]);
    long long flag = PyLong_AsLongLong(arguments[2]);
    long long sys_flag = PyLong_AsLongLong(arguments[3]);
    long long born_time = PyLong_AsLongLong(arguments[4]);
    long long counter = PyLong_AsLongLong(arguments[7]);
    if (PyErr_Occurred() || !is_bytes(arguments[5], &body) || !is_bytes(arguments[6], &middle))
        return NULL;
    if (!PyByteArray_Check(buffer))
        return PyErr_Format(PyExc_TypeError, "encode: the buffer is no bytearray");
    size_t rest = bytes_beside((uint32_t)sys_flag);
    if (queue_id < INT32_MIN || queue_id > INT32_MAX || flag < INT32_MIN || flag > INT32_MAX
        || (sys_flag & ~(COMPRESSION | HOSTS_V6)) || counter < 0 || counter > UINT32_MAX || body.length > INT32_MAX - rest
        || middle.length > INT32_MAX - rest - body.length) {
        PyErr_SetString(PyExc_ValueError, "encode: a field of the record does not fit");
        return NULL;
    }
    size_t size = rest + body.length + middle.length;
    Py_ssize_t at = PyByteArray_Size(buffer);
    if (at > BUFFER_BYTES_MAX) {
        PyErr_SetString(PyExc_ValueError, "encode: the buffer is full");
        return NULL;
    }
    if (!grow(buffer, at, size))
        return NULL;
    Py_buffer pinned; /* nobody resizes it while the GIL is released */
    if (PyObject_GetBuffer(buffer, &pinned, PyBUF_WRITABLE) < 0)
        return NULL;
    BEGIN_WORK(size)
    write_record((uint8_t *)pinned.buf + at, size, (uint32_t)queue_id, (uint32_t)flag, (uint32_t)sys_flag,
                 (uint64_t)born_time, body, middle, (uint32_t)counter);
    END_WORK
    PyBuffer_Release(&pinned);
    Py_RETURN_NONE;
}

/* --- many at once --------------------------------------------------------------------------------------------- */

static int is_empty_text(PyObject *object)
{
    return PyUnicode_CheckExact(object) && PyUnicode_GetLength(object) == 0;
}

/* Whether a message has only what a run knows: topic, body and a tag that was met before. Else Python looks at it. */
static int is_usual(PyObject *const *fields, const run *run)
{
    return fields[FLAG] == zero() && fields[DELAY_LEVEL] == zero() && fields[QUEUE] == Py_None
        && fields[DELIVER_AT_MS] == zero() && fields[DELAY_MS] == zero()
        && fields[WAIT_STORE] == Py_True && is_empty_text(fields[SHARDING_KEY])
        && PyTuple_CheckExact(fields[KEYS]) && PyTuple_Size(fields[KEYS]) == 0
        && PyDict_CheckExact(fields[PROPERTIES]) && PyDict_Size(fields[PROPERTIES]) == 0
        && PyBytes_CheckExact(fields[BODY]) && PyBytes_Size(fields[BODY]) <= run->body_max
        && PyUnicode_CheckExact(fields[TAG])
        && (fields[TOPIC] == run->topic
            || (PyUnicode_CheckExact(fields[TOPIC]) && PyUnicode_Compare(fields[TOPIC], run->topic) == 0));
}

/* Finds the middle of messages with this tag; 0 when there is none yet. */
static int find_middle(run *run, PyObject *tag)
{
    if (tag == run->tag)
        return 1;
    PyObject *middle = PyDict_GetItemWithError(run->middles, tag);
    if (middle == NULL || !PyBytes_CheckExact(middle))
        return 0;
    Py_INCREF(tag);
    Py_XDECREF(run->tag);
    run->tag = tag;
    Py_INCREF(middle);
    Py_XDECREF(run->middle);
    run->middle = middle;
    return 1;
}

/* As append_message, of a message that has all of its fields. */
static size_t append_fields(PyObject *const *fields, run *run, PyObject *buffer, Py_ssize_t bytes_max, int for_two,
                            uint32_t counter)
{
    span body, middle;
    if (!is_usual(fields, run) || !find_middle(run, fields[TAG]) || !is_bytes(fields[BODY], &body)
        || !is_bytes(run->middle, &middle))
        return 0;
    Py_ssize_t at = PyByteArray_Size(buffer);
    size_t size = run->rest + body.length + middle.length;
    if (middle.length > INT32_MAX || at > bytes_max || size << for_two > (size_t)(bytes_max - at)
        || !grow(buffer, at, size))
        return 0;
    write_record((uint8_t *)PyByteArray_AsString(buffer) + at, size, run->queue_id, 0, run->sys_flag, run->born_time,
                 body, middle, counter);
    return size;
}

size_t append_message(PyObject *object, run *run, PyObject *buffer, Py_ssize_t bytes_max, int for_two, uint32_t counter)
{
    if (!is_message(object))
        return 0;
    PyObject *const *fields = ((message *)object)->fields;
    for (int field = 0; field < FIELDS; field++)
        if (fields[field] == NULL) /* somebody deleted it: Python says what is wrong */
            return 0;
    return append_fields(fields, run, buffer, bytes_max, for_two, counter);
}

int is_run_allowed(Py_ssize_t count, Py_ssize_t bytes_max, Py_ssize_t body_max, int host_flags, long long counter)
{
    return count >= 0 && count <= RUN_COUNT_MAX && bytes_max >= 0 && bytes_max <= UINT32_MAX
        && body_max <= RELEASE_BYTES_MIN && !(host_flags & ~(int)HOSTS_V6) && counter >= 0
        && counter <= UINT32_MAX - count;
}

/* Appends messages from `at` on, at most `count`; how many, with the place of each in `starts`. */
static Py_ssize_t append_run(PyObject *messages, Py_ssize_t at, Py_ssize_t count, run *run, PyObject *buffer,
                             Py_ssize_t bytes_max, uint32_t counter, uint32_t *starts)
{
    Py_ssize_t done = 0;
    while (done < count && at + done < PyList_Size(messages)) {
        starts[done] = (uint32_t)PyByteArray_Size(buffer);
        PyObject *message = PyList_GetItem(messages, at + done);
        if (!append_message(message, run, buffer, bytes_max, 0, counter + (uint32_t)done))
            break;
        done++;
    }
    return done;
}

PyObject *accelerator_encode_run(PyObject *module, PyObject *arguments)
{
    (void)module;
    PyObject *buffer, *messages, *topic, *middles;
    Py_ssize_t at, count, bytes_max, body_max;
    int queue_id, host_flags;
    long long born_time, counter;
    if (!PyArg_ParseTuple(arguments, "O!O!nnUO!nniiLL:encode_run", &PyByteArray_Type, &buffer, &PyList_Type, &messages,
                          &at, &count, &topic, &PyDict_Type, &middles, &bytes_max, &body_max,
                          &queue_id, &host_flags, &born_time, &counter))
        return NULL;
    if (at < 0 || !is_run_allowed(count, bytes_max, body_max, host_flags, counter))
        return PyErr_Format(PyExc_ValueError, "encode_run: a number is out of range");
    run run = {.topic = topic, .middles = middles, .queue_id = (uint32_t)queue_id,
               .sys_flag = (uint32_t)host_flags, .born_time = (uint64_t)born_time, .body_max = body_max,
               .rest = bytes_beside((uint32_t)host_flags)};
    uint32_t starts[RUN_COUNT_MAX];
    Py_ssize_t size = PyByteArray_Size(buffer);
    Py_ssize_t done = append_run(messages, at, count, &run, buffer, bytes_max, (uint32_t)counter, starts);
    Py_XDECREF(run.tag);
    Py_XDECREF(run.middle);
    if (PyErr_Occurred()) {
        PyByteArray_Resize(buffer, size);
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)starts, done * (Py_ssize_t)sizeof(uint32_t));
}

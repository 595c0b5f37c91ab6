/* Records as the SDK sends them: cometmq/client/sending/encoder.py. */

#include "accelerator.h"

#include "bytes.h"
#include "crc32.h"
#include "encode.h"
#include "message.h"
#include "record.h"

#include <string.h>

#define ARGUMENTS 8
#define COUNTER_DIGITS 8
#define PROPERTIES_BYTES_MAX 32767
#define DELAY_MS_MAX (40LL * 86400000)
#define BUFFER_BYTES_MAX INT32_MAX /* of a buffer that a record is appended to */

/* Writes the record but for its middle, which is behind the body; where it begins. */
static uint8_t *write_around(uint8_t *to, size_t size, uint32_t queue_id, uint32_t flag, uint32_t sys_flag,
                             uint64_t born_time, span body, size_t middle_bytes, uint32_t counter)
{
    size_t head = size - body.length - middle_bytes - COUNTER_DIGITS - 1;
    memset(to, 0, head); /* zeros where the broker fills something in */
    store32(to + AT_SIZE, (uint32_t)size);
    store32(to + AT_MAGIC, MAGIC_V1);
    store32(to + AT_BODY_CRC, crc32_of(body.start, body.length) & BODY_CRC_MASK);
    store32(to + AT_QUEUE_ID, queue_id);
    store32(to + AT_FLAG, flag);
    store32(to + AT_SYS_FLAG, sys_flag);
    store64(to + AT_BORN_TIME, born_time);
    store32(to + head - 4, (uint32_t)body.length);
    memcpy(to + head, body.start, body.length);
    uint8_t *digits = to + size - COUNTER_DIGITS - 1;
    for (int at = 0; at < COUNTER_DIGITS; at++)
        digits[at] = (uint8_t)"0123456789ABCDEF"[counter >> (28 - 4 * at) & 0xf];
    digits[COUNTER_DIGITS] = PAIR_SEPARATOR;
    return to + head + body.length;
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
    uint8_t *to = write_around((uint8_t *)pinned.buf + at, size, (uint32_t)queue_id, (uint32_t)flag, (uint32_t)sys_flag,
                               (uint64_t)born_time, body, middle.length, (uint32_t)counter);
    memcpy(to, middle.start, middle.length);
    END_WORK
    PyBuffer_Release(&pinned);
    Py_RETURN_NONE;
}

/* --- many at once --------------------------------------------------------------------------------------------- */

static int is_same_text(PyObject *object, PyObject *text)
{
    return object == text || (PyUnicode_CheckExact(object) && PyUnicode_Compare(object, text) == 0);
}

/* Whether a message names its time as all of the run do; which. Else Python looks at it. */
static int has_time(PyObject *const *fields, const run *run, long long *time_ms)
{
    static const long long least[] = {0, TIMER_MS_MIN, 1}, most[] = {0, TIMER_MS_MAX, DELAY_MS_MAX};
    int overflow;
    PyObject *named = fields[run->timer == TIMER_AFTER ? DELAY_MS : DELIVER_AT_MS];
    PyObject *other = fields[run->timer == TIMER_AFTER ? DELIVER_AT_MS : DELAY_MS];
    long nothing;
    if (!PyLong_CheckExact(named) || !is_number(other, &nothing) || nothing != 0)
        return 0;
    *time_ms = PyLong_AsLongLongAndOverflow(named, &overflow);
    return !overflow && *time_ms >= least[run->timer] && *time_ms <= most[run->timer];
}

/* Whether a message is of the run, as far as one can see without its keys and properties. Else Python looks at it. */
static int is_usual(PyObject *const *fields, const run *run, long *flag, long long *time_ms)
{
    long delay_level;
    return is_number(fields[FLAG], flag) && is_number(fields[DELAY_LEVEL], &delay_level)
        && has_time(fields, run, time_ms) && delay_level == run->delay_level && fields[WAIT_STORE] == run->wait_store && fields[QUEUE] == Py_None
        && PyTuple_CheckExact(fields[KEYS]) && PyDict_CheckExact(fields[PROPERTIES]) && PyBytes_CheckExact(fields[BODY])
        && PyBytes_Size(fields[BODY]) <= run->body_max && PyUnicode_CheckExact(fields[TAG])
        && PyUnicode_CheckExact(fields[SHARDING_KEY])
        && (PyUnicode_GetLength(fields[SHARDING_KEY]) > 0) == run->is_keyed && is_same_text(fields[TOPIC], run->topic);
}

/* --- properties of the application: encode_application_properties ------------------------------------------------ */

/* Writes bytes at the place, and moves it; only moves it while it is counted how many there are (`bytes` NULL). */
typedef struct {
    uint8_t *bytes;
    size_t length;
} writer;

static void put_bytes(writer *to, const void *bytes, size_t length)
{
    if (to->bytes != NULL)
        memcpy(to->bytes + to->length, bytes, length);
    to->length += length;
}

static void put_byte(writer *to, uint8_t byte)
{
    put_bytes(to, &byte, 1);
}

/* A text that a property can have; 0 for another one, for Python to look at. */
static int is_text(PyObject *object, span *text)
{
    Py_ssize_t length;
    const char *start = PyUnicode_CheckExact(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    if (start == NULL) {
        PyErr_Clear(); /* half of a pair of surrogates */
        return 0;
    }
    *text = (span){(const uint8_t *)start, (size_t)length};
    for (Py_ssize_t at = 0; at < length; at++)
        if (text->start[at] <= PAIR_SEPARATOR) /* or NUL */
            return 0;
    return length > 0;
}

/* Whether a name is the application's. Names that begin with _ are left to Python: most of them are reserved. */
static int is_own_name(span name, PyObject *reserved)
{
    uint8_t first = name.start[0];
    span list;
    if (first == '_')
        return 0;
    return !((first >= 'A' && first <= 'Z') || first == '1') || (is_bytes(reserved, &list) && !is_listed(list, name));
}

static int put_keys(writer *to, PyObject *keys)
{
    put_bytes(to, "KEYS\x01", 5);
    for (Py_ssize_t at = 0; at < PyTuple_Size(keys); at++) {
        span key;
        if (!is_text(PyTuple_GetItem(keys, at), &key) || has_blank(key))
            return 0;
        if (at > 0)
            put_byte(to, ' ');
        put_bytes(to, key.start, key.length);
    }
    put_byte(to, PAIR_SEPARATOR);
    return 1;
}

/* What stands between the prefix and the tag; 0 when Python has to look at it. */
static int put_properties(writer *to, PyObject *const *fields, run *run)
{
    Py_ssize_t at = 0;
    PyObject *name, *value;
    span text;
    while (PyDict_Next(fields[PROPERTIES], &at, &name, &value)) {
        if (!is_text(name, &text) || !is_own_name(text, run->reserved))
            return 0;
        run->is_marked |= to->bytes != NULL && text.length == 8 && memcmp(text.start, "TRACE_ON", 8) == 0;
        put_bytes(to, text.start, text.length);
        put_byte(to, NAME_SEPARATOR);
        if (!is_text(value, &text))
            return 0;
        put_bytes(to, text.start, text.length);
        put_byte(to, PAIR_SEPARATOR);
    }
    if (PyTuple_Size(fields[KEYS]) > 0 && !put_keys(to, fields[KEYS]))
        return 0;
    if (PyUnicode_GetLength(fields[SHARDING_KEY]) > 0) {
        if (!is_text(fields[SHARDING_KEY], &text))
            return 0;
        put_bytes(to, "__SHARDINGKEY\x01", 14);
        put_bytes(to, text.start, text.length);
        put_byte(to, PAIR_SEPARATOR);
    }
    return 1;
}

/* Finds the middle of messages with this tag and nothing else; 0 when there is none yet. */
static int find_middle(run *run, PyObject *tag)
{
    if (tag == run->tag)
        return 1;
    PyObject *middle = PyDict_GetItemWithError(run->middles, tag);
    if (middle == NULL || !PyBytes_CheckExact(middle))
        return 0;
    PyObject *before[] = {run->tag, run->middle};
    run->tag = Py_NewRef(tag);
    run->middle = Py_NewRef(middle);
    Py_XDECREF(before[0]);
    Py_XDECREF(before[1]);
    return 1;
}

/* As append_message, of a message that has all of its fields. */
static size_t append_fields(PyObject *const *fields, run *run, PyObject *buffer, Py_ssize_t bytes_max, int for_two,
                            uint32_t counter)
{
    span body, middle;
    long flag;
    long long time_ms;
    writer own = {NULL, 0};
    if (!is_usual(fields, run, &flag, &time_ms) || !find_middle(run, fields[TAG]) || !is_bytes(fields[BODY], &body)
        || !is_bytes(run->middle, &middle) || middle.length > INT32_MAX || !put_properties(&own, fields, run))
        return 0;
    size_t topic = middle.length > 0 ? 1 + (size_t)middle.start[0] : 0, split = topic + 2 + (size_t)run->prefix_bytes;
    if (topic == 0 || split > middle.length)
        return 0;
    size_t properties_bytes = load16(middle.start + topic) + own.length;
    size_t size = run->rest + body.length + middle.length + own.length;
    Py_ssize_t at = PyByteArray_Size(buffer);
    if (properties_bytes > PROPERTIES_BYTES_MAX || at > bytes_max || size << for_two > (size_t)(bytes_max - at)
        || !grow(buffer, at, size))
        return 0;
    uint8_t *to = write_around((uint8_t *)PyByteArray_AsString(buffer) + at, size, run->queue_id, (uint32_t)flag,
                               run->sys_flag, run->born_time, body, middle.length + own.length, counter);
    memcpy(to, middle.start, split);
    store16(to + topic, (uint32_t)properties_bytes);
    if (run->timer) {
        put_timer_digits(to + topic + 2, time_ms); /* they are in the prefix */
        run->time_ms = time_ms;
    }
    own = (writer){to + split, 0};
    put_properties(&own, fields, run); /* the same as before: no Python code ran */
    memcpy(to + split + own.length, middle.start + split, middle.length - split);
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

int is_run_allowed(Py_ssize_t count, Py_ssize_t bytes_max, long long counter)
{
    return count >= 0 && count <= RUN_COUNT_MAX && bytes_max >= 0 && bytes_max <= UINT32_MAX && counter >= 0
        && counter <= UINT32_MAX - count;
}

int run_begin(run *run, PyObject *form, int is_keyed, Py_ssize_t body_max, int queue_id, int host_flags,
              long long born_time)
{
    PyObject *topic, *middles, *wait_store, *reserved;
    Py_ssize_t prefix_bytes;
    long delay_level;
    int timer;
    if (!PyArg_ParseTuple(form, "UO!nlO!Si:form", &topic, &PyDict_Type, &middles, &prefix_bytes, &delay_level,
                          &PyBool_Type, &wait_store, &reserved, &timer))
        return 0;
    if (timer < 0 || timer > TIMER_AFTER || (timer && prefix_bytes < TIMER_DIGITS_END) || body_max > RELEASE_BYTES_MIN || prefix_bytes < 0 || prefix_bytes > PROPERTIES_BYTES_MAX
        || (host_flags & ~(int)HOSTS_V6)) {
        PyErr_SetString(PyExc_ValueError, "run: a number is out of range");
        return 0;
    }
    *run = (struct run){.topic = Py_NewRef(topic), .middles = Py_NewRef(middles), .wait_store = Py_NewRef(wait_store),
                        .reserved = Py_NewRef(reserved), .is_keyed = is_keyed,
                        .prefix_bytes = prefix_bytes, .delay_level = delay_level, .timer = timer, .queue_id = (uint32_t)queue_id,
                        .sys_flag = (uint32_t)host_flags, .born_time = (uint64_t)born_time, .body_max = body_max,
                        .rest = bytes_beside((uint32_t)host_flags)};
    return 1;
}

void run_clear(run *run)
{
    PyObject *owned[] = {run->topic, run->middles, run->wait_store, run->reserved, run->tag, run->middle};
    for (size_t at = 0; at < sizeof owned / sizeof *owned; at++)
        Py_XDECREF(owned[at]);
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
    PyObject *buffer, *messages, *form;
    Py_ssize_t at, count, bytes_max, body_max;
    int is_keyed, queue_id, host_flags;
    long long born_time, counter;
    run run;
    if (!PyArg_ParseTuple(arguments, "O!O!nnO!pnniiLL:encode_run", &PyByteArray_Type, &buffer, &PyList_Type, &messages,
                          &at, &count, &PyTuple_Type, &form, &is_keyed, &bytes_max, &body_max, &queue_id,
                          &host_flags, &born_time, &counter))
        return NULL;
    if (at < 0 || !is_run_allowed(count, bytes_max, counter))
        return PyErr_Format(PyExc_ValueError, "encode_run: a number is out of range");
    if (!run_begin(&run, form, is_keyed, body_max, queue_id, host_flags, born_time))
        return NULL;
    uint32_t starts[RUN_COUNT_MAX];
    Py_ssize_t size = PyByteArray_Size(buffer);
    Py_ssize_t done = append_run(messages, at, count, &run, buffer, bytes_max, (uint32_t)counter, starts);
    run_clear(&run);
    if (PyErr_Occurred()) {
        PyByteArray_Resize(buffer, size);
        return NULL;
    }
    return Py_BuildValue("y#N", (const char *)starts, done * (Py_ssize_t)sizeof(uint32_t), PyBool_FromLong(run.is_marked));
}

/* Records that the broker makes from stored ones: cometmq/format/relay_run.py. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>

#define TARGETS_MAX 1024
#define SLOTS 2048 /* a power of two above that */
#define PROPERTIES_BYTES_MAX INT16_MAX
#define TOPIC_BYTES_MAX 255
#define QUEUE_DIGITS_MAX 9
#define NOT_ASCII 0x80
#define KEPT_FLAGS (COMPRESSED | 2u | 0x700u) /* of SYSFLAG: compression, and that it has several tags */

/* --- which of the records can be taken, and for which queues they are meant --- */

typedef struct {
    span texts[TARGETS_MAX];
    uint32_t slots[SLOTS]; /* a number of a text, and 1; 0 = free */
    uint32_t count;
} target_table;

/* Where a message is meant to go, as its properties tell it from `at` on in our form; 0 for another form. */
static int target_at(span properties, size_t at_byte, span *target)
{
    static const char topic[] = "REAL_TOPIC\x01", queue[] = "\x02REAL_QID\x01";
    const uint8_t *start = properties.start + at_byte, *end = properties.start + properties.length;
    if (!starts_with((span){start, (size_t)(end - start)}, topic, sizeof topic - 1))
        return 0;
    const uint8_t *at = start + sizeof topic - 1, *first = at;
    while (at < end && *at > PAIR_SEPARATOR)
        at++;
    if (at == first || at - first > TOPIC_BYTES_MAX
        || !starts_with((span){at, (size_t)(end - at)}, queue, sizeof queue - 1))
        return 0;
    at += sizeof queue - 1;
    long queue_id;
    size_t digits = leading_number((span){at, (size_t)(end - at)}, QUEUE_DIGITS_MAX, &queue_id);
    at += digits;
    if (!digits || at == end || *at != PAIR_SEPARATOR)
        return 0;
    *target = (span){start, (size_t)(at + 1 - start)};
    return 1;
}

/* The same, of a message that waits for a level or a time. */
static int waiting_target(const record *found, span *target)
{
    span properties = found->properties;
    long level;
    size_t head = timer_due(found) >= 0 ? TIMER_DIGITS_END : level_length(properties, &level);
    return head && !says_more_of_time(properties) && head < properties.length && properties.start[head] == PAIR_SEPARATOR
        && target_at(properties, head + 1, target);
}

/* The same, of a half message. */
static int half_target(const record *found, span *target)
{
    static const char first[] = "TRAN_MSG\x01true\x02PGROUP\x01";
    span properties = found->properties;
    if (!starts_with(properties, first, sizeof first - 1))
        return 0;
    const uint8_t *group = properties.start + sizeof first - 1;
    const uint8_t *end = memchr(group, PAIR_SEPARATOR, properties.length - (sizeof first - 1));
    return end != NULL && target_at(properties, (size_t)(end + 1 - properties.start), target);
}

/* The unique id at the end of properties, in ASCII; 0 when none stands there. */
static int last_id(span properties, span *id)
{
    static const char name[] = "\x02UNIQ_KEY\x01";
    if (properties.length == 0 || properties.start[properties.length - 1] != PAIR_SEPARATOR)
        return 0;
    const uint8_t *end = properties.start + properties.length - 1, *at = end;
    for (; at > properties.start && at[-1] > PAIR_SEPARATOR; at--)
        if (at[-1] >= NOT_ASCII)
            return 0;
    if (at == end || (size_t)(at - properties.start) < sizeof name - 1
        || memcmp(at - (sizeof name - 1), name, sizeof name - 1) != 0)
        return 0;
    *id = (span){at, (size_t)(end - at)};
    return 1;
}

/* The number of a text, which is new perhaps; -1 when there is no room for it. */
static int64_t number_of(target_table *table, span text)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t at = 0; at < text.length; at++)
        hash = (hash ^ text.start[at]) * 16777619u;
    uint32_t slot = hash & (SLOTS - 1);
    for (; table->slots[slot]; slot = (slot + 1) & (SLOTS - 1))
        if (is_same(table->texts[table->slots[slot] - 1], text))
            return table->slots[slot] - 1;
    if (table->count == TARGETS_MAX)
        return -1;
    table->texts[table->count++] = text;
    table->slots[slot] = table->count;
    return table->count - 1;
}

static uint32_t number_at(const void *numbers, Py_ssize_t index)
{
    uint32_t number;
    memcpy(&number, (const uint8_t *)numbers + 4 * index, sizeof number);
    return number;
}

/* What is known of a record that another one can be made of. */
typedef struct {
    uint32_t target; /* the number of its text */
    span id;         /* of a half message */
    int64_t store_time;
} source_record;

/* A record that another one can be made of: its target and, of a half message, its id. 0: it needs a closer look. */
static int good_source(span sources, size_t place, int is_half, record *found, span *target, span *id)
{
    uint32_t code;
    span tag;
    *id = (span){NULL, 0};
    return place <= sources.length && record_at(sources.start + place, sources.length - place, found)
        && found->properties.length <= PROPERTIES_BYTES_MAX && are_framed(found->properties, &tag) && java_hash(tag, &code)
        && (is_half ? half_target(found, target) && last_id(found->properties, id) : waiting_target(found, target))
        && has_good_body(found);
}

/* Reads the records at the places, up to the first that needs a closer look; how many. */
static Py_ssize_t find_sources(span sources, const void *places, Py_ssize_t count, int are_halves, target_table *table,
                               source_record *known)
{
    Py_ssize_t taken = 0;
    for (; taken < count; taken++) {
        record found;
        span target, id;
        if (!good_source(sources, number_at(places, taken), are_halves, &found, &target, &id))
            break;
        int64_t number = number_of(table, target);
        if (number < 0)
            break;
        known[taken] = (source_record){(uint32_t)number, id, (int64_t)load64(found.store_time)};
    }
    return taken;
}

static PyObject *texts_of(const target_table *table)
{
    PyObject *texts = PyList_New(table->count);
    for (uint32_t at = 0; texts != NULL && at < table->count; at++) {
        span text = table->texts[at];
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)text.start, (Py_ssize_t)text.length);
        if (bytes == NULL || PyList_SetItem(texts, at, bytes) < 0)
            Py_CLEAR(texts);
    }
    return texts;
}

/* The number of each record's text. */
static PyObject *numbers_of(const source_record *known, Py_ssize_t count)
{
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, 4 * count);
    for (Py_ssize_t at = 0; numbers != NULL && at < count; at++)
        memcpy(PyBytes_AsString(numbers) + 4 * at, &known[at].target, sizeof known[at].target);
    return numbers;
}

static PyObject *times_of(const source_record *known, Py_ssize_t count)
{
    PyObject *times = PyBytes_FromStringAndSize(NULL, 8 * count);
    for (Py_ssize_t at = 0; times != NULL && at < count; at++)
        memcpy(PyBytes_AsString(times) + 8 * at, &known[at].store_time, sizeof known[at].store_time);
    return times;
}

static PyObject *ids_of(const source_record *known, Py_ssize_t count)
{
    PyObject *ids = PyList_New(count);
    for (Py_ssize_t at = 0; ids != NULL && at < count; at++) {
        PyObject *id = PyUnicode_FromStringAndSize((const char *)known[at].id.start, (Py_ssize_t)known[at].id.length);
        if (id == NULL || PyList_SetItem(ids, at, id) < 0)
            Py_CLEAR(ids);
    }
    return ids;
}

static PyObject *results_of(const target_table *table, const source_record *known, Py_ssize_t count, int are_halves)
{
    PyObject *texts = texts_of(table), *numbers = numbers_of(known, count), *result = NULL;
    PyObject *ids = are_halves ? ids_of(known, count) : NULL, *times = are_halves ? times_of(known, count) : NULL;
    if (PyErr_Occurred() == NULL)
        result = are_halves ? PyTuple_Pack(4, texts, numbers, ids, times) : PyTuple_Pack(2, texts, numbers);
    Py_XDECREF(texts);
    Py_XDECREF(numbers);
    Py_XDECREF(ids);
    Py_XDECREF(times);
    return result;
}

static PyObject *targets(PyObject *arguments, int are_halves)
{
    Py_buffer sources, places;
    if (!PyArg_ParseTuple(arguments, "y*y*:targets", &sources, &places))
        return NULL;
    Py_ssize_t count = places.len / 4;
    PyObject *result = NULL;
    target_table *table = calloc(1, sizeof *table);
    source_record *known = calloc((size_t)count + 1, sizeof *known);
    if (places.len % 4) {
        PyErr_SetString(PyExc_ValueError, "targets: no whole numbers");
    } else if (table == NULL || known == NULL) {
        PyErr_NoMemory();
    } else {
        BEGIN_WORK(sources.len)
        count = find_sources(span_of(&sources), places.buf, count, are_halves, table, known);
        END_WORK
        result = results_of(table, known, count, are_halves);
    }
    free(table);
    free(known);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&places);
    return result;
}

PyObject *accelerator_delivery_targets(PyObject *module, PyObject *arguments)
{
    (void)module;
    return targets(arguments, 0);
}

PyObject *accelerator_half_targets(PyObject *module, PyObject *arguments)
{
    (void)module;
    return targets(arguments, 1);
}

/* --- half messages that were sent together --- */

#define COUNTER_DIGITS 8 /* hexadecimal ones, at the end of an id */

/* The counter at the end of an id; -1 when it ends otherwise. */
static int64_t counter_of(span id)
{
    if (id.length < COUNTER_DIGITS)
        return -1;
    int64_t counter = 0;
    for (const uint8_t *at = id.start + id.length - COUNTER_DIGITS; at < id.start + id.length; at++) {
        if (*at >= '0' && *at <= '9')
            counter = counter * 16 + (*at - '0');
        else if (*at >= 'A' && *at <= 'F')
            counter = counter * 16 + (*at - 'A' + 10);
        else
            return -1;
    }
    return counter;
}

/* Reads half messages end to end, as long as they have one target, and ids that count on from `first_id`; how many.
 * There is room for the places of all that can lie there. */
static Py_ssize_t find_run(span sources, span first_id, uint8_t *places, span *target)
{
    int64_t counter = counter_of(first_id);
    Py_ssize_t count = 0;
    size_t place = 0;
    while (counter >= 0 && place < sources.length && place <= UINT32_MAX) {
        record found;
        span its, id;
        if (!good_source(sources, place, 1, &found, &its, &id) || id.length != first_id.length
            || memcmp(id.start, first_id.start, id.length - COUNTER_DIGITS) != 0 || counter_of(id) != counter + count
            || (count && !is_same(its, *target)))
            break;
        *target = its;
        uint32_t number = (uint32_t)place;
        memcpy(places + 4 * count++, &number, sizeof number);
        place += found.size;
    }
    return count;
}

PyObject *accelerator_half_run(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer sources, first_id;
    if (!PyArg_ParseTuple(arguments, "y*y*:half_run", &sources, &first_id))
        return NULL;
    PyObject *result = NULL;
    uint8_t *places = malloc(4 * (size_t)(sources.len / RECORD_BYTES_MIN + 1));
    if (places == NULL) {
        PyErr_NoMemory();
    } else {
        span target = {NULL, 0};
        Py_ssize_t count;
        BEGIN_WORK(sources.len)
        count = find_run(span_of(&sources), span_of(&first_id), places, &target);
        END_WORK
        result = Py_BuildValue("y#y#", target.length ? (const char *)target.start : "", (Py_ssize_t)target.length,
                               (const char *)places, 4 * count);
    }
    free(places);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&first_id);
    return result;
}

/* --- the new records --- */

/* A queue that gets some of them. */
typedef struct {
    span topic;
    uint32_t queue_id;
    uint64_t queue_offset; /* of its next message */
    Py_ssize_t count;
    uint8_t *unit; /* where its next one is written */
} queue;

/* What is to be done. */
typedef struct {
    span sources, store_host;
    const void *places, *chosen;
    Py_ssize_t count, queue_count;
    queue *queues;
    span *tags; /* of the sources */
    uint64_t log_offset, store_time_ms;
    uint32_t transaction_flags;
} job;

static size_t new_size(const record *source, const queue *target, const job *work)
{
    return RECORD_BYTES_MIN + (source->born_host_bytes - 8) + (work->store_host.length - 8) + source->body.length
        + target->topic.length + source->properties.length;
}

/* The source and the queue of one record; 0 when there are none. */
static int look_up(const job *work, Py_ssize_t index, record *source, queue **target)
{
    uint32_t place = number_at(work->places, index), number = number_at(work->chosen, index);
    if (number >= work->queue_count || place > work->sources.length
        || !record_at(work->sources.start + place, work->sources.length - place, source))
        return 0;
    *target = &work->queues[number];
    return 1;
}

/* Finds the tags, and counts the records of each queue; the bytes of all, or -1 when one cannot be made. */
static Py_ssize_t measure(const job *work)
{
    Py_ssize_t size = 0;
    for (Py_ssize_t index = 0; index < work->count; index++) {
        record source;
        queue *target;
        uint32_t code;
        if (!look_up(work, index, &source, &target) || !are_framed(source.properties, &work->tags[index])
            || !java_hash(work->tags[index], &code) || new_size(&source, target, work) > INT32_MAX)
            return -1;
        Py_ssize_t more = (Py_ssize_t)new_size(&source, target, work);
        if (size > PY_SSIZE_T_MAX - more)
            return -1;
        size += more;
        target->count++;
    }
    return size;
}

static uint8_t *put(uint8_t *to, const void *from, size_t length)
{
    memcpy(to, from, length);
    return to + length;
}

static uint8_t *put_record(uint8_t *to, uint64_t log_offset, const record *source, const queue *target, const job *work)
{
    const uint8_t *from = source->start;
    uint32_t flags = (source->sys_flag & (KEPT_FLAGS | BORN_HOST_V6)) | (work->store_host.length > 8 ? STORE_HOST_V6 : 0)
        | work->transaction_flags;
    memcpy(to, from, AT_BORN_HOST); /* with the magic, the CRC, the user's flag and the time of birth */
    store32(to + AT_SIZE, (uint32_t)new_size(source, target, work));
    store32(to + AT_QUEUE_ID, target->queue_id);
    store64(to + AT_QUEUE_OFFSET, target->queue_offset);
    store64(to + AT_LOG_OFFSET, log_offset);
    store32(to + AT_SYS_FLAG, flags);
    to = put(to + AT_BORN_HOST, from + AT_BORN_HOST, source->born_host_bytes);
    store64(to, work->store_time_ms);
    to = put(to + 8, work->store_host.start, work->store_host.length);
    to = put(to, source->reconsume_times, 4);
    to = put(to, from + AT_LOG_OFFSET, 8); /* where the source is */
    to = put(to, source->reconsume_times + 4 + 8, 4 + source->body.length);
    *to++ = (uint8_t)target->topic.length;
    to = put(to, target->topic.start, target->topic.length);
    return put(to, source->properties.start - 2, 2 + source->properties.length);
}

static void put_all(const job *work, uint8_t *to)
{
    uint64_t log_offset = work->log_offset;
    for (Py_ssize_t index = 0; index < work->count; index++) {
        record source;
        queue *target;
        look_up(work, index, &source, &target);
        uint8_t *end = put_record(to, log_offset, &source, target, work);
        put_unit(target->unit, log_offset, (size_t)(end - to), work->tags[index]);
        target->unit += UNIT_BYTES;
        target->queue_offset++;
        log_offset += (uint64_t)(end - to);
        to = end;
    }
}

/* Reads the queues from their tuples, which stay with the caller; -1 with an exception set. */
static int read_queues(PyObject *given, job *work)
{
    for (Py_ssize_t at = 0; at < work->queue_count; at++) {
        queue *target = &work->queues[at];
        PyObject *one = PyTuple_GetItem(given, at);
        const char *topic;
        Py_ssize_t length;
        long long queue_id, queue_offset;
        if (!PyTuple_Check(one) || !PyArg_ParseTuple(one, "y#LL:relay", &topic, &length, &queue_id, &queue_offset)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "relay: a queue is a tuple");
            return -1;
        }
        if (length < 1 || length > TOPIC_BYTES_MAX || queue_id < 0 || queue_id > INT32_MAX || queue_offset < 0) {
            PyErr_SetString(PyExc_ValueError, "relay: no such queue");
            return -1;
        }
        *target = (queue){{(const uint8_t *)topic, (size_t)length}, (uint32_t)queue_id, (uint64_t)queue_offset, 0, NULL};
    }
    return 0;
}

/* The units of each queue, of which no byte is written yet. */
static PyObject *new_units(const job *work)
{
    PyObject *units = PyList_New(work->queue_count);
    for (Py_ssize_t at = 0; units != NULL && at < work->queue_count; at++) {
        queue *target = &work->queues[at];
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, target->count * UNIT_BYTES);
        if (bytes != NULL)
            target->unit = (uint8_t *)PyBytes_AsString(bytes);
        if (bytes == NULL || PyList_SetItem(units, at, bytes) < 0)
            Py_CLEAR(units);
    }
    return units;
}

static PyObject *relayed(PyObject *given, job *work, Py_ssize_t room)
{
    if (read_queues(given, work) < 0)
        return NULL;
    Py_ssize_t size = measure(work);
    if (size < 0 || size > PY_SSIZE_T_MAX - room)
        return PyErr_Format(PyExc_ValueError, "relay: a place without a good record, or without a queue");
    PyObject *units = new_units(work), *records = PyByteArray_FromStringAndSize(NULL, size + room);
    if (units == NULL || records == NULL) {
        Py_XDECREF(units);
        Py_XDECREF(records);
        return NULL;
    }
    uint8_t *to = (uint8_t *)PyByteArray_AsString(records);
    BEGIN_WORK(size)
    put_all(work, to);
    memset(to + size, 0, (size_t)room);
    END_WORK
    return Py_BuildValue("NN", records, units);
}

PyObject *accelerator_relay(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer sources, places, chosen, store_host;
    PyObject *given;
    long long log_offset, store_time_ms;
    int transaction_flags;
    Py_ssize_t room;
    if (!PyArg_ParseTuple(arguments, "y*y*y*O!LLy*in:relay", &sources, &places, &chosen, &PyTuple_Type, &given, &log_offset,
                          &store_time_ms, &store_host, &transaction_flags, &room))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t queue_count = PyTuple_Size(given);
    queue *queues = calloc((size_t)queue_count + 1, sizeof *queues);
    span *tags = calloc((size_t)(places.len / 4) + 1, sizeof *tags);
    job work = {.sources = span_of(&sources),
                .store_host = span_of(&store_host),
                .places = places.buf,
                .chosen = chosen.buf,
                .count = places.len / 4,
                .queue_count = queue_count,
                .queues = queues,
                .tags = tags,
                .log_offset = (uint64_t)log_offset,
                .store_time_ms = (uint64_t)store_time_ms,
                .transaction_flags = (uint32_t)transaction_flags};
    if (queues == NULL || tags == NULL)
        PyErr_NoMemory();
    else if (places.len % 4 || chosen.len != places.len || log_offset < 0 || store_time_ms < 0 || room < 0
             || (store_host.len != 8 && store_host.len != 20) || (work.transaction_flags & ~TRANSACTION))
        PyErr_SetString(PyExc_ValueError, "relay: arguments that do not belong together");
    else
        result = relayed(given, &work, room);
    free(queues);
    free(tags);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&places);
    PyBuffer_Release(&chosen);
    PyBuffer_Release(&store_host);
    return result;
}

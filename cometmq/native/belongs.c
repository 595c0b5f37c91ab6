/* Whether records are the messages that a queue has: cometmq/format/belonging.py. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <string.h>

/* What a record should say of itself; the units are those of the messages from `offset` on. */
typedef struct {
    span topic, units;
    uint32_t queue_id;
    uint64_t offset;
} queue;

static int is_of(const record *found, span topic, uint32_t queue_id, uint64_t queue_offset)
{
    return load32(found->start + AT_QUEUE_ID) == queue_id && load64(found->start + AT_QUEUE_OFFSET) == queue_offset
        && found->topic.length == topic.length && memcmp(found->topic.start, topic.start, topic.length) == 0;
}

/* The first unit from `at` on, in bytes, that names the place; behind all units when there is none. */
static size_t unit_of(span units, size_t at, const uint8_t *log_offset)
{
    while (at < units.length && memcmp(units.start + at, log_offset, 8) != 0)
        at += UNIT_BYTES;
    return at;
}

/* Bytes of the records that the queue has, from the first one on, in the order of its units. */
static size_t count_of_queue(span records, const queue *of)
{
    size_t at = 0, unit = 0;
    record found;
    while (at < records.length && record_at(records.start + at, records.length - at, &found)) {
        unit = unit_of(of->units, unit, found.start + AT_LOG_OFFSET);
        if (unit >= of->units.length || !is_of(&found, of->topic, of->queue_id, of->offset + unit / UNIT_BYTES))
            break;
        unit += UNIT_BYTES;
        at += found.size;
    }
    return at;
}

PyObject *accelerator_of_queue(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer records, units, topic;
    long queue_id;
    long long offset;
    if (!PyArg_ParseTuple(arguments, "y*y*Ly*l:of_queue", &records, &units, &offset, &topic, &queue_id))
        return NULL;
    const queue of = {span_of(&topic), span_of(&units), (uint32_t)queue_id, (uint64_t)offset};
    size_t at = 0;
    int is_whole = units.len % UNIT_BYTES == 0;
    if (is_whole) {
        BEGIN_WORK(records.len)
        at = count_of_queue(span_of(&records), &of);
        END_WORK
    } else
        PyErr_SetString(PyExc_ValueError, "of_queue: units that are not whole");
    PyBuffer_Release(&records);
    PyBuffer_Release(&units);
    PyBuffer_Release(&topic);
    return is_whole ? PyLong_FromSize_t(at) : NULL;
}

/* Bytes of the records in any order, of which each has a queue id and a queue offset in `places`, int64 of the
 * machine; 0 when one is not at its place. */
static size_t count_at_places(span records, span topic, span places)
{
    size_t at = 0;
    record found;
    int64_t wanted[2];
    if (places.length % sizeof wanted)
        return 0;
    for (size_t place = 0; place < places.length; place += sizeof wanted) {
        memcpy(wanted, places.start + place, sizeof wanted);
        if (!record_at(records.start + at, records.length - at, &found)
            || !is_of(&found, topic, (uint32_t)wanted[0], (uint64_t)wanted[1]))
            return 0;
        at += found.size;
    }
    return at;
}

PyObject *accelerator_at_places(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer records, topic, places;
    if (!PyArg_ParseTuple(arguments, "y*y*y*:at_places", &records, &topic, &places))
        return NULL;
    size_t at;
    BEGIN_WORK(records.len)
    at = count_at_places(span_of(&records), span_of(&topic), span_of(&places));
    END_WORK
    PyBuffer_Release(&records);
    PyBuffer_Release(&topic);
    PyBuffer_Release(&places);
    return PyLong_FromSize_t(at);
}

/* The quick look of cometmq/format/batch.py, and what the broker fills in. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <string.h>

/* What all records of a run have in common. */
typedef struct {
    span topic, hosts_and_time, reserved, reserved_prefix;
    span prefix;      /* what the properties begin with */
    long long due_ms; /* what the units hold in place of the tag's hash; 0 = nothing */
    /* What is added to the time that each record names, -1 = they name none; the last time that is allowed. */
    long long timer_base_ms, timer_last_ms;
    uint32_t queue_id, host_flags;
    Py_ssize_t body_bytes_max, properties_bytes_max;
} claim;

static span behind_prefix(span properties, span prefix)
{
    return (span){properties.start + prefix.length, properties.length - prefix.length};
}

/* Whether the properties begin as they have to; digits of a time may be any. */
static int has_prefix(span properties, const claim *claimed)
{
    span wanted = claimed->prefix;
    if (claimed->timer_base_ms < 0)
        return starts_with(properties, (const char *)wanted.start, wanted.length);
    return properties.length >= wanted.length && memcmp(properties.start, wanted.start, TIMER_DIGITS_AT) == 0
        && memcmp(properties.start + TIMER_DIGITS_END, wanted.start + TIMER_DIGITS_END, wanted.length - TIMER_DIGITS_END)
        == 0;
}

/* When the record is due, which names a time; 0 when that cannot be. */
static long long due_of(span properties, const claim *claimed)
{
    long long named = timer_digits(properties);
    if (named < 0 || (claimed->timer_base_ms == 0 && named < TIMER_MS_MIN)
        || named > claimed->timer_last_ms - claimed->timer_base_ms)
        return 0;
    return claimed->timer_base_ms + named;
}

/* Whether a producer may have sent this record in such a run, as far as a quick look tells. */
static int is_good(const record *found, const claim *claimed, span *tag)
{
    static const uint8_t zeros[4 + 8] = {0};
    return load32(found->start + AT_QUEUE_ID) == claimed->queue_id
        && (found->sys_flag & ~COMPRESSION) == claimed->host_flags
        && memcmp(found->reconsume_times, zeros, sizeof zeros) == 0
        && found->body.length <= (size_t)claimed->body_bytes_max
        && found->properties.length <= (size_t)claimed->properties_bytes_max
        && is_same(found->topic, claimed->topic)
        && has_prefix(found->properties, claimed)
        && are_clean(behind_prefix(found->properties, claimed->prefix), claimed->reserved, claimed->reserved_prefix, tag)
        && has_good_body(found);
}

/* Stamps up to `count` records of `records` from `*at` on in the copy `stamped`; returns how many it took. */
static Py_ssize_t stamp_run(span records, uint8_t *stamped, size_t *at, Py_ssize_t count, const claim *claimed,
                            uint64_t queue_offset, uint64_t log_offset, uint8_t *units)
{
    Py_ssize_t taken = 0;
    for (; taken < count; taken++) {
        record found;
        span tag;
        uint8_t *unit = units + taken * UNIT_BYTES;
        if (!record_at(records.start + *at, records.length - *at, &found) || !is_good(&found, claimed, &tag)
            || !put_unit(unit, log_offset + *at, found.size, tag))
            break;
        uint8_t *to = stamped + *at;
        long long due_ms = claimed->due_ms;
        if (claimed->timer_base_ms >= 0) {
            due_ms = due_of(found.properties, claimed);
            if (due_ms == 0)
                break;
            put_timer_digits(to + (found.properties.start - found.start), due_ms);
        }
        if (due_ms)
            store64(unit + 12, (uint64_t)due_ms);
        store64(to + AT_QUEUE_OFFSET, queue_offset + (uint64_t)taken);
        store64(to + AT_LOG_OFFSET, log_offset + *at);
        memcpy(to + AT_BORN_HOST, claimed->hosts_and_time.start, claimed->hosts_and_time.length);
        *at += found.size;
    }
    return taken;
}

static PyObject *stamped_run(const Py_buffer *records, const Py_buffer *stamped, Py_ssize_t at, Py_ssize_t count,
                             const claim *claimed, uint64_t queue_offset, uint64_t log_offset)
{
    Py_ssize_t fit = (records->len - at) / RECORD_BYTES_MIN;
    if (count > fit)
        count = fit;
    PyObject *units = PyBytes_FromStringAndSize(NULL, count * UNIT_BYTES);
    if (units == NULL)
        return NULL;
    uint8_t *to = (uint8_t *)PyBytes_AsString(units);
    size_t end = (size_t)at;
    BEGIN_WORK(records->len - at)
    Py_ssize_t taken = stamp_run(span_of(records), stamped->buf, &end, count, claimed, queue_offset, log_offset, to);
    END_WORK
    if (taken < count) {
        PyObject *all = units;
        units = PyBytes_FromStringAndSize((const char *)to, taken * UNIT_BYTES);
        Py_DECREF(all);
    }
    return Py_BuildValue("nN", (Py_ssize_t)end, units);
}

PyObject *accelerator_stamp(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer records, stamped, topic, hosts_and_time, reserved, reserved_prefix, prefix;
    Py_ssize_t at, count;
    long long queue_id, queue_offset, log_offset;
    unsigned int host_flags;
    claim claimed;
    if (!PyArg_ParseTuple(arguments, "y*w*nny*LLLy*Inny*y*y*LLL:stamp", &records, &stamped, &at, &count, &topic, &queue_id,
                          &queue_offset, &log_offset, &hosts_and_time, &host_flags, &claimed.body_bytes_max,
                          &claimed.properties_bytes_max, &reserved, &reserved_prefix, &prefix, &claimed.due_ms,
                          &claimed.timer_base_ms, &claimed.timer_last_ms))
        return NULL;
    claimed.topic = span_of(&topic);
    claimed.hosts_and_time = span_of(&hosts_and_time);
    claimed.reserved = span_of(&reserved);
    claimed.reserved_prefix = span_of(&reserved_prefix);
    claimed.prefix = span_of(&prefix);
    claimed.queue_id = (uint32_t)queue_id;
    claimed.host_flags = host_flags;
    Py_ssize_t hosts = (host_flags & BORN_HOST_V6 ? 20 : 8) + 8 + (host_flags & STORE_HOST_V6 ? 20 : 8);
    PyObject *result = NULL;
    if (at < 0 || at > records.len || count < 0 || stamped.len != records.len || hosts_and_time.len != hosts
        || (host_flags & ~HOSTS_V6) || queue_id < INT32_MIN || queue_id > INT32_MAX || claimed.body_bytes_max < 0
        || claimed.properties_bytes_max < 0
        || (claimed.timer_base_ms >= 0
            && (claimed.prefix.length < TIMER_DIGITS_END || claimed.timer_last_ms > TIMER_MS_MAX)))
        PyErr_SetString(PyExc_ValueError, "stamp: arguments that do not belong together");
    else
        result = stamped_run(&records, &stamped, at, count, &claimed, (uint64_t)queue_offset, (uint64_t)log_offset);
    PyBuffer_Release(&records);
    PyBuffer_Release(&stamped);
    PyBuffer_Release(&topic);
    PyBuffer_Release(&hosts_and_time);
    PyBuffer_Release(&reserved);
    PyBuffer_Release(&reserved_prefix);
    PyBuffer_Release(&prefix);
    return result;
}

/* Entries of the timer index: cometmq/store/timers/entries.py. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>

#define ENTRY_BYTES 16
#define HASH_MAX INT32_MAX       /* units of RocketMQ hold no time, but a hash */
#define LOST_SIZE 1              /* of units that are no message */
#define PREFILL_SIZE 0x7fffffffu /* the same */
#define MERGED_RUNS_MAX 4        /* so many ascending runs are merged; more are sorted byte by byte */
#define SORTED_BY_BYTES_MIN 512  /* fewer entries are always merged */

/* The entries of `count` units; how many bytes. */
static Py_ssize_t put_entries(const uint8_t *unit, Py_ssize_t count, uint64_t offset, uint8_t *to)
{
    uint8_t *start = to;
    for (; count > 0; count--, unit += UNIT_BYTES, offset++) {
        int64_t due_ms = (int64_t)load64(unit + 12);
        uint32_t size = load32(unit + 8);
        if (due_ms <= HASH_MAX || size <= LOST_SIZE || size >= PREFILL_SIZE)
            continue;
        store64(to, (uint64_t)due_ms);
        store64(to + 8, offset);
        to += ENTRY_BYTES;
    }
    return to - start;
}

PyObject *accelerator_timer_entries(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer units;
    long long offset;
    if (!PyArg_ParseTuple(arguments, "y*L:timer_entries", &units, &offset))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = units.len / UNIT_BYTES;
    if (units.len % UNIT_BYTES || offset < 0 || offset > INT64_MAX - count) {
        PyErr_SetString(PyExc_ValueError, "timer_entries: no whole units, or no offset");
    } else if ((result = PyBytes_FromStringAndSize(NULL, count * ENTRY_BYTES)) != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AsString(result);
        BEGIN_WORK(units.len)
        Py_ssize_t size = put_entries(units.buf, count, (uint64_t)offset, to);
        END_WORK
        if (size < count * ENTRY_BYTES) {
            PyObject *all = result;
            result = PyBytes_FromStringAndSize((const char *)to, size);
            Py_DECREF(all);
        }
    }
    PyBuffer_Release(&units);
    return result;
}

static int is_above(const uint8_t *one, const uint8_t *other)
{
    uint64_t first = load64(one), second = load64(other);
    return first != second ? first > second : load64(one + 8) > load64(other + 8);
}

/* Where the ascending run ends that begins at `at`. */
static size_t run_end(const uint8_t *entries, size_t at, size_t count)
{
    for (at++; at < count; at++)
        if (is_above(entries + (at - 1) * ENTRY_BYTES, entries + at * ENTRY_BYTES))
            break;
    return at;
}

static void merge(const uint8_t *from, size_t left, size_t middle, size_t right, uint8_t *to)
{
    size_t one = left, other = middle;
    for (to += left * ENTRY_BYTES; one < middle && other < right; to += ENTRY_BYTES) {
        int takes_other = is_above(from + one * ENTRY_BYTES, from + other * ENTRY_BYTES);
        memcpy(to, from + (takes_other ? other : one) * ENTRY_BYTES, ENTRY_BYTES);
        other += (size_t)takes_other;
        one += (size_t)!takes_other;
    }
    memcpy(to, from + one * ENTRY_BYTES, (middle - one) * ENTRY_BYTES);
    to += (middle - one) * ENTRY_BYTES;
    memcpy(to, from + other * ENTRY_BYTES, (right - other) * ENTRY_BYTES);
}

/* Merges neighbouring runs, again and again: what was sorted in parts costs little. Where the sorted entries are, which
 * is one of the two places. */
static uint8_t *merged(uint8_t *entries, uint8_t *spare, size_t count)
{
    for (;;) {
        size_t at = 0, runs = 0;
        while (at < count) {
            size_t middle = run_end(entries, at, count);
            size_t end = middle < count ? run_end(entries, middle, count) : middle;
            merge(entries, at, middle, end, spare);
            at = end;
            runs++;
        }
        uint8_t *was = entries;
        entries = spare;
        spare = was;
        if (runs <= 1)
            return entries;
    }
}

/* Orders the entries by one of their bytes; those that have the same there stay in their order. */
static void sort_by_byte(const uint8_t *from, uint8_t *to, size_t count, size_t byte)
{
    size_t places[256] = {0}, next = 0;
    for (size_t at = 0; at < count; at++)
        places[from[at * ENTRY_BYTES + byte]]++;
    for (size_t value = 0; value < 256; value++) {
        size_t here = places[value];
        places[value] = next;
        next += here;
    }
    for (size_t at = 0; at < count; at++, from += ENTRY_BYTES)
        memcpy(to + ENTRY_BYTES * places[from[byte]]++, from, ENTRY_BYTES);
}

/* Orders the entries by their bytes, the last one first, but for bytes that are the same in all. Entries that come in the
 * order of their offsets, as from the queue, need those no more. Returns as merged(). */
static uint8_t *sorted_by_bytes(uint8_t *entries, uint8_t *spare, size_t count)
{
    uint8_t varies[ENTRY_BYTES] = {0};
    int offsets_fall = 0;
    for (size_t at = 1; at < count; at++) {
        const uint8_t *one = entries + at * ENTRY_BYTES;
        for (size_t byte = 0; byte < ENTRY_BYTES; byte++)
            varies[byte] |= one[byte] ^ entries[byte];
        offsets_fall |= load64(one + 8) < load64(one + 8 - ENTRY_BYTES);
    }
    for (size_t byte = offsets_fall ? ENTRY_BYTES : 8; byte-- > 0;) {
        if (!varies[byte])
            continue;
        sort_by_byte(entries, spare, count, byte);
        uint8_t *was = entries;
        entries = spare;
        spare = was;
    }
    return entries;
}

static uint8_t *sorted(uint8_t *entries, uint8_t *spare, size_t count)
{
    size_t at = 0;
    for (int runs = 0; at < count && runs < MERGED_RUNS_MAX; runs++)
        at = run_end(entries, at, count);
    if (at == count || count < SORTED_BY_BYTES_MIN)
        return merged(entries, spare, count);
    return sorted_by_bytes(entries, spare, count);
}

PyObject *accelerator_sort_timers(PyObject *module, PyObject *object)
{
    (void)module;
    Py_buffer entries;
    if (PyObject_GetBuffer(object, &entries, PyBUF_SIMPLE) < 0)
        return NULL;
    if (entries.len % ENTRY_BYTES) {
        PyBuffer_Release(&entries);
        return PyErr_Format(PyExc_ValueError, "sort_timers: no whole entries");
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, entries.len);
    uint8_t *spare = malloc((size_t)entries.len + 1);
    if (result != NULL && spare == NULL) {
        Py_CLEAR(result);
        PyErr_NoMemory();
    }
    if (result != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AsString(result);
        BEGIN_WORK(entries.len)
        memcpy(to, entries.buf, (size_t)entries.len);
        uint8_t *found = sorted(to, spare, (size_t)entries.len / ENTRY_BYTES);
        if (found != to)
            memcpy(to, found, (size_t)entries.len);
        END_WORK
    }
    free(spare);
    PyBuffer_Release(&entries);
    return result;
}

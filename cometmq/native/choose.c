/* Which messages a pull answers: cometmq/messaging/pull.py. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <string.h>

#define SIZE_AT 8
#define TAG_AT 16              /* the low half of the tag hash */
#define LOST_SIZE 1            /* in a unit whose message was lost; 0: no unit */
#define SIZES_END 0x7fffffffu  /* in RocketMQ's filler; above it sizes are negative */

typedef struct {
    span units;
    Py_ssize_t count_max, bytes_max;
    span codes; /* wanted tags, four bytes each in the machine's order; empty = every message */
} question;

static int is_wanted(const question *asked, const uint8_t *unit)
{
    if (asked->codes.length == 0)
        return 1;
    uint32_t code = load32(unit + TAG_AT);
    for (size_t at = 0; at < asked->codes.length; at += sizeof code)
        if (memcmp(asked->codes.start + at, &code, sizeof code) == 0)
            return 1;
    return 0;
}

/* The first wanted unit from `index` on; the number of units when there is none. */
static Py_ssize_t next_wanted(const question *asked, Py_ssize_t index)
{
    Py_ssize_t unit_count = (Py_ssize_t)(asked->units.length / UNIT_BYTES);
    while (index < unit_count && !is_wanted(asked, asked->units.start + index * UNIT_BYTES))
        index++;
    return index;
}

/* Appends (log offset, bytes); -1 with an exception set. */
static int append_span(PyObject *spans, uint64_t start, uint64_t end)
{
    PyObject *pair = Py_BuildValue("LL", (long long)start, (long long)(end - start));
    int result = pair == NULL ? -1 : PyList_Append(spans, pair);
    Py_XDECREF(pair);
    return result;
}

/* Adds what is chosen to `spans`. Returns how many messages that are, and in `next` the unit to look at next;
 * -1 with an exception set, -2 when a unit names no record. */
static Py_ssize_t choose_into(PyObject *spans, const question *asked, Py_ssize_t *next)
{
    Py_ssize_t unit_count = (Py_ssize_t)(asked->units.length / UNIT_BYTES);
    Py_ssize_t index = next_wanted(asked, 0), chosen = 0;
    uint64_t total = 0, start = 0, end = 0;
    int is_full = 0;
    for (Py_ssize_t met = 0; index < unit_count && met < asked->count_max; met++) {
        uint64_t log_offset = load64(asked->units.start + index * UNIT_BYTES);
        uint32_t size = load32(asked->units.start + index * UNIT_BYTES + SIZE_AT);
        if (size <= LOST_SIZE || size >= SIZES_END || log_offset > INT64_MAX - SIZES_END)
            return -2; /* also behind what is chosen: plain Python looks at as many */
        total += size;
        if (!is_full && chosen && total > (uint64_t)asked->bytes_max) {
            is_full = 1;
            *next = index;
        }
        if (!is_full) {
            if (chosen && log_offset != end && append_span(spans, start, end) < 0)
                return -1;
            if (!chosen || log_offset != end)
                start = log_offset;
            end = log_offset + size;
            chosen++;
        }
        index = next_wanted(asked, index + 1);
    }
    if (!is_full)
        *next = index;
    return chosen && append_span(spans, start, end) < 0 ? -1 : chosen;
}

static PyObject *answer(const question *asked)
{
    PyObject *spans = PyList_New(0);
    if (spans == NULL)
        return NULL;
    Py_ssize_t next = 0;
    Py_ssize_t chosen = choose_into(spans, asked, &next);
    if (chosen >= 0)
        return Py_BuildValue("Nnn", spans, chosen, next);
    Py_DECREF(spans);
    if (chosen == -1)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *accelerator_choose(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer units, codes;
    question asked;
    if (!PyArg_ParseTuple(arguments, "y*nny*:choose", &units, &asked.count_max, &asked.bytes_max, &codes))
        return NULL;
    asked.units = span_of(&units);
    asked.codes = span_of(&codes);
    PyObject *result = NULL;
    if (units.len % UNIT_BYTES || codes.len % (Py_ssize_t)sizeof(uint32_t) || asked.count_max < 0
        || asked.bytes_max < 0)
        PyErr_SetString(PyExc_ValueError, "choose: units or codes that are not whole");
    else
        result = answer(&asked);
    PyBuffer_Release(&units);
    PyBuffer_Release(&codes);
    return result;
}

/* Keys of records, and the hash table on the disk that finds them: cometmq/format/indexkeys.py and indexfile.py. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define KEY_BYTES 20   /* hash, log offset, store time in ms */
#define ENTRY_BYTES 20 /* hash, log offset, seconds, number of the entry before it in the slot */
#define SLOT_BYTES 4
#define HEADER_BYTES 40
#define SECONDS_MAX 0x7fffffff

typedef struct {
    uint8_t *bytes;
    size_t length, room;
    int failed; /* no memory */
} output;

/* Room for one more key; NULL without memory. */
static uint8_t *next_key(output *keys)
{
    if (keys->length + KEY_BYTES > keys->room) {
        size_t more = keys->room ? 2 * keys->room : 64 * KEY_BYTES;
        uint8_t *grown = realloc(keys->bytes, more);
        if (grown == NULL) {
            keys->failed = 1;
            return NULL;
        }
        keys->bytes = grown;
        keys->room = more;
    }
    keys->length += KEY_BYTES;
    return keys->bytes + keys->length - KEY_BYTES;
}

/* The values of UNIQ_KEY and KEYS as decode() of cometmq/format/properties.py finds them: the last that is not empty. */
static void find_keys(span properties, span *unique_id, span *keys)
{
    const uint8_t *at = properties.start, *end = properties.start + properties.length;
    *unique_id = *keys = (span){at, 0};
    while (at < end) {
        const uint8_t *stop = memchr(at, 2, (size_t)(end - at));
        span pair = {at, (size_t)((stop == NULL ? end : stop) - at)};
        if (starts_with(pair, "UNIQ_KEY\x01", 9) && pair.length > 9)
            *unique_id = (span){at + 9, pair.length - 9};
        else if (starts_with(pair, "KEYS\x01", 5) && pair.length > 5)
            *keys = (span){at + 5, pair.length - 5};
        at = stop == NULL ? end : stop + 1;
    }
}

/* Adds one key of a record; `code` is the hash of what stands before it. 0 when it is not UTF-8, or without memory. */
static int put_key(output *keys, const record *found, uint32_t code, span key)
{
    if (!java_hash(key, &code))
        return 0;
    uint8_t *to = next_key(keys);
    if (to == NULL)
        return 0;
    store32(to, code & 0x80000000u ? (0u - code) & 0x7fffffffu : code); /* the one that has no positive is 0 */
    memcpy(to + 4, found->start + AT_LOG_OFFSET, 8);
    memcpy(to + 12, found->store_time, 8);
    return 1;
}

/* Adds all keys of a record; 0 when others have to do it. */
static int put_keys(output *keys, const record *found)
{
    static const span separator = {(const uint8_t *)"#", 1}, blank = {(const uint8_t *)" ", 1};
    uint32_t code = 0;
    span unique_id, words;
    if ((found->sys_flag & TRANSACTION) == ROLLBACK)
        return 1;
    if (!java_hash(found->topic, &code) || !java_hash(separator, &code))
        return 0;
    find_keys(found->properties, &unique_id, &words);
    if (unique_id.length && !put_key(keys, found, code, unique_id))
        return 0;
    for (size_t at = 0; at < words.length;) {
        span left = {words.start + at, words.length - at};
        const uint8_t *stop = memchr(left.start, blank.start[0], left.length);
        span word = {left.start, stop == NULL ? left.length : (size_t)(stop - left.start)};
        if (word.length && !put_key(keys, found, code, word))
            return 0;
        at += word.length + 1;
    }
    return 1;
}

PyObject *accelerator_index_keys(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer chunk;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(arguments, "y*n:index_keys", &chunk, &at))
        return NULL;
    if (at < 0 || at > chunk.len) {
        PyBuffer_Release(&chunk);
        PyErr_SetString(PyExc_ValueError, "index_keys: a place outside the chunk");
        return NULL;
    }
    output keys = {NULL, 0, 0, 0};
    span all = span_of(&chunk);
    record found;
    BEGIN_WORK(chunk.len - at)
    while (record_at(all.start + at, all.length - (size_t)at, &found)) {
        size_t before = keys.length;
        if (!put_keys(&keys, &found)) {
            keys.length = before;
            break;
        }
        at += (Py_ssize_t)found.size;
    }
    END_WORK
    PyBuffer_Release(&chunk);
    PyObject *result = keys.failed ? PyErr_NoMemory()
                                   : Py_BuildValue("ny#", at, keys.bytes == NULL ? "" : (const char *)keys.bytes,
                                                   (Py_ssize_t)keys.length);
    free(keys.bytes);
    return result;
}

/* Seconds from `begin` to `time`, both in ms; rounded down, within what an entry holds. */
static uint32_t seconds_between(int64_t begin, int64_t time)
{
    if (time <= begin)
        return 0;
    uint64_t seconds = ((uint64_t)time - (uint64_t)begin) / 1000;
    return seconds < SECONDS_MAX ? (uint32_t)seconds : SECONDS_MAX;
}

/* Puts the keys into the file; returns how many slots were empty before. */
static uint32_t put_all(uint8_t *file, span keys, uint32_t slot_count, uint32_t number, int64_t begin_time)
{
    uint8_t *entries = file + HEADER_BYTES + (size_t)slot_count * SLOT_BYTES;
    uint32_t used = 0;
    for (size_t at = 0; at < keys.length; at += KEY_BYTES, number++) {
        const uint8_t *key = keys.start + at;
        uint8_t *slot = file + HEADER_BYTES + (size_t)(load32(key) % slot_count) * SLOT_BYTES;
        uint8_t *entry = entries + (size_t)number * ENTRY_BYTES;
        uint32_t previous = load32(slot);
        if (previous == 0 || previous >= number) { /* a negative one is huge here */
            previous = 0;
            used++;
        }
        memcpy(entry, key, 4 + 8);
        store32(entry + 12, seconds_between(begin_time, (int64_t)load64(key + 12)));
        store32(entry + 16, previous);
        atomic_thread_fence(memory_order_release); /* who reads at the same time finds the entry that a slot names */
        store32(slot, number);
    }
    return used;
}

PyObject *accelerator_index_put(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer file, keys;
    long long slot_count, entry_count, number, begin_time;
    if (!PyArg_ParseTuple(arguments, "w*y*LLLL:index_put", &file, &keys, &slot_count, &entry_count, &number,
                          &begin_time))
        return NULL;
    PyObject *result = NULL;
    if (slot_count < 1 || slot_count > INT32_MAX || entry_count < 1 || entry_count > INT32_MAX || keys.len % KEY_BYTES
        || number < 1 || number > entry_count || keys.len / KEY_BYTES > entry_count - number
        || file.len < HEADER_BYTES + slot_count * SLOT_BYTES + entry_count * ENTRY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "index_put: the keys do not fit into the file");
    } else {
        BEGIN_WORK(RELEASE_BYTES_MIN) /* always: a page of the file may not be in memory */
        uint32_t used = put_all(file.buf, span_of(&keys), (uint32_t)slot_count, (uint32_t)number, begin_time);
        END_WORK
        result = PyLong_FromUnsignedLong(used);
    }
    PyBuffer_Release(&file);
    PyBuffer_Release(&keys);
    return result;
}

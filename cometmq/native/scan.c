/* The run of plain and good records of cometmq/format/scan.py, with their units. */

#include "accelerator.h"

#include "bytes.h"
#include "record.h"

#include <stdlib.h>
#include <string.h>

#define PLAIN_SYS_FLAGS (0x701u | HOSTS_V6) /* compression of any kind, and the hosts' lengths */
#define BUCKETS 4096 /* of the table of groups; a power of two */
#define NONE (-1)

/* Records of one queue that follow each other there, though not in the log. */
typedef struct {
    span topic;
    uint32_t queue_id;
    uint64_t first_queue_offset;
    Py_ssize_t count;
    int32_t older; /* group in the same bucket */
    uint8_t *units; /* where the next one goes, when they are handed out */
} group;

typedef struct {
    int32_t group;
    uint8_t unit[UNIT_BYTES];
} entry;

typedef struct {
    span chunk, apart;
    const uint8_t *delays_ms; /* of each delay level, from level 1 on */
    Py_ssize_t level_count;
    size_t end; /* in the chunk, behind the last good record */
    uint64_t log_offset; /* of the chunk's first byte */
    uint64_t log_end;    /* where its last record may end */
    uint64_t first_time, last_time;
    size_t last_size;
    int times_fall; /* some record is older than the one before it */
    entry *entries;
    Py_ssize_t count, room;
    group *groups;
    int32_t group_count;
    Py_ssize_t group_room;
    int32_t newest[BUCKETS]; /* group in each bucket */
    int failed; /* no memory */
} walk;

/* A name that RocketMQ allows: letters, digits and four signs. */
static int is_topic(span name)
{
    if (name.length == 0 || name.length > 127)
        return 0;
    for (size_t at = 0; at < name.length; at++) {
        uint8_t c = name.start[at];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-'
              || c == '%' || c == '|'))
            return 0;
    }
    return 1;
}

static uint32_t bucket_of(span topic, uint32_t queue_id)
{
    uint32_t code = queue_id;
    for (size_t at = 0; at < topic.length; at++)
        code = 31 * code + topic.start[at];
    return (code * 0x9e3779b1u) >> 20;
}

static int is_of(const group *one, const record *found)
{
    return one->queue_id == load32(found->start + AT_QUEUE_ID) && is_same(one->topic, found->topic);
}

/* The elements, grown if there is no room for one more of `size` bytes; NULL without memory, then nothing changes. */
static void *with_room(void *elements, Py_ssize_t *room, Py_ssize_t count, size_t size)
{
    if (count < *room)
        return elements;
    Py_ssize_t more = *room ? 2 * *room : 256;
    void *grown = realloc(elements, (size_t)more * size);
    if (grown != NULL)
        *room = more;
    return grown;
}

/* The group that the record continues, or a new one; NONE when the record is not for us. */
static int32_t group_for(walk *on, const record *found, int32_t recent)
{
    uint64_t queue_offset = load64(found->start + AT_QUEUE_OFFSET);
    int32_t at = recent;
    uint32_t bucket = 0;
    if (at == NONE || !is_of(&on->groups[at], found)) {
        bucket = bucket_of(found->topic, load32(found->start + AT_QUEUE_ID));
        for (at = on->newest[bucket]; at != NONE && !is_of(&on->groups[at], found);)
            at = on->groups[at].older;
    }
    if (at != NONE && on->groups[at].first_queue_offset + (uint64_t)on->groups[at].count == queue_offset)
        return at;
    if (at == NONE && (!is_topic(found->topic) || is_listed(on->apart, found->topic)))
        return NONE;
    group *groups = with_room(on->groups, &on->group_room, on->group_count, sizeof(group));
    if (groups == NULL) {
        on->failed = 1;
        return NONE;
    }
    on->groups = groups;
    bucket = bucket_of(found->topic, load32(found->start + AT_QUEUE_ID));
    on->groups[on->group_count] = (group){
        .topic = found->topic,
        .queue_id = load32(found->start + AT_QUEUE_ID),
        .first_queue_offset = queue_offset,
        .older = on->newest[bucket],
    };
    on->newest[bucket] = on->group_count;
    return on->group_count++;
}

/* Takes the record at the walk's end; 0 when it has to be looked at by others, or is none. */
static int take(walk *on, int32_t *recent)
{
    record found;
    span tag;
    uint64_t log_offset = on->log_offset + on->end;
    if (!record_at(on->chunk.start + on->end, on->chunk.length - on->end, &found)
        || found.size > on->log_end - log_offset || load64(found.start + AT_LOG_OFFSET) != log_offset
        || (found.sys_flag & ~PLAIN_SYS_FLAGS) || !are_framed(found.properties, &tag) || !has_good_body(&found))
        return 0;
    entry *entries = with_room(on->entries, &on->room, on->count, sizeof(entry));
    if (entries == NULL) {
        on->failed = 1;
        return 0;
    }
    on->entries = entries;
    entry *into = &entries[on->count];
    if (!put_unit(into->unit, log_offset, found.size, tag))
        return 0;
    if (is_timer(&found)) {
        long long due_ms = timer_due(&found);
        if (due_ms < 0)
            return 0;
        store64(into->unit + 12, (uint64_t)due_ms);
    }
    uint64_t time = load64(found.store_time);
    if (is_delayed(&found)) {
        long level = level_of(&found);
        if (!level)
            return 0;
        int64_t delay_ms;
        Py_ssize_t index = level < on->level_count ? level - 1 : on->level_count - 1;
        memcpy(&delay_ms, on->delays_ms + index * (Py_ssize_t)sizeof delay_ms, sizeof delay_ms);
        if ((int64_t)time > INT64_MAX - delay_ms)
            return 0;
        store64(into->unit + 12, time + (uint64_t)delay_ms);
    }
    into->group = *recent = group_for(on, &found, *recent);
    if (into->group == NONE)
        return 0;
    on->groups[into->group].count++;
    if (on->count++ == 0)
        on->first_time = time;
    else if ((int64_t)time < (int64_t)on->last_time)
        on->times_fall = 1;
    on->last_time = time;
    on->last_size = found.size;
    on->end += found.size;
    return 1;
}

/* (topic, queue id, first queue offset, units) of each group; the units are filled in afterwards. */
static PyObject *empty_groups(walk *on)
{
    PyObject *list = PyList_New(on->group_count);
    for (int32_t at = 0; list != NULL && at < on->group_count; at++) {
        group *one = &on->groups[at];
        PyObject *units = PyBytes_FromStringAndSize(NULL, one->count * UNIT_BYTES);
        if (units != NULL)
            one->units = (uint8_t *)PyBytes_AsString(units);
        PyObject *item = units == NULL ? NULL
                                       : Py_BuildValue("s#iLN", (const char *)one->topic.start,
                                                       (Py_ssize_t)one->topic.length, (int)(int32_t)one->queue_id,
                                                       (long long)one->first_queue_offset, units);
        if (item == NULL || PyList_SetItem(list, at, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *result_of(walk *on)
{
    if (on->failed)
        return PyErr_NoMemory();
    PyObject *groups = empty_groups(on);
    if (groups == NULL)
        return NULL;
    for (Py_ssize_t at = 0; at < on->count; at++) {
        group *one = &on->groups[on->entries[at].group];
        memcpy(one->units, on->entries[at].unit, UNIT_BYTES);
        one->units += UNIT_BYTES;
    }
    return Py_BuildValue("nnnLLON", (Py_ssize_t)on->end, on->count, (Py_ssize_t)on->last_size,
                         (long long)on->first_time, (long long)on->last_time, on->times_fall ? Py_True : Py_False,
                         groups);
}

static PyObject *scanned(const Py_buffer *chunk, Py_ssize_t at, uint64_t log_offset, uint64_t bytes_left, span apart,
                         const Py_buffer *delays_ms)
{
    walk *on = calloc(1, sizeof(walk));
    if (on == NULL)
        return PyErr_NoMemory();
    on->chunk = span_of(chunk);
    on->apart = apart;
    on->delays_ms = delays_ms->buf;
    on->level_count = delays_ms->len / (Py_ssize_t)sizeof(int64_t);
    on->end = (size_t)at;
    on->log_offset = log_offset - (uint64_t)at;
    on->log_end = log_offset + bytes_left;
    memset(on->newest, 0xff, sizeof on->newest); /* NONE everywhere */
    BEGIN_WORK(chunk->len - at)
    int32_t recent = NONE;
    while (take(on, &recent))
        continue;
    END_WORK
    PyObject *result = result_of(on);
    free(on->entries);
    free(on->groups);
    free(on);
    return result;
}

PyObject *accelerator_scan(PyObject *module, PyObject *arguments)
{
    (void)module;
    Py_buffer chunk, apart, delays_ms;
    Py_ssize_t at;
    long long log_offset, bytes_left;
    if (!PyArg_ParseTuple(arguments, "y*nLLy*y*:scan", &chunk, &at, &log_offset, &bytes_left, &apart, &delays_ms))
        return NULL;
    PyObject *result = NULL;
    if (at < 0 || at > chunk.len || log_offset < 0 || bytes_left < 0 || bytes_left > INT64_MAX - log_offset)
        PyErr_SetString(PyExc_ValueError, "scan: a place outside the chunk or the log");
    else if (delays_ms.len < (Py_ssize_t)sizeof(int64_t) || delays_ms.len % (Py_ssize_t)sizeof(int64_t))
        PyErr_SetString(PyExc_ValueError, "scan: no delay levels");
    else
        result = scanned(&chunk, at, (uint64_t)log_offset, (uint64_t)bytes_left, span_of(&apart), &delays_ms);
    PyBuffer_Release(&chunk);
    PyBuffer_Release(&apart);
    PyBuffer_Release(&delays_ms);
    return result;
}

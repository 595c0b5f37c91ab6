/* Trace records of messages, many in one body: cometmq/client/tracing/pack.py, which has the same in plain Python. Here
 * are messages whose texts need no look: valid UTF-8 without control characters and without unusual blanks. */

#include "accelerator.h"

#include "bytes.h"
#include "crc32.h"
#include "received.h"
#include "record.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#define KEYS_BYTES_MAX 16384
#define WORD_SLOTS 8192      /* more than different words fit into so many bytes: few have one byte */
#define TEXT_BYTES_MAX 1024  /* of keys or a tag; Python cuts, or leaves out, what is longer */
#define DIGITS_MAX 20        /* of a number */
#define ID_BYTES 34
#define COUNTER_DIGITS 8     /* at the end of an id */

typedef struct {
    PyObject_HEAD
    uint8_t *body, *keys;
    size_t body_bytes, body_room, body_max;
    size_t keys_bytes, keys_max; /* each word with the blank behind it */
    Py_ssize_t count, room, dropped;
    char is_full;
    uint8_t stream[ID_BYTES - COUNTER_DIGITS]; /* what an id looked at before began with, and its CRC */
    uint32_t stream_crc;
    uint16_t slots[WORD_SLOTS]; /* one above the place of a word in `keys`, by the word's hash; 0: free */
} trace_pack;

/* What became of a record. */
enum { FULL, UNKNOWN, DONE, FAILED };

/* --- texts -------------------------------------------------------------------------------------------------------- */

/* Properties that a trace names or follows; without a start: the message has it not. */
typedef struct {
    span keys, tag, unique_id, mark, sharding_key;
} named;

static const struct {
    const char *name;
    size_t length, place;
} NAMES[] = {
    {"KEYS\x01", 5, offsetof(named, keys)},
    {"TAGS\x01", 5, offsetof(named, tag)},
    {"UNIQ_KEY\x01", 9, offsetof(named, unique_id)},
    {"TRACE_ON\x01", 9, offsetof(named, mark)},
    {"__SHARDINGKEY\x01", 14, offsetof(named, sharding_key)},
};

static int is_same_text(span text, const char *other, size_t length)
{
    return text.length == length && memcmp(text.start, other, length) == 0;
}

/* Finds the properties; 0 when one of them is there twice, or empty. */
static int find_named(span properties, named *found)
{
    const uint8_t *at = properties.start, *end = at + properties.length;
    memset(found, 0, sizeof *found);
    while (at < end) {
        const uint8_t *stop = memchr(at, PAIR_SEPARATOR, (size_t)(end - at));
        if (stop == NULL)
            stop = end;
        span pair = {at, (size_t)(stop - at)};
        for (size_t n = 0; n < sizeof NAMES / sizeof *NAMES; n++) {
            size_t length = NAMES[n].length;
            if (pair.length < length || *at != (uint8_t)*NAMES[n].name || memcmp(at, NAMES[n].name, length) != 0)
                continue;
            span *value = (span *)((char *)found + NAMES[n].place);
            if (value->start != NULL || pair.length == length)
                return 0;
            *value = (span){at + length, pair.length - length};
        }
        at = stop + 1;
    }
    return 1;
}

/* Whether a blank beyond ASCII may be in the valid text. */
static int may_have_blanks(span text)
{
    for (size_t at = 0; at + 1 < text.length; at++) {
        uint8_t lead = text.start[at], next = text.start[at + 1];
        if (lead == 0xc2 || (lead == 0xe1 && next == 0x9a) || (lead == 0xe2 && (next == 0x80 || next == 0x81))
            || (lead == 0xe3 && next == 0x80))
            return 1;
    }
    return 0;
}

/* Whether the text goes into a record, and its words into the keys, as it is. */
static int is_plain(span text)
{
    uint8_t all_bits = 0;
    if (text.length > TEXT_BYTES_MAX)
        return 0;
    for (size_t at = 0; at < text.length; at++) {
        if (text.start[at] < ' ')
            return 0;
        all_bits |= text.start[at];
    }
    uint32_t ignored = 0;
    return all_bits < 0x80 || (java_hash(text, &ignored) && !may_have_blanks(text));
}

/* An id is one word in ASCII. */
static int is_id(span text)
{
    int is_other = 0;
    if (text.length == 0 || text.length > TEXT_BYTES_MAX)
        return 0;
    for (size_t at = 0; at < text.length; at++)
        is_other |= text.start[at] <= ' ' || text.start[at] >= 0x80;
    return !is_other;
}

static uint8_t *put_text(uint8_t *to, span text)
{
    memcpy(to, text.start, text.length);
    return to + text.length;
}

/* A field with its end. */
static uint8_t *put_field(uint8_t *to, span text)
{
    static const span null = {(const uint8_t *)"null", 4};
    to = put_text(to, text.length ? text : null);
    *to++ = NAME_SEPARATOR;
    return to;
}

static uint8_t *put_number(uint8_t *to, uint64_t number)
{
    uint8_t digits[DIGITS_MAX];
    size_t at = DIGITS_MAX;
    do
        digits[--at] = (uint8_t)('0' + number % 10);
    while (number /= 10);
    return put_text(to, (span){digits + at, DIGITS_MAX - at});
}

static uint8_t *put_hex(uint8_t *to, uint64_t number, int digits)
{
    for (int shift = 4 * (digits - 1); shift >= 0; shift -= 4)
        *to++ = (uint8_t)"0123456789ABCDEF"[number >> shift & 0xf];
    return to;
}

/* --- keys --------------------------------------------------------------------------------------------------------- */

/* The next word of a text, which is taken off it; empty behind the last one. */
static span next_word(span *text)
{
    while (text->length && *text->start == ' ')
        text->start++, text->length--;
    if (!text->length)
        return *text;
    const uint8_t *blank = memchr(text->start, ' ', text->length);
    span word = {text->start, blank == NULL ? text->length : (size_t)(blank - text->start)};
    text->start += word.length;
    text->length -= word.length;
    return word;
}

/* The slot of the word, or the free one where it belongs. */
static uint16_t *slot_of(trace_pack *self, span word)
{
    uint64_t hash = word.length;
    for (size_t at = 0; at < word.length; at += 8) {
        uint64_t chunk = 0;
        memcpy(&chunk, word.start + at, word.length - at < 8 ? word.length - at : 8);
        hash = (hash ^ chunk) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    for (size_t place = hash % WORD_SLOTS;; place = (place + 1) % WORD_SLOTS) {
        uint16_t *slot = &self->slots[place];
        if (*slot == 0)
            return slot;
        size_t at = *slot - 1u;
        if (at + word.length < self->keys_bytes && self->keys[at + word.length] == ' '
            && memcmp(self->keys + at, word.start, word.length) == 0)
            return slot;
    }
}

/* Bytes that the words of the text would take. */
static size_t bytes_of_new(trace_pack *self, span text)
{
    size_t bytes = 0;
    for (span word = next_word(&text); word.length; word = next_word(&text))
        if (*slot_of(self, word) == 0)
            bytes += word.length + 1;
    return bytes;
}

/* Adds the words, each once, as long as there is room. */
static void add_words(trace_pack *self, span text)
{
    for (span word = next_word(&text); word.length; word = next_word(&text)) {
        uint16_t *slot = slot_of(self, word);
        if (*slot != 0 || self->keys_bytes + word.length + 1 > self->keys_max)
            continue;
        *slot = (uint16_t)(self->keys_bytes + 1);
        *put_text(self->keys + self->keys_bytes, word) = ' ';
        self->keys_bytes += word.length + 1;
    }
}

/* --- records ------------------------------------------------------------------------------------------------------ */

/* Where a record of at most so many bytes can be written; NULL with an exception set. */
static uint8_t *reserve(trace_pack *self, size_t bytes)
{
    if (self->body_room - self->body_bytes < bytes) {
        size_t room = 2 * self->body_room + bytes;
        uint8_t *body = PyMem_Realloc(self->body, room);
        if (body == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        self->body = body;
        self->body_room = room;
    }
    return self->body + self->body_bytes;
}

/* Takes the record that was written at the end of the body, unless there is no room for it beside the others. */
static int take_record(trace_pack *self, size_t bytes, span id, span keys)
{
    if (self->count) {
        size_t more = id.length + keys.length + 2;
        if (self->keys_bytes + more > self->keys_max) /* are there words that are there already? */
            more = bytes_of_new(self, id) + bytes_of_new(self, keys);
        if (self->body_bytes + bytes > self->body_max || self->keys_bytes + more > self->keys_max) {
            self->is_full = 1;
            return FULL;
        }
    }
    add_words(self, id);
    add_words(self, keys);
    self->body_bytes += bytes;
    self->count++;
    self->room--;
    return DONE;
}

/* --- what was sent ------------------------------------------------------------------------------------------------ */

/* What the records of messages of one queue have in common: pack.py, SentForm. */
typedef struct {
    span head, stream, store_host, cost, id_host, end;
    unsigned int first_counter;
    int kind;
    long long log_offset;
} sent_form;

/* Properties without the id, with which ours end. */
static span without_id(span properties)
{
    static const char name[] = "UNIQ_KEY\x01";
    size_t bytes = sizeof name - 1 + ID_BYTES + 1;
    if (properties.length < bytes)
        return properties;
    span others = {properties.start, properties.length - bytes};
    const uint8_t *id = others.start + others.length;
    int is_apart = others.length == 0 || id[-1] == PAIR_SEPARATOR;
    int is_ours = memcmp(id, name, sizeof name - 1) == 0 && memchr(id, PAIR_SEPARATOR, bytes) == id + bytes - 1;
    return is_apart && is_ours ? others : properties;
}

static int put_sent_one(trace_pack *self, const sent_form *form, const record *found, Py_ssize_t index, uint64_t start,
                        int is_sampled)
{
    named named;
    if (!find_named(without_id(found->properties), &named))
        return UNKNOWN;
    if (is_same_text(named.mark, "true", 4))
        is_sampled = 1;
    else if (is_same_text(named.mark, "false", 5))
        is_sampled = 0;
    if (!is_sampled)
        return DONE;
    if (self->room <= 0) {
        self->dropped++;
        return DONE;
    }
    if (!is_plain(named.keys) || !is_plain(named.tag))
        return UNKNOWN;
    uint8_t *begin = reserve(self, form->head.length + form->stream.length + COUNTER_DIGITS + named.tag.length
                             + named.keys.length + form->store_host.length + form->cost.length
                             + 2 * form->id_host.length + form->end.length + 4 * DIGITS_MAX);
    if (begin == NULL)
        return FAILED;
    uint8_t *id = put_text(begin, form->head);
    uint8_t *to = put_hex(put_text(id, form->stream), form->first_counter + (uint64_t)index, COUNTER_DIGITS);
    span message_id = {id, (size_t)(to - id)};
    *to++ = NAME_SEPARATOR;
    to = put_field(put_field(put_field(to, named.tag), named.keys), form->store_host);
    to = put_number(to, found->body.length);
    *to++ = NAME_SEPARATOR;
    to = put_field(to, form->cost);
    *to++ = (uint8_t)('0' + (form->kind >= 0 ? form->kind : named.sharding_key.start != NULL ? 4 : 0));
    *to++ = NAME_SEPARATOR;
    if (form->id_host.length == 0) {
        to = put_field(to, form->id_host);
    } else {
        for (size_t at = 0; at < form->id_host.length; at++)
            to = put_hex(to, form->id_host.start[at], 2);
        to = put_hex(to, (uint64_t)form->log_offset + start, 16);
        *to++ = NAME_SEPARATOR;
    }
    to = put_text(to, form->end);
    return take_record(self, (size_t)(to - begin), message_id, named.keys);
}

static int parse_sent_form(PyObject *tuple, sent_form *form)
{
    span *texts[] = {&form->head, &form->stream, &form->store_host, &form->cost, &form->id_host, &form->end};
    const char *starts[6];
    Py_ssize_t lengths[6];
    if (!PyArg_ParseTuple(tuple, "y#y#Iy#y#iy#Ly#", &starts[0], &lengths[0], &starts[1], &lengths[1],
                          &form->first_counter, &starts[2], &lengths[2], &starts[3], &lengths[3], &form->kind,
                          &starts[4], &lengths[4], &form->log_offset, &starts[5], &lengths[5]))
        return 0;
    for (int n = 0; n < 6; n++)
        *texts[n] = (span){(const uint8_t *)starts[n], (size_t)lengths[n]};
    if (form->kind > 9)
        PyErr_SetString(PyExc_ValueError, "a kind of message has one digit");
    return form->kind <= 9;
}

static PyObject *pack_put_sent(PyObject *object, PyObject *arguments)
{
    trace_pack *self = (trace_pack *)object;
    Py_buffer records, starts;
    Py_ssize_t first, at, count, next, step;
    int is_marked;
    PyObject *tuple;
    sent_form form;
    if (!PyArg_ParseTuple(arguments, "y*y*nnnnnpO!:put_sent", &records, &starts, &first, &at, &count, &next,
                          &step, &is_marked, &PyTuple_Type, &tuple))
        return NULL;
    int became = DONE;
    if (!parse_sent_form(tuple, &form)) {
        became = FAILED;
    } else if (first < 0 || at < 0 || count < at || step < 0 || count > starts.len / 4 - first) {
        PyErr_SetString(PyExc_ValueError, "put_sent: a number is out of range");
        became = FAILED;
    }
    self->is_full = 0;
    if (became == DONE && step > 0 && next < at)
        next += (at - next + step - 1) / step * step;
    while (became == DONE) {
        if (!is_marked) /* the others are not looked at: they are not in the cache any more */
            at = step > 0 && next < count ? next : count;
        if (at >= count)
            break;
        uint32_t start;
        memcpy(&start, (const char *)starts.buf + 4 * (first + at), 4);
        int is_sampled = step > 0 && at == next;
        record found;
        if (start > (size_t)records.len
            || !record_at((const uint8_t *)records.buf + start, (size_t)records.len - start, &found))
            became = UNKNOWN;
        else
            became = put_sent_one(self, &form, &found, at, start, is_sampled);
        if (became != DONE)
            break;
        if (is_sampled)
            next += step;
        at++;
    }
    PyBuffer_Release(&records);
    PyBuffer_Release(&starts);
    return became == FAILED ? NULL : PyLong_FromSsize_t(at);
}

/* --- what was received -------------------------------------------------------------------------------------------- */

/* Whether the message with the id is one of the sample; 0 when Python has to look at it. */
static int is_in_sample(trace_pack *self, span id, unsigned long long period, int *is_sampled)
{
    *is_sampled = period == 1;
    if (period < 2)
        return 1;
    uint64_t number = 0;
    span stream = id;
    uint32_t crc;
    if (id.length == ID_BYTES) {
        stream.length -= COUNTER_DIGITS;
        if (memcmp(self->stream, stream.start, sizeof self->stream) != 0) {
            memcpy(self->stream, stream.start, sizeof self->stream);
            self->stream_crc = crc32_of(stream.start, stream.length);
        }
        crc = self->stream_crc;
        for (size_t at = stream.length; at < id.length; at++) {
            unsigned digit = id.start[at] - (unsigned)'0', letter = (id.start[at] | 0x20u) - (unsigned)'a';
            if (digit > 9 && letter > 5)
                return 0;
            number = 16 * number + (digit <= 9 ? digit : letter + 10);
        }
    } else {
        crc = crc32_of(stream.start, stream.length);
    }
    *is_sampled = (number + crc) % period == 0;
    return 1;
}

typedef struct {
    span head, middle, tail;
} call_form;

/* Whether the message is traced; 0 when Python has to look at it. */
static int is_chosen(trace_pack *self, PyObject *message, unsigned long long period, int *is_traced)
{
    named named;
    if (!find_named(received_properties(message), &named) || !is_id(named.unique_id)
        || !is_in_sample(self, named.unique_id, period, is_traced))
        return 0;
    if (is_same_text(named.mark, "true", 4))
        *is_traced = 1;
    else if (is_same_text(named.mark, "false", 5))
        *is_traced = 0;
    return 1;
}

static int put_call_one(trace_pack *self, const call_form *form, PyObject *message)
{
    named named;
    if (self->room <= 0) {
        self->dropped++;
        return DONE;
    }
    if (!find_named(received_properties(message), &named) || !is_id(named.unique_id) || !is_plain(named.keys))
        return UNKNOWN;
    uint8_t *begin = reserve(self, form->head.length + named.unique_id.length + form->middle.length
                             + named.keys.length + form->tail.length + 4 * DIGITS_MAX);
    if (begin == NULL)
        return FAILED;
    uint8_t *to = put_field(put_text(begin, form->head), named.unique_id);
    if (form->middle.length) {
        to = put_field(to, form->middle);
    } else {
        long tries = received_tries_before(message);
        to = put_number(to, tries < 0 ? 0 : tries > INT32_MAX ? INT32_MAX : (uint64_t)tries);
        *to++ = NAME_SEPARATOR;
    }
    to = put_field(to, named.keys) - 1; /* the tail has the separator, if one is wanted */
    to = put_text(to, form->tail);
    return take_record(self, (size_t)(to - begin), named.unique_id, named.keys);
}

/* Whether the queue is one of the topic; -1 with an exception set. */
static int is_of_topic(PyObject *queue, PyObject *topic)
{
    PyObject *its = PyObject_GetAttrString(queue, "topic");
    int is_same = its == NULL ? -1 : PyObject_RichCompareBool(its, topic, Py_EQ);
    Py_XDECREF(its);
    return is_same;
}

static PyObject *pack_choose(PyObject *object, PyObject *arguments)
{
    PyObject *messages, *topic, *found, *queue = NULL; /* the queue of the message before */
    Py_ssize_t at;
    unsigned long long period;
    int became = DONE, is_own = 0;
    if (!PyArg_ParseTuple(arguments, "OnKUO!:choose", &messages, &at, &period, &topic, &PyList_Type, &found))
        return NULL;
    Py_ssize_t count = PySequence_Size(messages);
    if (count < 0)
        return NULL;
    for (; became == DONE && at < count; at += became == DONE) {
        int is_traced = 0;
        PyObject *message = PySequence_GetItem(messages, at);
        if (message == NULL) {
            became = FAILED;
        } else if (!is_received(message) || received_queue(message) == NULL) {
            became = UNKNOWN;
        } else {
            if (received_queue(message) != queue) {
                Py_XDECREF(queue);
                queue = Py_NewRef(received_queue(message));
                is_own = is_of_topic(queue, topic);
            }
            if (is_own < 0)
                became = FAILED;
            else if (!is_own && !is_chosen((trace_pack *)object, message, period, &is_traced))
                became = UNKNOWN;
            else if (!is_own && is_traced && PyList_Append(found, message) < 0)
                became = FAILED;
        }
        Py_XDECREF(message);
    }
    Py_XDECREF(queue);
    return became == FAILED ? NULL : PyLong_FromSsize_t(at);
}

static PyObject *pack_put_calls(PyObject *object, PyObject *arguments)
{
    trace_pack *self = (trace_pack *)object;
    PyObject *messages;
    Py_ssize_t at, lengths[3];
    const char *starts[3];
    int became = DONE;
    if (!PyArg_ParseTuple(arguments, "On(y#y#y#):put_calls", &messages, &at, &starts[0], &lengths[0], &starts[1],
                          &lengths[1], &starts[2], &lengths[2]))
        return NULL;
    call_form form = {{(const uint8_t *)starts[0], (size_t)lengths[0]},
                      {(const uint8_t *)starts[1], (size_t)lengths[1]},
                      {(const uint8_t *)starts[2], (size_t)lengths[2]}};
    Py_ssize_t count = PySequence_Size(messages);
    if (count < 0)
        return NULL;
    self->is_full = 0;
    for (; became == DONE && at < count; at += became == DONE) {
        PyObject *message = PySequence_GetItem(messages, at);
        if (message == NULL)
            became = FAILED;
        else
            became = is_received(message) ? put_call_one(self, &form, message) : UNKNOWN;
        Py_XDECREF(message);
    }
    return became == FAILED ? NULL : PyLong_FromSsize_t(at);
}

/* --- the pack ----------------------------------------------------------------------------------------------------- */

static PyObject *pack_put(PyObject *object, PyObject *arguments)
{
    trace_pack *self = (trace_pack *)object;
    const char *text, *words;
    Py_ssize_t text_bytes, words_bytes;
    if (!PyArg_ParseTuple(arguments, "y#y#:put", &text, &text_bytes, &words, &words_bytes))
        return NULL;
    self->is_full = 0;
    if (self->room <= 0) {
        self->dropped++;
        Py_RETURN_TRUE;
    }
    uint8_t *to = reserve(self, (size_t)text_bytes);
    if (to == NULL)
        return NULL;
    memcpy(to, text, (size_t)text_bytes);
    span nothing = {to, 0}, keys = {(const uint8_t *)words, (size_t)words_bytes};
    return PyBool_FromLong(take_record(self, (size_t)text_bytes, nothing, keys) == DONE);
}

static PyObject *pack_take(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    trace_pack *self = (trace_pack *)object;
    Py_ssize_t keys_bytes = (Py_ssize_t)self->keys_bytes - (self->keys_bytes > 0); /* without the last blank */
    PyObject *taken = Py_BuildValue("y#y#", self->body, (Py_ssize_t)self->body_bytes, self->keys, keys_bytes);
    if (taken == NULL)
        return NULL;
    memset(self->slots, 0, sizeof self->slots);
    self->body_bytes = self->keys_bytes = 0;
    self->count = 0;
    self->is_full = 0;
    return taken;
}

static PyObject *pack_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Py_ssize_t body_max, keys_max, room;
    if (keywords != NULL)
        return PyErr_Format(PyExc_TypeError, "TracePack takes no keywords");
    if (!PyArg_ParseTuple(arguments, "nnn:TracePack", &body_max, &keys_max, &room))
        return NULL;
    if (body_max < 0 || body_max > INT32_MAX || keys_max < 0 || keys_max > KEYS_BYTES_MAX)
        return PyErr_Format(PyExc_ValueError, "TracePack: a number is out of range");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    trace_pack *self = (trace_pack *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->body_max = (size_t)body_max;
    self->keys_max = (size_t)keys_max;
    self->room = room;
    self->body_room = TEXT_BYTES_MAX;
    self->body = PyMem_Malloc(self->body_room);
    self->keys = PyMem_Malloc(self->keys_max + 1);
    if (self->body == NULL || self->keys == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void pack_dealloc(PyObject *object)
{
    trace_pack *self = (trace_pack *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyMem_Free(self->body);
    PyMem_Free(self->keys);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef pack_methods[] = {
    {"put", pack_put, METH_VARARGS, NULL},
    {"put_sent", pack_put_sent, METH_VARARGS, NULL},
    {"choose", pack_choose, METH_VARARGS, NULL},
    {"put_calls", pack_put_calls, METH_VARARGS, NULL},
    {"take", pack_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef pack_members[] = {
    {"count", T_PYSSIZET, offsetof(trace_pack, count), READONLY, NULL},
    {"room", T_PYSSIZET, offsetof(trace_pack, room), 0, NULL},
    {"dropped", T_PYSSIZET, offsetof(trace_pack, dropped), 0, NULL},
    {"is_full", T_BOOL, offsetof(trace_pack, is_full), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pack_slots[] = {
    {Py_tp_new, pack_new},
    {Py_tp_dealloc, pack_dealloc},
    {Py_tp_methods, pack_methods},
    {Py_tp_members, pack_members},
    {0, NULL},
};

static PyType_Spec pack_spec = {
    .name = "cometmq.native._accelerator.TracePack",
    .basicsize = sizeof(trace_pack),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pack_slots,
};

int trace_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &pack_spec, NULL);
    if (type == NULL)
        return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

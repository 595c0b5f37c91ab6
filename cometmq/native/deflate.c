/* Streams of zlib, RFC 1950 and 1951, of texts that repeat what stands a little before, as trace records do: in one pass,
 * with the codes that the format fixes. Several times as fast as zlib's quickest way. */

#include "accelerator.h"

#include "bytes.h"
#include "deflate.h"

#include <string.h>

#define WINDOW_BYTES 32768
#define MATCH_BYTES_MIN 4 /* the format allows 3; so many bytes are hashed */
#define MATCH_BYTES_MAX 258
#define HASH_BITS 12
#define END_OF_BLOCK 256
#define LITERALS 288 /* and lengths, which follow the end of the block */
#define DISTANCES 30
#define ADLER_BASE 65521
#define ADLER_BYTES_MAX 5536 /* the sums of so many bytes fit 32 bits */
#define ADLER_STEP 16
#define BYTES_BESIDE 16 /* head, begin and end of the block, checksum, and what is written together */

/* The fixed codes with their first bit lowest, and how many bits they have. */
static struct {
    uint16_t bits;
    uint8_t count;
} codes[LITERALS];
static uint8_t distance_codes[DISTANCES];

static uint32_t reversed(uint32_t bits, int count)
{
    uint32_t turned = 0;
    for (int at = 0; at < count; at++)
        turned |= (bits >> at & 1) << (count - 1 - at);
    return turned;
}

void deflate_prepare(void)
{
    static const struct {
        int end, count, first; /* of the symbols below `end`: the bits of a code, and the first code */
    } kinds[] = {{144, 8, 0x30}, {256, 9, 0x190}, {280, 7, 0}, {LITERALS, 8, 0xc0}};
    int symbol = 0;
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
        for (int begin = symbol; symbol < kinds[kind].end; symbol++) {
            codes[symbol].bits = (uint16_t)reversed((uint32_t)(kinds[kind].first + symbol - begin), kinds[kind].count);
            codes[symbol].count = (uint8_t)kinds[kind].count;
        }
    for (uint32_t code = 0; code < DISTANCES; code++)
        distance_codes[code] = (uint8_t)reversed(code, 5);
}

/* Bits that are written from the lowest of a byte on. Fewer than 32 wait. */
typedef struct {
    uint8_t *to;
    uint64_t waiting;
    unsigned count;
} bit_writer;

static void put_bits(bit_writer *out, uint32_t bits, unsigned count)
{
    out->waiting |= (uint64_t)bits << out->count;
    out->count += count;
    if (out->count < 32)
        return;
    for (int at = 0; at < 4; at++)
        out->to[at] = (uint8_t)(out->waiting >> 8 * at);
    out->to += 4;
    out->waiting >>= 32;
    out->count -= 32;
}

static void put_symbol(bit_writer *out, size_t symbol)
{
    put_bits(out, codes[symbol].bits, codes[symbol].count);
}

static unsigned highest_bit(uint32_t number)
{
    return 31u - (unsigned)__builtin_clz(number);
}

static void put_match(bit_writer *out, uint32_t length, uint32_t distance)
{
    uint32_t more = length - 3, back = distance - 1;
    if (length == MATCH_BYTES_MAX) {
        put_symbol(out, LITERALS - 3);
    } else if (more < 8) {
        put_symbol(out, 257 + more);
    } else { /* four codes for each power of two */
        unsigned extra = highest_bit(more) - 2;
        put_symbol(out, 257 + 4 * (extra + 1) + (more >> extra & 3));
        put_bits(out, more & ((1u << extra) - 1), extra);
    }
    if (back < 4) {
        put_bits(out, distance_codes[back], 5);
    } else { /* two codes */
        unsigned extra = highest_bit(back) - 1;
        put_bits(out, distance_codes[2 * (extra + 1) + (back >> extra & 1)], 5);
        put_bits(out, back & ((1u << extra) - 1), extra);
    }
}

/* A match of any length from MATCH_BYTES_MIN on, in parts that are no shorter than 3. */
static void put_long_match(bit_writer *out, size_t length, uint32_t distance)
{
    while (length > MATCH_BYTES_MAX) {
        size_t part = length < MATCH_BYTES_MAX + 3 ? length - 3 : MATCH_BYTES_MAX;
        put_match(out, (uint32_t)part, distance);
        length -= part;
    }
    put_match(out, (uint32_t)length, distance);
}

/* How many bytes from `at` on are those from `from` on. */
static size_t common_bytes(span text, size_t from, size_t at)
{
    size_t begin = at;
    while (at + 8 <= text.length && memcmp(text.start + from, text.start + at, 8) == 0)
        from += 8, at += 8;
    while (at < text.length && text.start[from] == text.start[at])
        from++, at++;
    return at - begin;
}

static uint32_t checksum(span text)
{
    const uint8_t *at = text.start;
    uint32_t low = 1, high = 0;
    for (size_t left = text.length; left;) {
        size_t run = left < ADLER_BYTES_MAX ? left : ADLER_BYTES_MAX;
        left -= run;
        for (; run >= ADLER_STEP; run -= ADLER_STEP, at += ADLER_STEP) {
            uint32_t sum = 0, weighted = 0;
            for (uint32_t n = 0; n < ADLER_STEP; n++) {
                sum += at[n];
                weighted += (ADLER_STEP - n) * at[n];
            }
            high += ADLER_STEP * low + weighted;
            low += sum;
        }
        for (; run; run--) {
            low += *at++;
            high += low;
        }
        low %= ADLER_BASE;
        high %= ADLER_BASE;
    }
    return high << 16 | low;
}

static void put_block(bit_writer *out, span text)
{
    uint32_t places[1 << HASH_BITS] = {0}; /* one above where four bytes with the hash were met last; 0: nowhere */
    size_t at = 0;
    put_bits(out, 3, 3); /* the last block, with the fixed codes */
    while (at + MATCH_BYTES_MIN <= text.length) {
        uint32_t *place = &places[load32(text.start + at) * 2654435761u >> (32 - HASH_BITS)];
        size_t from = *place;
        *place = (uint32_t)++at;
        if (from == 0 || at - from > WINDOW_BYTES || load32(text.start + from - 1) != load32(text.start + at - 1)) {
            put_symbol(out, text.start[at - 1]);
        } else {
            size_t length = common_bytes(text, from - 1, at - 1);
            put_long_match(out, length, (uint32_t)(at - from));
            at += length - 1;
        }
    }
    for (; at < text.length; at++)
        put_symbol(out, text.start[at]);
    put_symbol(out, END_OF_BLOCK);
    for (; out->count > 0; out->count -= out->count < 8 ? out->count : 8, out->waiting >>= 8)
        *out->to++ = (uint8_t)out->waiting;
}

PyObject *accelerator_deflate(PyObject *module, PyObject *object)
{
    (void)module;
    Py_buffer data;
    PyObject *stream = NULL;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0)
        return NULL;
    span text = span_of(&data);
    if (text.length > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "deflate: too many bytes");
    } else {
        uint8_t *bytes = PyMem_Malloc(text.length + text.length / 8 + BYTES_BESIDE); /* 9 bits for a byte at most */
        if (bytes == NULL) {
            PyErr_NoMemory();
        } else {
            store16(bytes, 0x7801); /* a window of 32 KiB, compressed quickly */
            bit_writer out = {bytes + 2, 0, 0};
            put_block(&out, text);
            store32(out.to, checksum(text));
            stream = PyBytes_FromStringAndSize((char *)bytes, out.to + 4 - bytes);
            PyMem_Free(bytes);
        }
    }
    PyBuffer_Release(&data);
    return stream;
}

#include "text.h"

#include <string.h>

int is_same(span one, span other)
{
    return one.length == other.length && memcmp(one.start, other.start, one.length) == 0;
}

int starts_with(span text, const char *prefix, size_t length)
{
    return text.length >= length && memcmp(text.start, prefix, length) == 0;
}

int has_blank(span text)
{
    for (size_t at = 0; at < text.length; at++) {
        uint8_t byte = text.start[at];
        if (byte <= ' ')
            return 1;
        if (byte >= 0xc2 && byte <= 0xe3 && at + 1 < text.length) {
            uint8_t next = text.start[at + 1];
            if ((byte == 0xc2 && (next == 0x85 || next == 0xa0)) || (byte == 0xe1 && next == 0x9a)
                || (byte == 0xe2 && (next == 0x80 || next == 0x81)) || (byte == 0xe3 && next == 0x80))
                return 1;
        }
    }
    return 0;
}

int is_listed(span list, span name)
{
    for (size_t at = 0; at < list.length; at += 1 + (size_t)list.start[at]) {
        span listed = {list.start + at + 1, list.start[at]};
        if (listed.length > list.length - at - 1)
            return 0;
        if (is_same(listed, name))
            return 1;
    }
    return 0;
}

/* The code point that begins with `lead`, whose next bytes are at `at`; its length in bytes goes to `length`.
 * -1 when it is none. */
static int32_t code_point(const uint8_t *at, size_t available, int *length)
{
    uint8_t lead = at[0];
    int count = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
    if (count == 0 || available < (size_t)count)
        return -1;
    int32_t point = lead & (0x7f >> count);
    for (int i = 1; i < count; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return -1;
        point = point << 6 | (at[i] & 0x3f);
    }
    static const int32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    if (point < least[count] || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff))
        return -1;
    *length = count;
    return point;
}

int java_hash(span text, uint32_t *hash)
{
    const uint8_t *at = text.start, *end = text.start + text.length;
    uint32_t code = *hash;
    while (at < end) {
        if (*at < 0x80) {
            code = 31 * code + *at++;
            continue;
        }
        int length = 0;
        int32_t point = code_point(at, (size_t)(end - at), &length);
        if (point < 0)
            return 0;
        at += length;
        if (point < 0x10000) {
            code = 31 * code + (uint32_t)point;
        } else {
            code = 31 * code + (uint32_t)(0xd800 + ((point - 0x10000) >> 10));
            code = 31 * code + (uint32_t)(0xdc00 + ((point - 0x10000) & 0x3ff));
        }
    }
    *hash = code;
    return 1;
}

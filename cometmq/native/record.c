#include "record.h"

#include "bytes.h"
#include "crc32.h"

#include <string.h>

#define LEVEL_DIGITS_MAX 2

int record_at(const uint8_t *start, size_t available, record *found)
{
    if (available < RECORD_BYTES_MIN || load32(start + AT_MAGIC) != MAGIC_V1)
        return 0;
    uint32_t size = load32(start + AT_SIZE);
    if (size < RECORD_BYTES_MIN || size > available || size > INT32_MAX)
        return 0;
    found->start = start;
    found->size = size;
    found->sys_flag = load32(start + AT_SYS_FLAG);
    found->born_host_bytes = found->sys_flag & BORN_HOST_V6 ? 20 : 8;
    found->store_host_bytes = found->sys_flag & STORE_HOST_V6 ? 20 : 8;
    size_t head = AT_BORN_HOST + found->born_host_bytes + 8 + found->store_host_bytes + 4 + 8 + 4;
    if (head + 3 > size) /* the length of the topic and that of the properties are still to come */
        return 0;
    found->store_time = start + AT_BORN_HOST + found->born_host_bytes;
    found->reconsume_times = found->store_time + 8 + found->store_host_bytes;
    uint32_t body_bytes = load32(start + head - 4);
    if (body_bytes > size - head - 3)
        return 0;
    found->body = (span){start + head, body_bytes};
    const uint8_t *topic = found->body.start + body_bytes;
    size_t left = size - head - body_bytes; /* at least 3 */
    if (topic[0] > left - 3)
        return 0;
    found->topic = (span){topic + 1, topic[0]};
    const uint8_t *properties = found->topic.start + found->topic.length;
    found->properties = (span){properties + 2, load16(properties)};
    return found->properties.length == left - 3 - found->topic.length;
}

int has_good_body(const record *found)
{
    uint32_t crc = crc32_of(found->body.start, found->body.length) & BODY_CRC_MASK;
    return crc == load32(found->start + AT_BODY_CRC);
}

/* The part of `text` before the first byte that is no text (a separator or NUL). */
static span text_of(span text, uint8_t *all_bits)
{
    size_t length = 0;
    uint8_t bits = 0;
    while (length < text.length && text.start[length] > PAIR_SEPARATOR)
        bits |= text.start[length++];
    *all_bits |= bits;
    return (span){text.start, length};
}

static span behind(span text, size_t length)
{
    return (span){text.start + length, text.length - length};
}

/* Reserved names begin with a capital, 1 or _; the most frequent names of all do so too, and are not. */
static int is_reserved(span name, span reserved, span reserved_prefix)
{
    uint8_t first = name.start[0];
    if (!((first >= 'A' && first <= 'Z') || first == '1' || first == '_'))
        return 0;
    if ((name.length == 4 && memcmp(name.start, "KEYS", 4) == 0)
        || (name.length == 8 && memcmp(name.start, "UNIQ_KEY", 8) == 0))
        return 0;
    return starts_with(name, (const char *)reserved_prefix.start, reserved_prefix.length) || is_listed(reserved, name);
}

int are_clean(span properties, span reserved, span reserved_prefix, span *tag)
{
    uint8_t all_bits = 0;
    span left = properties;
    *tag = (span){properties.start, 0};
    while (left.length) {
        span name = text_of(left, &all_bits);
        left = behind(left, name.length);
        if (!name.length || !left.length || left.start[0] != NAME_SEPARATOR)
            return 0;
        span value = text_of(behind(left, 1), &all_bits);
        left = behind(left, 1 + value.length);
        if (!value.length || (left.length && left.start[0] != PAIR_SEPARATOR))
            return 0;
        left = behind(left, left.length != 0);
        if (name.length == 4 && memcmp(name.start, "TAGS", 4) == 0)
            *tag = value;
        else if (is_reserved(name, reserved, reserved_prefix))
            return 0;
    }
    uint32_t ignored = 0;
    return all_bits < 0x80 || java_hash(properties, &ignored);
}

int are_framed(span properties, span *tag)
{
    const uint8_t *at = properties.start, *end = properties.start + properties.length;
    *tag = (span){properties.start, 0};
    if (properties.length && memchr(properties.start, 0, properties.length) != NULL)
        return 0;
    while (at < end) {
        const uint8_t *pair = at, *stop = memchr(at, PAIR_SEPARATOR, (size_t)(end - at));
        at = stop != NULL ? stop : end;
        span whole = {pair, (size_t)(at - pair)};
        if (whole.length && memchr(pair, NAME_SEPARATOR, whole.length) == NULL)
            return 0;
        if (starts_with(whole, "TAGS\x01", 5)) {
            *tag = behind(whole, 5);
            if (!tag->length)
                return 0;
        }
        at += at < end;
    }
    return 1;
}

int put_unit(uint8_t *unit, uint64_t log_offset, size_t size, span tag)
{
    uint32_t code = 0;
    if (!java_hash(tag, &code))
        return 0;
    store64(unit, log_offset);
    store32(unit + 8, (uint32_t)size);
    store64(unit + 12, (uint64_t)(int64_t)(int32_t)code); /* sign-extended */
    return 1;
}

long long timer_digits(span properties)
{
    long long number = 0;
    for (int at = TIMER_DIGITS_AT; at < TIMER_DIGITS_END; at++) {
        unsigned digit = properties.start[at] - (unsigned)'0';
        if (digit > 9)
            return -1;
        number = 10 * number + digit;
    }
    return number;
}

void put_timer_digits(uint8_t *properties, long long number)
{
    for (int at = TIMER_DIGITS_END - 1; at >= TIMER_DIGITS_AT; at--, number /= 10)
        properties[at] = (uint8_t)('0' + number % 10);
}

int is_timer(const record *found)
{
    static const char topic[] = "rmq_sys_wheel_timer";
    return found->topic.length == sizeof topic - 1 && memcmp(found->topic.start, topic, sizeof topic - 1) == 0
        && load32(found->start + AT_QUEUE_ID) == 0;
}

size_t leading_number(span text, size_t digits_max, long *number)
{
    size_t count = 0;
    for (*number = 0; count < text.length && count < digits_max; count++) {
        unsigned digit = text.start[count] - (unsigned)'0';
        if (digit > 9)
            break;
        *number = 10 * *number + (long)digit;
    }
    return count;
}

size_t level_length(span properties, long *level)
{
    static const char name[] = "DELAY\x01";
    size_t first = sizeof name - 1;
    if (!starts_with(properties, name, first))
        return 0;
    size_t digits = leading_number(behind(properties, first), LEVEL_DIGITS_MAX, level);
    return digits ? first + digits : 0;
}

/* Whether a name behind the first one begins so. */
static int has_behind(span properties, const char *name, size_t length)
{
    const uint8_t *at = properties.start, *end = properties.start + properties.length;
    for (; (at = memchr(at, PAIR_SEPARATOR, (size_t)(end - at))) != NULL; at++)
        if (starts_with((span){at, (size_t)(end - at)}, name, length))
            return 1;
    return 0;
}

int is_delayed(const record *found)
{
    static const char topic[] = "SCHEDULE_TOPIC_XXXX";
    return found->topic.length == sizeof topic - 1 && memcmp(found->topic.start, topic, sizeof topic - 1) == 0;
}

long level_of(const record *found)
{
    static const char next[] = "\x02REAL_TOPIC\x01", other[] = "\002" "DELAY\x01"; /* two: D is a hex digit */
    long level;
    size_t length = level_length(found->properties, &level);
    if (!length || !starts_with(behind(found->properties, length), next, sizeof next - 1)
        || has_behind(found->properties, other, sizeof other - 1))
        return 0;
    return level;
}

int says_more_of_time(span properties)
{
    return has_behind(properties, "\x02TIMER_DEL", 10);
}

long long timer_due(const record *found)
{
    static const char first[] = "TIMER_OUT_MS\x01", second[] = "\x02REAL_TOPIC\x01";
    span properties = found->properties;
    if (properties.length < TIMER_DIGITS_END + sizeof second - 1
        || memcmp(properties.start, first, sizeof first - 1) != 0
        || memcmp(properties.start + TIMER_DIGITS_END, second, sizeof second - 1) != 0 || says_more_of_time(properties))
        return -1;
    return timer_digits(properties);
}

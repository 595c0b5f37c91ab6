/* A record in the log, and its properties: docs/format/record.md and properties.md.
 *
 * Nothing here is read before its place was compared with what is available.
 */

#ifndef COMETMQ_RECORD_H
#define COMETMQ_RECORD_H

#include "text.h"

#include <stddef.h>
#include <stdint.h>

#define MAGIC_V1 0xdaa320a7u
#define RECORD_BYTES_MIN 91 /* of one with IPv4 hosts, without body, topic and properties */
#define UNIT_BYTES 20       /* docs/format/queueunit.md */
#define BODY_CRC_MASK 0x7fffffffu
#define NAME_SEPARATOR 1 /* between a property's name and its value */
#define PAIR_SEPARATOR 2 /* behind a property */

#define BORN_HOST_V6 0x10u /* bits of SYSFLAG */
#define STORE_HOST_V6 0x20u
#define HOSTS_V6 (BORN_HOST_V6 | STORE_HOST_V6)
#define COMPRESSED 0x1u
#define COMPRESSION 0x301u /* compressed or not, and the four kinds */
#define TRANSACTION 0x0cu
#define ROLLBACK 0x0cu

/* Places in a record that do not depend on the hosts' lengths. */
enum {
    AT_SIZE = 0,
    AT_MAGIC = 4,
    AT_BODY_CRC = 8,
    AT_QUEUE_ID = 12,
    AT_FLAG = 16,
    AT_QUEUE_OFFSET = 20,
    AT_LOG_OFFSET = 28,
    AT_SYS_FLAG = 36,
    AT_BORN_TIME = 40,
    AT_BORN_HOST = 48,
};

typedef struct {
    const uint8_t *start;
    size_t size; /* TOTALSIZE */
    uint32_t sys_flag;
    size_t born_host_bytes, store_host_bytes;
    const uint8_t *store_time;      /* the born host ends here, 8 bytes before the store host */
    const uint8_t *reconsume_times; /* 4 bytes; the prepared offset's 8 and the body's length follow */
    span body, topic, properties;
} record;

/* Reads the frame of the record at `start`. 0 unless a record of version 1, with lengths that add up to its size,
 * lies whole in the `available` bytes. */
int record_at(const uint8_t *start, size_t available, record *found);

int has_good_body(const record *found);

/* Whether a producer may have sent these properties: whole pairs, nothing empty, no reserved name, UTF-8. `reserved`
 * lists whole names and, in `reserved_prefix`, how a reserved one may begin. `tag` becomes the value of the last TAGS,
 * or empty. What this refuses may still be allowed. */
int are_clean(span properties, span reserved, span reserved_prefix, span *tag);

/* Whether such properties may stand in a log: no NUL, and a separator in every pair. `tag` as above; an empty TAGS is
 * refused, because then an earlier one may count. */
int are_framed(span properties, span *tag);

/* Where the time stands in the properties of a message that waits for it: docs/format/batch.md. */
#define TIMER_DIGITS_AT 13
#define TIMER_DIGITS_END 26
#define TIMER_MS_MIN 1000000000000LL /* of a time that a sender names */
#define TIMER_MS_MAX 9999999999999LL

/* The number there, of which the caller knows that it is there; -1 when it is none. */
long long timer_digits(span properties);

void put_timer_digits(uint8_t *properties, long long number);

/* The number that a text begins with, of so many digits at most, which fit a long; how many there are. */
size_t leading_number(span text, size_t digits_max, long *number);

/* How long the delay level is that the properties begin with, as a pair without its end; 0 when they do not. */
size_t level_length(span properties, long *level);

/* Whether the record lies in a queue of a delay level. */
int is_delayed(const record *found);

/* Which level it waits for; 0 when Python has to look at it. */
long level_of(const record *found);

/* Whether more names than TIMER_OUT_MS say something of the time, or that the record is a tombstone. */
int says_more_of_time(span properties);

/* When a record of the timer topic's queue is due; -1 when Python has to look at it. */
long long timer_due(const record *found);

/* Whether the record lies in that queue. */
int is_timer(const record *found);

/* Writes a consume-queue unit; 0 when the tag is not UTF-8. */
int put_unit(uint8_t *unit, uint64_t log_offset, size_t size, span tag);

#endif

/* Text as Java counts it: UTF-8 in, UTF-16 code units hashed. docs/format/taghash.md. */

#ifndef COMETMQ_TEXT_H
#define COMETMQ_TEXT_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const uint8_t *start;
    size_t length;
} span;

/* Continues Java's hash of a string over `text`: h = 31 * h + c for each UTF-16 code unit.
 * 0, and `hash` undefined, when the text is not UTF-8 (surrogates and overlong forms are not). */
int java_hash(span text, uint32_t *hash);

int is_same(span one, span other);

int starts_with(span text, const char *prefix, size_t length);

/* Whether a text has a blank, or something that could be one: those of Unicode begin with these bytes. */
int has_blank(span text);

/* Whether a list of names, each behind a byte that tells its length, holds `name`. */
int is_listed(span list, span name);

#endif

/* The CRC-32 of zlib, gzip and Ethernet: polynomial 0x04c11db7, bits reflected, all ones in and out. */

#ifndef COMETMQ_CRC32_H
#define COMETMQ_CRC32_H

#include <stddef.h>
#include <stdint.h>

/* Computes the tables and looks at the processor; once, before the first crc32_of. */
void crc32_prepare(void);

/* The CRC-32 of `length` bytes, as zlib.crc32 gives it. */
uint32_t crc32_of(const uint8_t *data, size_t length);

/* The same without the processor's help: what runs where there is none, for tests. */
uint32_t crc32_portable(const uint8_t *data, size_t length);

/* Whether crc32_of multiplies polynomials in hardware. */
int crc32_is_folded(void);

#endif

/* Numbers as the formats have them: big-endian, at any address. */

#ifndef COMETMQ_BYTES_H
#define COMETMQ_BYTES_H

#include <stdint.h>

static inline uint32_t load16(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static inline uint32_t load32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t load64(const uint8_t *at)
{
    return (uint64_t)load32(at) << 32 | load32(at + 4);
}

static inline void store16(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static inline void store32(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 24);
    at[1] = (uint8_t)(value >> 16);
    at[2] = (uint8_t)(value >> 8);
    at[3] = (uint8_t)value;
}

static inline void store64(uint8_t *at, uint64_t value)
{
    store32(at, (uint32_t)(value >> 32));
    store32(at + 4, (uint32_t)value);
}

#endif

/* Two ways to the same number.
 *
 * Portable: sixteen bytes a step, one table each ("slicing"). tables[k][b] is what byte b does to the remainder
 * when k more bytes follow it.
 *
 * x86-64 with PCLMULQDQ: the message is folded. A 128-bit piece A that stands D bits before another one, B, may be
 * replaced by A * x^D mod P added to B: the remainder stays the same. Four pieces are folded at a time over 512 bits,
 * so that the processor multiplies in parallel; then they are folded into one over 128 bits, and the sixteen bytes
 * that are left take one step of the tables.
 *
 * Bits are reflected: bit i of a 64-bit lane is the coefficient of x^(63-i). The carry-less product of two such lanes
 * is, read the same way, the product of the polynomials times x; therefore every exponent below is one less than
 * the distance. The lane that comes first in memory is the higher one, 64 bits further away.
 */

#include "crc32.h"

#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FOLDS 1
#include <immintrin.h>
#else
#define FOLDS 0
#endif

#define POLYNOMIAL 0xedb88320u /* reflected, without x^32 */
#define SLICES 16
#define FOLD_BYTES_MIN 64

static uint32_t tables[SLICES][256];

static void prepare_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; bit++)
            rest = rest >> 1 ^ (rest & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = rest;
    }
    for (int slice = 1; slice < SLICES; slice++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = tables[slice - 1][byte];
            tables[slice][byte] = before >> 8 ^ tables[0][before & 0xff];
        }
}

/* The remainder `crc` continued over `length` bytes; neither is inverted here. */
static uint32_t continue_sliced(uint32_t crc, const uint8_t *data, size_t length)
{
    for (; length >= SLICES; data += SLICES, length -= SLICES) {
        uint32_t next = tables[15][data[0] ^ (crc & 0xff)] ^ tables[14][data[1] ^ (crc >> 8 & 0xff)]
                      ^ tables[13][data[2] ^ (crc >> 16 & 0xff)] ^ tables[12][data[3] ^ crc >> 24];
        for (int at = 4; at < SLICES; at++)
            next ^= tables[SLICES - 1 - at][data[at]];
        crc = next;
    }
    for (; length; data++, length--)
        crc = crc >> 8 ^ tables[0][(crc ^ *data) & 0xff];
    return crc;
}

uint32_t crc32_portable(const uint8_t *data, size_t length)
{
    return ~continue_sliced(0xffffffffu, data, length);
}

#if FOLDS

static int folds;
static uint64_t over_512[2], over_128[2]; /* factors for the lane that comes first, and for the other */

/* x^exponent mod P as a reflected lane. */
static uint64_t power_of_x(int exponent)
{
    uint32_t rest = 0x80000000u; /* x^0 */
    while (exponent--)
        rest = rest >> 1 ^ (rest & 1 ? POLYNOMIAL : 0);
    return (uint64_t)rest << 32;
}

static void prepare_folding(void)
{
    __builtin_cpu_init();
    folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse2");
    over_512[0] = power_of_x(512 + 64 - 1);
    over_512[1] = power_of_x(512 - 1);
    over_128[0] = power_of_x(128 + 64 - 1);
    over_128[1] = power_of_x(128 - 1);
}

__attribute__((target("pclmul,sse2"))) static inline __m128i folded(__m128i piece, __m128i factors, __m128i onto)
{
    __m128i first = _mm_clmulepi64_si128(piece, factors, 0x00);
    __m128i second = _mm_clmulepi64_si128(piece, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(first, second), onto);
}

__attribute__((target("pclmul,sse2"))) static uint32_t crc32_folded(const uint8_t *data, size_t length)
{
    const __m128i far = _mm_loadu_si128((const __m128i *)over_512);
    const __m128i near = _mm_loadu_si128((const __m128i *)over_128);
    const __m128i *pieces = (const __m128i *)data;
    __m128i a = _mm_xor_si128(_mm_loadu_si128(pieces), _mm_cvtsi32_si128(-1));
    __m128i b = _mm_loadu_si128(pieces + 1);
    __m128i c = _mm_loadu_si128(pieces + 2);
    __m128i d = _mm_loadu_si128(pieces + 3);
    data += 64;
    length -= 64;
    for (; length >= 64; data += 64, length -= 64) {
        pieces = (const __m128i *)data;
        a = folded(a, far, _mm_loadu_si128(pieces));
        b = folded(b, far, _mm_loadu_si128(pieces + 1));
        c = folded(c, far, _mm_loadu_si128(pieces + 2));
        d = folded(d, far, _mm_loadu_si128(pieces + 3));
    }
    a = folded(folded(folded(a, near, b), near, c), near, d);
    for (; length >= 16; data += 16, length -= 16)
        a = folded(a, near, _mm_loadu_si128((const __m128i *)data));
    uint8_t left[16];
    _mm_storeu_si128((__m128i *)left, a);
    return ~continue_sliced(continue_sliced(0, left, sizeof left), data, length);
}

#endif

void crc32_prepare(void)
{
    prepare_tables();
#if FOLDS
    prepare_folding();
#endif
}

uint32_t crc32_of(const uint8_t *data, size_t length)
{
#if FOLDS
    if (folds && length >= FOLD_BYTES_MIN)
        return crc32_folded(data, length);
#endif
    return crc32_portable(data, length);
}

int crc32_is_folded(void)
{
#if FOLDS
    return folds;
#else
    return 0;
#endif
}

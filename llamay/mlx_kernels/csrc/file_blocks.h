/* Reads the blocks of GGUF files, whose structures are those of ggml-common.h.
 *
 * All inline: with the format known, little is left of it.
 */
#ifndef LLAMAY_FILE_BLOCKS_H
#define LLAMAY_FILE_BLOCKS_H

#include <string.h>

#include "compiler.h"
#include "weight_formats.h"

/* 32 weights of one row, on the way from the file to their lane. */
typedef struct {
    uint32_t quads[QUADS];          /* byte j of quad i: the code of weight 4 * i + j */
    int8_t scales[2], minima[2];    /* as many as the format has */
} BlockCodes;

typedef struct {
    int bytes;          /* of a block; of a value in float formats */
    int half_offset[2]; /* of the scale and the minimum, float16 */
    int codes;          /* where the codes' lowest bits stand */
    int high;           /* where their other bits stand */
    int scales;         /* where the sub-blocks' scales stand */
} FileBlock;

INLINE FileBlock file_block(const WeightFormat format) {
    switch (format) {
    case F32: return (FileBlock){.bytes = 4};
    case F16:
    case BF16: return (FileBlock){.bytes = 2};
    case Q4_0:
    case IQ4_NL: return (FileBlock){.bytes = 18, .codes = 2};
    case Q4_1: return (FileBlock){.bytes = 20, .half_offset = {0, 2}, .codes = 4};
    case Q5_0: return (FileBlock){.bytes = 22, .high = 2, .codes = 6};
    case Q5_1: return (FileBlock){.bytes = 24, .half_offset = {0, 2}, .high = 4, .codes = 8};
    case Q8_0: return (FileBlock){.bytes = 34, .codes = 2};
    case Q2_K: return (FileBlock){.bytes = 84, .half_offset = {80, 82}, .scales = 0, .codes = 16};
    case Q3_K: return (FileBlock){.bytes = 110, .half_offset = {108}, .high = 0, .codes = 32, .scales = 96};
    case Q4_K: return (FileBlock){.bytes = 144, .half_offset = {0, 2}, .scales = 4, .codes = 16};
    case Q5_K: return (FileBlock){.bytes = 176, .half_offset = {0, 2}, .scales = 4, .high = 16, .codes = 48};
    case Q6_K: return (FileBlock){.bytes = 210, .half_offset = {208}, .codes = 0, .high = 128, .scales = 192};
    case IQ4_XS: return (FileBlock){.bytes = 136, .scales = 2, .codes = 8};
    }
    return (FileBlock){0};
}

INLINE int file_block_bytes(const WeightFormat format) { return file_block(format).bytes; }

/* Where in a file block the float16 scale (0) or minimum (1) stands. */
INLINE int file_half_offset(const WeightFormat format, int half) { return file_block(format).half_offset[half]; }

INLINE uint32_t quad_at(const uint8_t *at) {
    uint32_t quad;
    memcpy(&quad, at, sizeof quad);
    return quad;
}

/* `width` bits of every byte, from bit `at`. */
INLINE uint32_t field(uint32_t quad, int at, int width) { return quad >> at & 0x01010101u * ((1u << width) - 1); }

/* The lowest four bits, one to a byte. */
INLINE uint32_t spread_bits(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

/* 16 bytes: weights 0 to 15 in their low halves, 16 to 31 in their high ones. */
INLINE void read_nibbles(const uint8_t *codes, BlockCodes *out) {
    for (int i = 0; i < QUADS / 2; i++) {
        uint32_t quad = quad_at(codes + 4 * i);
        out->quads[i] = field(quad, 0, 4);
        out->quads[i + QUADS / 2] = field(quad, 4, 4);
    }
}

/* 32 bytes, of each the field of `width` bits from bit `at`; it becomes bit `to` and higher of the code. */
INLINE void add_fields(const uint8_t *bytes, int at, int width, int to, BlockCodes *out) {
    for (int i = 0; i < QUADS; i++) out->quads[i] |= field(quad_at(bytes + 4 * i), at, width) << to;
}

/* Sub-block j's 6-bit scale and minimum of the 12 bytes in which Q4_K and Q5_K keep eight of each. */
INLINE void read_k_scale(const uint8_t *packed, int j, BlockCodes *out) {
    if (j < 4) {
        out->scales[0] = (int8_t)(packed[j] & 63);
        out->minima[0] = (int8_t)(packed[j + 4] & 63);
    } else {
        out->scales[0] = (int8_t)((packed[j + 4] & 15) | packed[j - 4] >> 6 << 4);
        out->minima[0] = (int8_t)(packed[j + 4] >> 4 | packed[j] >> 6 << 4);
    }
}

/* Scale j of Q3_K's sixteen: four low bits in 8 bytes, two high ones in the 4 that follow. */
INLINE int8_t q3_k_scale(const uint8_t *packed, int j) {
    int low = packed[j % 8] >> (j < 8 ? 0 : 4) & 15, high = packed[8 + j % 4] >> 2 * (j / 4) & 3;
    return (int8_t)((low | high << 4) - 32);
}

INLINE void read_q2_k(const uint8_t *source, FileBlock at, int b, BlockCodes *out) {
    add_fields(source + at.codes + 32 * (b / 4), 2 * (b % 4), 2, 0, out);
    for (int half = 0; half < 2; half++) {
        out->scales[half] = (int8_t)(source[at.scales + 2 * b + half] & 15);
        out->minima[half] = (int8_t)(source[at.scales + 2 * b + half] >> 4);
    }
}

INLINE void read_q3_k(const uint8_t *source, FileBlock at, int b, BlockCodes *out) {
    add_fields(source + at.codes + 32 * (b / 4), 2 * (b % 4), 2, 0, out);
    add_fields(source + at.high, b, 1, 2, out);
    for (int half = 0; half < 2; half++) out->scales[half] = q3_k_scale(source + at.scales, 2 * b + half);
}

INLINE void read_q6_k(const uint8_t *source, FileBlock at, int b, BlockCodes *out) {
    add_fields(source + at.codes + 64 * (b / 4) + 32 * (b % 2), b % 4 < 2 ? 0 : 4, 4, 0, out);
    add_fields(source + at.high + 32 * (b / 4), 2 * (b % 4), 2, 4, out);
    memcpy(out->scales, source + at.scales + 2 * b, 2);
}

INLINE void read_iq4_xs(const uint8_t *source, FileBlock at, int b, BlockCodes *out) {
    int low = source[at.scales + 2 + b / 2] >> 4 * (b % 2) & 15, high = source[at.scales + b / 4] >> 2 * (b % 4) & 3;
    out->scales[0] = (int8_t)((low | high << 4) - 32);
    read_nibbles(source + at.codes + 16 * b, out);
}

/* The codes of block `b` of a file block, which holds span / 32 of them. */
INLINE void read_block_codes(const WeightFormat format, const uint8_t *source, int b, BlockCodes *out) {
    FileBlock at = file_block(format);
    memset(out, 0, sizeof *out);
    switch (format) {
    case Q4_0:
    case Q4_1:
    case IQ4_NL: read_nibbles(source + at.codes, out); break;
    case Q5_0:
    case Q5_1:
        read_nibbles(source + at.codes, out);
        for (int i = 0; i < QUADS; i++) out->quads[i] |= spread_bits(quad_at(source + at.high) >> 4 * i) << 4;
        break;
    case Q8_0: memcpy(out->quads, source + at.codes, BLOCK); break;
    case Q2_K: read_q2_k(source, at, b, out); break;
    case Q3_K: read_q3_k(source, at, b, out); break;
    case Q4_K:
    case Q5_K:
        add_fields(source + at.codes + 32 * (b / 2), 4 * (b % 2), 4, 0, out);
        if (format == Q5_K) add_fields(source + at.high, b, 1, 4, out);
        read_k_scale(source + at.scales, b, out);
        break;
    case Q6_K: read_q6_k(source, at, b, out); break;
    case IQ4_XS: read_iq4_xs(source, at, b, out); break;
    case F32:
    case F16:
    case BF16: break;
    }
}

#endif

/* The weight formats, and how the kernels want each packed: rows in groups of 16, one lane each.
 *
 * F32, F16, BF16: [groups][columns][16] values.
 *
 * The others: [groups][columns / span] spans of `span` weights, 32 or 256. A span is [span / 32] blocks of
 *     codes:  vectors of 64 bytes; byte 4 * r + j of quad i belongs to weight 4 * i + j of row r
 *     scales: [sub_scales][16] int8, each of as many of the 32 weights as there are scales
 *     minima: [sub_minima][16] int8, likewise
 * and then [halves][16] float16: the span's scales, and minima if it has any.
 *
 * With s the sub-block's scale (1 if it has none), a weight is scale * s * (code - offset), or with a table
 * scale * s * table[code]; minima add `minimum`, and sub_minima take off minimum * m.
 */
#ifndef LLAMAY_WEIGHT_FORMATS_H
#define LLAMAY_WEIGHT_FORMATS_H

#include <stdint.h>

#include "compiler.h"

enum {
    LANES = 16,      /* output rows in one packed group; positions in one group of keys */
    BLOCK = 32,      /* weights or activations of one block */
    SUPERBLOCK = 256,
    QUADS = BLOCK / 4,
    VECTOR = 4 * LANES, /* bytes: a quad of codes for each lane */
    HALF = 2,
};

/* ggml's type ids of the formats the kernels take. */
typedef enum {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13,
    Q6_K = 14, IQ4_NL = 20, IQ4_XS = 23, BF16 = 30
} WeightFormat;

/* How 32 codes lie in vectors, each field at a place of its own in the byte:
 *     nibbles: 4 vectors; quad i is in the low half of vector i, or the high half of vector i - 4
 *     pairs:   2 vectors; quad i is in bits 2 * (i % 4) of vector i / 4
 *     bits:    1 vector; quad i is in bit i
 *     bytes:   8 vectors
 * A code is made of nibbles first, then pairs, then bits, from its lowest bit upwards; of bytes, which are signed.
 */
typedef struct {
    int nibbles, pairs, bits, bytes; /* vectors */
    int offset, table;
    int sub_scales, sub_minima;
    int halves;
    int span; /* 0: floats */
} Packing;

INLINE Packing packing(WeightFormat format) {
    switch (format) {
    case Q4_0: return (Packing){.nibbles = 4, .offset = 8, .halves = 1, .span = BLOCK};
    case Q4_1: return (Packing){.nibbles = 4, .halves = 2, .span = BLOCK};
    case Q5_0: return (Packing){.nibbles = 4, .bits = 1, .offset = 16, .halves = 1, .span = BLOCK};
    case Q5_1: return (Packing){.nibbles = 4, .bits = 1, .halves = 2, .span = BLOCK};
    case Q8_0: return (Packing){.bytes = 8, .halves = 1, .span = BLOCK};
    case IQ4_NL: return (Packing){.nibbles = 4, .table = 1, .halves = 1, .span = BLOCK};
    case Q2_K: return (Packing){.pairs = 2, .sub_scales = 2, .sub_minima = 2, .halves = 2, .span = SUPERBLOCK};
    case Q3_K: return (Packing){.pairs = 2, .bits = 1, .offset = 4, .sub_scales = 2, .halves = 1, .span = SUPERBLOCK};
    case Q4_K: return (Packing){.nibbles = 4, .sub_scales = 1, .sub_minima = 1, .halves = 2, .span = SUPERBLOCK};
    case Q5_K:
        return (Packing){.nibbles = 4, .bits = 1, .sub_scales = 1, .sub_minima = 1, .halves = 2, .span = SUPERBLOCK};
    case Q6_K:
        return (Packing){.nibbles = 4, .pairs = 2, .offset = 32, .sub_scales = 2, .halves = 1, .span = SUPERBLOCK};
    case IQ4_XS: return (Packing){.nibbles = 4, .table = 1, .sub_scales = 1, .halves = 1, .span = SUPERBLOCK};
    case F32:
    case F16:
    case BF16: break;
    }
    return (Packing){0};
}

/* What the codes of a format with a table stand for (ggml's kvalues_iq4nl). */
static const int8_t code_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline int is_quantized(WeightFormat format) { return packing(format).span != 0; }

/* Bytes of a value of a float format. */
INLINE int float_bytes(WeightFormat format) { return format == F32 ? 4 : 2; }

/* Bytes of the parts of a packed block. */
INLINE int code_bytes(Packing p) { return (p.nibbles + p.pairs + p.bits + p.bytes) * VECTOR; }
INLINE int block_bytes(Packing p) { return code_bytes(p) + (p.sub_scales + p.sub_minima) * LANES; }
INLINE int span_bytes(Packing p) { return p.span / BLOCK * block_bytes(p) + p.halves * LANES * HALF; }

/* Lowest bit of the code's fields after the nibbles. */
INLINE int pairs_at(Packing p) { return p.nibbles ? 4 : 0; }
INLINE int bits_at(Packing p) { return pairs_at(p) + (p.pairs ? 2 : 0); }

/* Packing (pack.c). */
int format_known(int type_id);
int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t columns);
int64_t row_bytes(WeightFormat format, int64_t columns);
void pack_rows(WeightFormat format, int64_t rows, int64_t columns, const uint8_t *source, uint8_t *packed);
float half_to_float(uint16_t half);

#endif

/* Packs weights into groups of 16 rows (layout in weight_formats.h), and reads single rows back. */
#include <string.h>

#include "file_blocks.h"
#include "kernels.h"

int format_known(int type_id) { return file_block_bytes((WeightFormat)type_id) != 0; }

static int64_t group_bytes(WeightFormat format, int64_t columns) {
    Packing p = packing(format);
    return p.span ? columns / p.span * span_bytes(p) : columns * LANES * float_bytes(format);
}

int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t columns) {
    return (rows + LANES - 1) / LANES * group_bytes(format, columns);
}

int64_t row_bytes(WeightFormat format, int64_t columns) {
    int span = packing(format).span;
    return (span ? columns / span : columns) * file_block_bytes(format);
}

/* The quad of lane `lane` in a vector of codes. */
INLINE void store_quad(uint8_t *codes, int vector, int lane, uint32_t quad) {
    memcpy(codes + vector * VECTOR + 4 * lane, &quad, sizeof quad);
}

static uint32_t load_quad(const uint8_t *codes, int vector, int lane) {
    uint32_t quad;
    memcpy(&quad, codes + vector * VECTOR + 4 * lane, sizeof quad);
    return quad;
}

INLINE void pack_codes(const Packing p, const BlockCodes *block, int lane, uint8_t *codes) {
    const uint32_t *quads = block->quads, nibble = 0x0F0F0F0F, pair = 0x03030303, bit = 0x01010101;
    for (int v = 0; v < p.bytes; v++) store_quad(codes, v, lane, quads[v]);
    for (int v = 0; v < p.nibbles; v++)
        store_quad(codes, v, lane, (quads[v] & nibble) | (quads[v + 4] & nibble) << 4);
    codes += (p.bytes + p.nibbles) * VECTOR;
    for (int v = 0; v < p.pairs; v++) {
        uint32_t four = 0;
        for (int i = 0; i < 4; i++) four |= (quads[4 * v + i] >> pairs_at(p) & pair) << 2 * i;
        store_quad(codes, v, lane, four);
    }
    if (!p.bits) return;
    uint32_t eight = 0;
    for (int i = 0; i < QUADS; i++) eight |= (quads[i] >> bits_at(p) & bit) << i;
    store_quad(codes, p.pairs, lane, eight);
}

static void unpack_codes(Packing p, const uint8_t *codes, int lane, BlockCodes *block) {
    const uint32_t nibble = 0x0F0F0F0F, pair = 0x03030303, bit = 0x01010101;
    const uint8_t *rest = codes + (p.bytes + p.nibbles) * VECTOR;
    for (int i = 0; i < QUADS; i++) {
        uint32_t quad = 0;
        if (p.bytes) quad = load_quad(codes, i, lane);
        if (p.nibbles) quad = load_quad(codes, i % 4, lane) >> (i < 4 ? 0 : 4) & nibble;
        if (p.pairs) quad |= (load_quad(rest, i / 4, lane) >> 2 * (i % 4) & pair) << pairs_at(p);
        if (p.bits) quad |= (load_quad(rest, p.pairs, lane) >> i & bit) << bits_at(p);
        block->quads[i] = quad;
    }
    for (int s = 0; s < p.sub_scales; s++) block->scales[s] = (int8_t)codes[code_bytes(p) + s * LANES + lane];
    for (int s = 0; s < p.sub_minima; s++)
        block->minima[s] = (int8_t)codes[code_bytes(p) + (p.sub_scales + s) * LANES + lane];
}

/* One row's next span into its lane of a group of 16. */
INLINE void pack_span(const WeightFormat format, const uint8_t *source, int lane, uint8_t *span) {
    const Packing p = packing(format);
    const int blocks = p.span / BLOCK;
    for (int b = 0; b < blocks; b++) {
        uint8_t *block = span + b * block_bytes(p), *scales = block + code_bytes(p);
        BlockCodes codes;
        read_block_codes(format, source, b, &codes);
        pack_codes(p, &codes, lane, block);
        for (int i = 0; i < p.sub_scales; i++) scales[i * LANES + lane] = (uint8_t)codes.scales[i];
        for (int i = 0; i < p.sub_minima; i++) scales[(p.sub_scales + i) * LANES + lane] = (uint8_t)codes.minima[i];
    }
    uint8_t *halves = span + blocks * block_bytes(p);
    for (int h = 0; h < p.halves; h++)
        memcpy(halves + (h * LANES + lane) * HALF, source + file_half_offset(format, h), HALF);
}

/* A group's rows, together through the columns: what they write lies side by side. What they read does not, in more
 * streams than the hardware follows: each fetches the same place of the next group.
 */
INLINE void pack_spans(const WeightFormat format, int lanes, int64_t columns, const uint8_t *source, uint8_t *group) {
    const Packing p = packing(format);
    const int64_t stride = row_bytes(format, columns);
    for (int64_t s = 0; s < columns / p.span; s++, source += file_block_bytes(format), group += span_bytes(p))
        for (int lane = 0; lane < lanes; lane++) {
            const uint8_t *row = source + lane * stride;
            for (int i = 0; i < file_block_bytes(format); i += 64) __builtin_prefetch(row + LANES * stride + i);
            pack_span(format, row, lane, group);
        }
}

INLINE void pack_floats(const int size, int lanes, int64_t columns, const uint8_t *source, uint8_t *group) {
    for (int64_t k = 0; k < columns; k++)
        for (int lane = 0; lane < lanes; lane++)
            memcpy(group + (k * LANES + lane) * size, source + (lane * columns + k) * size, (size_t)size);
}

/* The first `lanes` rows of a group. */
static void pack_group(WeightFormat format, int lanes, int64_t columns, const uint8_t *source, uint8_t *group) {
    switch (format) {
    case F32: pack_floats(4, lanes, columns, source, group); break;
    case F16:
    case BF16: pack_floats(2, lanes, columns, source, group); break;
#define PACK(format) case format: pack_spans(format, lanes, columns, source, group); break
    PACK(Q4_0);
    PACK(Q4_1);
    PACK(Q5_0);
    PACK(Q5_1);
    PACK(Q8_0);
    PACK(Q2_K);
    PACK(Q3_K);
    PACK(Q4_K);
    PACK(Q5_K);
    PACK(Q6_K);
    PACK(IQ4_NL);
    PACK(IQ4_XS);
    }
}

void pack_rows(WeightFormat format, int64_t rows, int64_t columns, const uint8_t *source, uint8_t *packed) {
    int64_t source_stride = row_bytes(format, columns), group_stride = group_bytes(format, columns);
    if (rows % LANES) memset(packed + rows / LANES * group_stride, 0, (size_t)group_stride);
    for (int64_t row = 0; row < rows; row += LANES) {
        int lanes = rows - row < LANES ? (int)(rows - row) : LANES;
        pack_group(format, lanes, columns, source + row * source_stride, packed + row / LANES * group_stride);
    }
}

/* Exact, subnormals included: scaling by a power of two rounds nothing. */
float half_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023, bits;
    float value;
    if (exponent == 0) {
        value = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    }
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float load_half(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, sizeof half);
    return half_to_float(half);
}

/* One lane's 32 weights, in the order of rounding of gguf-py. */
static void dequantize_block(Packing p, const uint8_t *packed, int lane, float scale, float minimum, float *out) {
    BlockCodes block;
    unpack_codes(p, packed, lane, &block);
    for (int k = 0; k < BLOCK; k++) {
        int half = k / (BLOCK / 2), code = (int)(block.quads[k / 4] >> 8 * (k % 4) & 255);
        int value = p.bytes ? (int8_t)code : p.table ? code_values[code] : code - p.offset;
        float factor = p.sub_scales ? scale * (float)block.scales[half % p.sub_scales] : scale;
        out[k] = factor * (float)value;
        if (p.sub_minima) out[k] -= minimum * (float)block.minima[half % p.sub_minima];
        else if (p.halves == 2) out[k] += minimum;
    }
}

static void dequantize_float(WeightFormat format, const uint8_t *at, float *out) {
    uint16_t half;
    if (format == F32) {
        memcpy(out, at, sizeof *out);
        return;
    }
    memcpy(&half, at, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    if (format == BF16) memcpy(out, &bits, sizeof *out);
    else *out = half_to_float(half);
}

void dequantize_row(const Matrix *matrix, int64_t row, float *out) {
    const WeightFormat format = matrix->format;
    const Packing p = packing(format);
    const int lane = (int)(row % LANES), blocks = p.span / BLOCK;
    const uint8_t *group = matrix->data + row / LANES * group_bytes(format, matrix->columns);
    if (!p.span) {
        for (int64_t k = 0; k < matrix->columns; k++)
            dequantize_float(format, group + (k * LANES + lane) * float_bytes(format), out + k);
        return;
    }
    for (int64_t s = 0; s < matrix->columns / p.span; s++, group += span_bytes(p)) {
        const uint8_t *halves = group + blocks * block_bytes(p) + lane * HALF;
        float scale = load_half(halves), minimum = p.halves == 2 ? load_half(halves + LANES * HALF) : 0;
        for (int b = 0; b < blocks; b++, out += BLOCK)
            dequantize_block(p, group + b * block_bytes(p), lane, scale, minimum, out);
    }
}

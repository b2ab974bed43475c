/* Repacks weights from the file's blocks into groups of 16 rows (layout in kernels.h), and reads single rows back.
 *
 * Source blocks are ggml's (ggml-common.h): Q4_0 {f16 d; u8 q[16]}, Q4_1 {f16 d; f16 m; u8 q[16]},
 * Q8_0 {f16 d; i8 q[32]}; a nibble byte j holds weight j in its low half and weight j + 16 in its high half.
 */
#include <string.h>

#include "kernels.h"

enum { QUAD_BYTES = 4 * LANES, NIBBLE_QUADS = 4, BYTE_QUADS = 8, HALF = 2 };

typedef struct {
    int source_bytes; /* one row's block in the file */
    int quant_offset; /* where its quants start */
    int quads;        /* quads of 64 bytes in a packed block; 0 for float formats */
    int halves;       /* float16 values that precede the quants: scale, then minimum */
} BlockLayout;

static BlockLayout block_layout(WeightFormat format) {
    switch (format) {
    case Q4_0: return (BlockLayout){18, 2, NIBBLE_QUADS, 1};
    case Q4_1: return (BlockLayout){20, 4, NIBBLE_QUADS, 2};
    case Q8_0: return (BlockLayout){34, 2, BYTE_QUADS, 1};
    case F32: return (BlockLayout){4, 0, 0, 0};
    case F16: return (BlockLayout){2, 0, 0, 0};
    }
    return (BlockLayout){0, 0, 0, 0};
}

int format_known(int type_id) {
    return block_layout((WeightFormat)type_id).source_bytes != 0;
}

static int64_t packed_block_bytes(BlockLayout layout) {
    return layout.quads * QUAD_BYTES + layout.halves * LANES * HALF;
}

static int64_t group_bytes(WeightFormat format, int64_t columns) {
    BlockLayout layout = block_layout(format);
    if (layout.quads == 0) return columns * LANES * layout.source_bytes;
    return columns / BLOCK * packed_block_bytes(layout);
}

int64_t packed_bytes(WeightFormat format, int64_t rows, int64_t columns) {
    return (rows + LANES - 1) / LANES * group_bytes(format, columns);
}

int64_t row_bytes(WeightFormat format, int64_t columns) {
    BlockLayout layout = block_layout(format);
    return (layout.quads ? columns / BLOCK : columns) * layout.source_bytes;
}

static void pack_float_row(int size, int64_t columns, int lane, const uint8_t *source, uint8_t *group) {
    for (int64_t k = 0; k < columns; k++) memcpy(group + (k * LANES + lane) * size, source + k * size, size);
}

/* One row's blocks into its lane of a group of 16. */
static void pack_quantized_row(BlockLayout layout, int64_t columns, int lane, const uint8_t *source, uint8_t *group) {
    int64_t stride = packed_block_bytes(layout);
    for (int64_t b = 0; b < columns / BLOCK; b++, source += layout.source_bytes, group += stride) {
        const uint8_t *quants = source + layout.quant_offset;
        for (int i = 0; i < layout.quads; i++) {
            /* Bytes 4i..4i+3 are quad i, and of nibbles also quad i + 4: no bit moves within a byte. */
            memcpy(group + i * QUAD_BYTES + 4 * lane, quants + 4 * i, 4);
        }
        uint8_t *halves = group + layout.quads * QUAD_BYTES;
        for (int h = 0; h < layout.halves; h++) memcpy(halves + (h * LANES + lane) * HALF, source + h * HALF, HALF);
    }
}

void pack_rows(WeightFormat format, int64_t rows, int64_t columns, const uint8_t *source, uint8_t *packed) {
    BlockLayout layout = block_layout(format);
    int64_t source_stride = row_bytes(format, columns), group_stride = group_bytes(format, columns);
    if (rows % LANES) memset(packed + rows / LANES * group_stride, 0, group_stride);
    for (int64_t row = 0; row < rows; row++) {
        uint8_t *group = packed + row / LANES * group_stride;
        int lane = (int)(row % LANES);
        if (layout.quads) pack_quantized_row(layout, columns, lane, source + row * source_stride, group);
        else pack_float_row(layout.source_bytes, columns, lane, source + row * source_stride, group);
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

static void dequantize_block(WeightFormat format, BlockLayout layout, const uint8_t *block, int lane, float *out) {
    const uint8_t *halves = block + layout.quads * QUAD_BYTES;
    float scale = load_half(halves + lane * HALF);
    float minimum = format == Q4_1 ? load_half(halves + (LANES + lane) * HALF) : 0;
    for (int k = 0; k < BLOCK; k++) {
        int quad = k / 4;
        uint8_t byte = block[quad % layout.quads * QUAD_BYTES + 4 * lane + k % 4];
        if (format == Q8_0) out[k] = scale * (float)(int8_t)byte;
        else if (format == Q4_0) out[k] = scale * (float)((quad < 4 ? byte & 15 : byte >> 4) - 8);
        else out[k] = scale * (float)(quad < 4 ? byte & 15 : byte >> 4) + minimum;
    }
}

void dequantize_row(const Matrix *matrix, int64_t row, float *out) {
    BlockLayout layout = block_layout(matrix->format);
    int lane = (int)(row % LANES);
    const uint8_t *group = matrix->data + row / LANES * group_bytes(matrix->format, matrix->columns);
    if (matrix->format == F32) {
        for (int64_t k = 0; k < matrix->columns; k++) memcpy(out + k, group + (k * LANES + lane) * 4, 4);
    } else if (matrix->format == F16) {
        for (int64_t k = 0; k < matrix->columns; k++) out[k] = load_half(group + (k * LANES + lane) * HALF);
    } else {
        for (int64_t b = 0; b < matrix->columns / BLOCK; b++)
            dequantize_block(matrix->format, layout, group + b * packed_block_bytes(layout), lane, out + b * BLOCK);
    }
}

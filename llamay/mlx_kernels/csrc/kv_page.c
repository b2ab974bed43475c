#include "kv_page.h"

#include <string.h>

enum { MAX_SIZE = 1 << 20 }; /* of each number of a layout */

static const struct {
    const char *name;
    KVFormat format[KV_PARTS];
} precisions[] = {
    {"f32", {KV_F32, KV_F32}}, {"f16", {KV_F16, KV_F16}}, {"vq8", {KV_F32, KV_I8}}, {"q8", {KV_I8, KV_I8}}};

int element_bytes(KVFormat format) { return format == KV_F32 ? 4 : format == KV_F16 ? 2 : 1; }

static int scale_bytes(KVFormat format) { return format == KV_I8 ? (int)sizeof(float) : 0; }

static int in_range(int64_t number, int64_t multiple_of) {
    return number >= multiple_of && number <= MAX_SIZE && number % multiple_of == 0;
}

int page_layout(PageLayout *layout, int layers, int kv_heads, int head_dim, int page_tokens, const char *precision) {
    size_t i = 0;
    while (i < sizeof precisions / sizeof *precisions && strcmp(precisions[i].name, precision)) i++;
    if (i == sizeof precisions / sizeof *precisions || !in_range(layers, 1) || !in_range(kv_heads, 1) ||
        !in_range(head_dim, LANES) || head_dim > MAX_HEAD_DIM || !in_range(page_tokens, LANES))
        return -1;
    *layout = (PageLayout){.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .page_tokens = page_tokens};
    for (int part = KEYS; part <= VALUES; part++) {
        KVFormat format = layout->format[part] = precisions[i].format[part];
        layout->elements[part] = layout->head_bytes;
        layout->scales[part] = layout->head_bytes + (int64_t)page_tokens * head_dim * element_bytes(format);
        layout->head_bytes = layout->scales[part] + page_tokens * scale_bytes(format);
        layout->vector_bytes[part] = scale_bytes(format) + head_dim * element_bytes(format);
    }
    int64_t heads = (int64_t)layers * kv_heads;
    layout->row_bytes = heads * (layout->vector_bytes[KEYS] + layout->vector_bytes[VALUES]);
    return __builtin_mul_overflow(heads, layout->head_bytes, &layout->page_bytes) ? -1 : 0;
}

uint8_t *page_head(const PageLayout *layout, uint8_t *page, int layer, int kv_head) {
    return page + ((int64_t)layer * layout->kv_heads + kv_head) * layout->head_bytes;
}

uint8_t *group_elements(const PageLayout *layout, uint8_t *head, int part, int offset) {
    return head + layout->elements[part] + (int64_t)offset * layout->head_dim * element_bytes(layout->format[part]);
}

float *group_scales(const PageLayout *layout, uint8_t *head, int part, int offset) {
    return layout->format[part] == KV_I8 ? (float *)(head + layout->scales[part]) + offset : NULL;
}

int64_t row_offset(const PageLayout *layout, int layer, int part, int kv_head) {
    int64_t of_layer = layout->kv_heads * (layout->vector_bytes[KEYS] + layout->vector_bytes[VALUES]);
    int64_t of_part = part == VALUES ? layout->kv_heads * layout->vector_bytes[KEYS] : 0;
    return layer * of_layer + of_part + kv_head * layout->vector_bytes[part];
}

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint16_t half_of(float x) {
    const uint32_t infinity = 0x7f800000, largest = 0x477fe000 /* 65504 */, smallest_normal = 0x38800000 /* 2^-14 */;
    uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7fffffff;
    /* Floats in [0.5, 1) are as far apart as subnormal halves are: the addition rounds. */
    uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3f000000;
    uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    uint32_t half = size < smallest_normal ? subnormal : normal;
    half = size > largest ? 0x7bff : half;
    half = size > infinity ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

/* The scale of a vector whose largest magnitude has these bits. */
static float scale_of(uint32_t largest) {
    const uint32_t infinity = 0x7f800000, nan = 0x7fc00000, dropped = 0xff;
    const float smallest = 0x1p-100f; /* below, quotients and scales could be subnormal: call it zero */
    const float highest = 0x1.0204p121f; /* 127 times the next scale would be infinite */
    if (largest >= infinity) return float_of(nan);
    if (float_of(largest) < smallest) return 0.0f;
    /* With 16 bits, q * scale is exact, and so is (127 * scale) / 127: encoding it again finds the same scale. */
    float scale = float_of((bits_of(float_of(largest) / 127.0f) + dropped) & ~dropped);
    return scale > highest ? highest : scale;
}

static void encode_i8(const float *x, int count, uint8_t *vector) {
    const float shift = 0x1.8p23f; /* added and taken off: rounds to the nearest integer, ties to even */
    int32_t largest = 0;
    for (int i = 0; i < count; i++) {
        int32_t size = (int32_t)(bits_of(x[i]) & 0x7fffffff);
        largest = size > largest ? size : largest;
    }
    float scale = scale_of((uint32_t)largest);
    memcpy(vector, &scale, sizeof scale);
    int8_t *q = (int8_t *)vector + sizeof scale;
    if (!(scale > 0)) {
        memset(q, 0, (size_t)count);
        return;
    }
    /* No quotient rounds to more than 127: the scale is at least max|x| / 127 but for its last bits. */
    for (int i = 0; i < count; i++) q[i] = (int8_t)(int32_t)((x[i] / scale + shift) - shift);
}

void encode_vector(KVFormat format, const float *x, int count, uint8_t *vector) {
    if (format == KV_I8) encode_i8(x, count, vector);
    else if (format == KV_F32) memcpy(vector, x, (size_t)count * sizeof *x);
    else
        for (int i = 0; i < count; i++) {
            uint16_t half = half_of(x[i]);
            memcpy(vector + 2 * i, &half, sizeof half);
        }
}

void decode_vector(KVFormat format, const uint8_t *vector, int count, float *x) {
    if (format == KV_F32) memcpy(x, vector, (size_t)count * sizeof *x);
    else if (format == KV_F16)
        for (int i = 0; i < count; i++) {
            uint16_t half;
            memcpy(&half, vector + 2 * i, sizeof half);
            x[i] = half_to_float(half);
        }
    else {
        float scale;
        memcpy(&scale, vector, sizeof scale);
        for (int i = 0; i < count; i++) x[i] = scale * (float)(int8_t)vector[(int)sizeof scale + i];
    }
}

/* Elements that stand apart in the page: one lane of a group of keys. */
static void store_lane(int size, const uint8_t *elements, int count, int lane, uint8_t *group) {
    for (int d = 0; d < count; d++) memcpy(group + (d * LANES + lane) * size, elements + d * size, (size_t)size);
}

void store_vector(const PageLayout *layout, uint8_t *head, int part, int offset, const uint8_t *vector) {
    int lane = offset % LANES, size = element_bytes(layout->format[part]);
    uint8_t *group = group_elements(layout, head, part, offset - lane);
    float *scales = group_scales(layout, head, part, offset - lane);
    if (scales) {
        memcpy(scales + lane, vector, sizeof *scales);
        vector += sizeof *scales;
    }
    if (part == VALUES) memcpy(group + lane * layout->head_dim * size, vector, (size_t)(layout->head_dim * size));
    else store_lane(size, vector, layout->head_dim, lane, group);
}

/* How keys and values are stored: in pages, which attention reads, and in rows, which leave the kernels.
 *
 * A vector is one head's keys or values at one position. What is stored of it depends on it alone.
 *
 * Row of one position: [layer][keys, values][kv head] vectors. KV_F32: float32 [head_dim]. KV_F16: float16 [head_dim].
 * KV_I8: a float32 scale, then int8 [head_dim].
 *
 * Page: [layer][kv head] of
 *     keys:         [page_tokens / 16][head_dim][16] elements
 *     key scales:   [page_tokens] float32, if keys are KV_I8
 *     values:       [page_tokens][head_dim] elements
 *     value scales: [page_tokens] float32, if values are KV_I8
 */
#ifndef LLAMAY_KV_PAGE_H
#define LLAMAY_KV_PAGE_H

#include <stdint.h>

#include "kernels.h"

enum { KEYS = 0, VALUES = 1, KV_PARTS = 2 };

typedef struct {
    int layers, kv_heads, head_dim, page_tokens;
    KVFormat format[KV_PARTS];
    int64_t elements[KV_PARTS];     /* where a head's keys and values start in the head's part of a page */
    int64_t scales[KV_PARTS];       /* where their scales start; meaningless without scales */
    int64_t head_bytes, page_bytes; /* of a page */
    int64_t vector_bytes[KV_PARTS], row_bytes;
} PageLayout;

/* Fills in a layout; precision is f32, f16, vq8 (values in 8 bits) or q8. 0, or -1 if an argument is out of range. */
int page_layout(PageLayout *layout, int layers, int kv_heads, int head_dim, int page_tokens, const char *precision);

/* Bytes of one element. */
int element_bytes(KVFormat format);

/* A head's part of a page. */
uint8_t *page_head(const PageLayout *layout, uint8_t *page, int layer, int kv_head);

/* The 16 positions from `offset`, a multiple of 16: keys [head_dim][16] or values [16][head_dim], and their scales
 * [16] or NULL.
 */
uint8_t *group_elements(const PageLayout *layout, uint8_t *head, int part, int offset);
float *group_scales(const PageLayout *layout, uint8_t *head, int part, int offset);

/* Where a vector starts in a row. */
int64_t row_offset(const PageLayout *layout, int layer, int part, int kv_head);

/* float32 [count] to a vector's bytes and back. Encoding what was decoded gives the same bytes.
 * KV_F16: nearest, ties to even, at most 65504 in size. KV_I8: scale = max|x| / 127 rounded up to 16 significant bits,
 * q = x / scale to the nearest, ties to even; zeros if max|x| < 2^-100; a scale of NaN if any x is not finite.
 */
void encode_vector(KVFormat format, const float *x, int count, uint8_t *vector);
void decode_vector(KVFormat format, const uint8_t *vector, int count, float *x);

/* Writes a vector to the position at `offset` of a page. */
void store_vector(const PageLayout *layout, uint8_t *head, int part, int offset, const uint8_t *vector);

#endif

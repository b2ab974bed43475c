/* Keys stand [head_dim][16] in a page and [head_dim] in a row. They are turned in a tile that stays in the nearest
 * cache, so that rows, which may lie a multiple of 4 KiB apart, are touched once and in order.
 */
#include "kv_rows.h"

#include <fenv.h>
#include <string.h>

/* Up to 16 positions of one group of a page. */
typedef struct {
    uint8_t *page;
    int offset, lane, count; /* of the group in the page; first position in the group; positions */
    int64_t row;             /* number of the first one's row */
} Span;

typedef struct {
    const PageLayout *layout;
    uint8_t *const *pages;
    int64_t start, end;
    uint8_t *out;      /* rows to write, or NULL */
    const uint8_t *in; /* rows to read */
} RowsJob;

static Span span_at(const RowsJob *job, int64_t group) {
    int64_t first = group * LANES, begin = first > job->start ? first : job->start;
    int64_t end = first + LANES < job->end ? first + LANES : job->end;
    int page_tokens = job->layout->page_tokens;
    return (Span){job->pages[first / page_tokens], (int)(first % page_tokens), (int)(begin - first),
                  (int)(end - begin), begin - job->start};
}

#define DEFINE_TURNS(type)                                                                                        \
    static void tile_from_keys_##type(const type *keys, int lane, int count, int dims, type *tile) {              \
        for (int p = 0; p < count; p++)                                                                           \
            for (int d = 0; d < dims; d++) tile[p * dims + d] = keys[d * LANES + lane + p];                       \
    }                                                                                                             \
    static void keys_from_tile_##type(const type *tile, int lane, int count, int dims, type *keys) {              \
        if (count == LANES)                                                                                       \
            for (int d = 0; d < dims; d++)                                                                        \
                for (int p = 0; p < LANES; p++) keys[d * LANES + p] = tile[p * dims + d];                         \
        else                                                                                                      \
            for (int d = 0; d < dims; d++)                                                                        \
                for (int p = 0; p < count; p++) keys[d * LANES + lane + p] = tile[p * dims + d];                  \
    }
DEFINE_TURNS(uint32_t)
DEFINE_TURNS(uint16_t)
DEFINE_TURNS(uint8_t)

static void tile_from_keys(int size, const uint8_t *keys, int lane, int count, int dims, uint32_t *tile) {
    if (size == 4) tile_from_keys_uint32_t((const uint32_t *)keys, lane, count, dims, tile);
    else if (size == 2) tile_from_keys_uint16_t((const uint16_t *)keys, lane, count, dims, (uint16_t *)tile);
    else tile_from_keys_uint8_t(keys, lane, count, dims, (uint8_t *)tile);
}

static void keys_from_tile(int size, const uint32_t *tile, int lane, int count, int dims, uint8_t *keys) {
    if (size == 4) keys_from_tile_uint32_t(tile, lane, count, dims, (uint32_t *)keys);
    else if (size == 2) keys_from_tile_uint16_t((const uint16_t *)tile, lane, count, dims, (uint16_t *)keys);
    else keys_from_tile_uint8_t((const uint8_t *)tile, lane, count, dims, keys);
}

/* One head's keys or values of a span to their rows; `rows` is where the first one's vector starts. */
static void export_head(const PageLayout *layout, const Span *span, uint8_t *head, int part, uint8_t *rows) {
    uint32_t tile[LANES * MAX_HEAD_DIM];
    int size = element_bytes(layout->format[part]), bytes = layout->head_dim * size;
    const uint8_t *elements = group_elements(layout, head, part, span->offset);
    const float *scales = group_scales(layout, head, part, span->offset);
    if (part == KEYS) {
        tile_from_keys(size, elements, span->lane, span->count, layout->head_dim, tile);
        elements = (const uint8_t *)tile;
    } else {
        elements += span->lane * bytes;
    }
    for (int p = 0; p < span->count; p++, rows += layout->row_bytes) {
        if (scales) memcpy(rows, scales + span->lane + p, sizeof *scales);
        memcpy(rows + (scales ? sizeof *scales : 0), elements + p * bytes, (size_t)bytes);
    }
}

static void import_head(const PageLayout *layout, const Span *span, uint8_t *head, int part, const uint8_t *rows) {
    uint32_t tile[LANES * MAX_HEAD_DIM];
    int size = element_bytes(layout->format[part]), bytes = layout->head_dim * size;
    uint8_t *elements = group_elements(layout, head, part, span->offset);
    float *scales = group_scales(layout, head, part, span->offset);
    uint8_t *to = part == KEYS ? (uint8_t *)tile : elements + span->lane * bytes;
    for (int p = 0; p < span->count; p++, rows += layout->row_bytes) {
        if (scales) memcpy(scales + span->lane + p, rows, sizeof *scales);
        memcpy(to + p * bytes, rows + (scales ? sizeof *scales : 0), (size_t)bytes);
    }
    if (part == KEYS) keys_from_tile(size, tile, span->lane, span->count, layout->head_dim, elements);
}

/* Items are [group][layer]. */
static void move_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const RowsJob *job = argument;
    const PageLayout *layout = job->layout;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        Span span = span_at(job, job->start / LANES + item / layout->layers);
        int layer = (int)(item % layout->layers);
        for (int part = KEYS; part <= VALUES; part++)
            for (int h = 0; h < layout->kv_heads; h++) {
                int64_t at = span.row * layout->row_bytes + row_offset(layout, layer, part, h);
                uint8_t *head = page_head(layout, span.page, layer, h);
                if (job->out) export_head(layout, &span, head, part, job->out + at);
                else import_head(layout, &span, head, part, job->in + at);
            }
    }
}

static void run_job(Pool *pool, RowsJob *job) {
    int64_t groups = (job->end + LANES - 1) / LANES - job->start / LANES;
    if (job->end > job->start) pool_run(pool, groups * job->layout->layers, job->layout->layers, move_rows, job);
}

void export_rows(Pool *pool, const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end,
                 uint8_t *rows) {
    run_job(pool, &(RowsJob){layout, pages, start, end, rows, NULL});
}

void import_rows(Pool *pool, const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end,
                 const uint8_t *rows) {
    run_job(pool, &(RowsJob){layout, pages, start, end, NULL, rows});
}

void convert_rows(const PageLayout *from, const PageLayout *to, const uint8_t *source, int64_t count, uint8_t *target) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    for (int64_t pair = 0; pair < count * from->layers * KV_PARTS; pair++) {
        int part = pair % KV_PARTS;
        for (int h = 0; h < from->kv_heads; h++) {
            float x[MAX_HEAD_DIM];
            decode_vector(from->format[part], source, from->head_dim, x);
            encode_vector(to->format[part], x, from->head_dim, target);
            source += from->vector_bytes[part];
            target += to->vector_bytes[part];
        }
    }
    fesetenv(&callers);
}

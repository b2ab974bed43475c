/* Keys stand [head_dim][16] in a page and [head_dim] in a row. They are turned in a tile that stays in the nearest
 * caches, so that a row, whose neighbours may lie a multiple of 4 KiB away, is read or written in long stretches.
 */
#include "kv_rows.h"

#include <fenv.h>
#include <string.h>
#ifdef __x86_64__
#include <emmintrin.h>
#endif

typedef uint32_t Four __attribute__((vector_size(16)));

#ifdef __clang__
#define PICK(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define PICK(a, b, i, j, k, l) __builtin_shuffle(a, b, (Four){i, j, k, l})
#endif

static inline Four load_four(const void *from) {
    Four four;
    memcpy(&four, from, sizeof four);
    return four;
}

/* Past the caches where the processor can: a page is written whole, and not read before it has left them. */
static inline void stream_four(void *to, Four four) {
#ifdef __x86_64__
    if ((uintptr_t)to % sizeof four == 0) {
        _mm_stream_si128(to, (__m128i)four);
        return;
    }
#endif
    memcpy(to, &four, sizeof four);
}

/* Orders what was streamed before all that this thread writes later. */
static void end_stream(void) {
#ifdef __x86_64__
    _mm_sfence();
#endif
}

/* bytes is a multiple of 16. */
static void stream(uint8_t *to, const uint8_t *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += (int64_t)sizeof(Four)) stream_four(to + i, load_four(from + i));
}

/* to[c][r] = from[r][c]; rows and columns are multiples of 4. */
static inline void transpose(const uint32_t *from, int64_t rows, int64_t columns, uint32_t *to, int streamed) {
    for (int64_t c = 0; c < columns; c += 4)
        for (int64_t r = 0; r < rows; r += 4) {
            const uint32_t *corner = from + r * columns + c;
            Four row0 = load_four(corner), row1 = load_four(corner + columns);
            Four row2 = load_four(corner + 2 * columns), row3 = load_four(corner + 3 * columns);
            Four low01 = PICK(row0, row1, 0, 4, 1, 5), high01 = PICK(row0, row1, 2, 6, 3, 7);
            Four low23 = PICK(row2, row3, 0, 4, 1, 5), high23 = PICK(row2, row3, 2, 6, 3, 7);
            const Four turned[4] = {PICK(low01, low23, 0, 1, 4, 5), PICK(low01, low23, 2, 3, 6, 7),
                                    PICK(high01, high23, 0, 1, 4, 5), PICK(high01, high23, 2, 3, 6, 7)};
            for (int i = 0; i < 4; i++) {
                uint32_t *target = to + (c + i) * rows + r;
                if (streamed) stream_four(target, turned[i]);
                else memcpy(target, turned + i, sizeof *turned);
            }
        }
}

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

/* keys[d][lane + p] and tile[p][d], for `count` positions p. */
#define DEFINE_TURNS(type)                                                                                        \
    static void tile_from_keys_##type(const type *keys, int lane, int count, int64_t dims, type *tile) {          \
        for (int p = 0; p < count; p++, tile += dims)                                                             \
            for (int64_t d = 0; d < dims; d++) tile[d] = keys[d * LANES + lane + p];                              \
    }                                                                                                             \
    static void keys_from_tile_##type(const type *tile, int lane, int count, int64_t dims, type *keys) {          \
        for (int64_t d = 0; d < dims; d++, keys += LANES)                                                         \
            if (count == LANES)                                                                                   \
                for (int64_t p = 0; p < LANES; p++) keys[p] = tile[p * dims + d];                                 \
            else                                                                                                  \
                for (int64_t p = 0; p < count; p++) keys[lane + p] = tile[p * dims + d];                          \
    }
DEFINE_TURNS(uint32_t)
DEFINE_TURNS(uint16_t)
DEFINE_TURNS(uint8_t)

static void tile_from_keys(int size, const Span *span, int dims, const uint8_t *keys, uint8_t *tile) {
    if (size == 4 && span->count == LANES) transpose((const uint32_t *)keys, dims, LANES, (uint32_t *)tile, 0);
    else if (size == 4) tile_from_keys_uint32_t((const uint32_t *)keys, span->lane, span->count, dims, (uint32_t *)tile);
    else if (size == 2) tile_from_keys_uint16_t((const uint16_t *)keys, span->lane, span->count, dims, (uint16_t *)tile);
    else tile_from_keys_uint8_t(keys, span->lane, span->count, dims, tile);
}

static void keys_from_tile(int size, const Span *span, int dims, const uint8_t *tile, uint8_t *keys) {
    if (size == 4 && span->count == LANES) transpose((const uint32_t *)tile, LANES, dims, (uint32_t *)keys, 1);
    else if (size == 4) keys_from_tile_uint32_t((const uint32_t *)tile, span->lane, span->count, dims, (uint32_t *)keys);
    else if (size == 2) keys_from_tile_uint16_t((const uint16_t *)tile, span->lane, span->count, dims, (uint16_t *)keys);
    else keys_from_tile_uint8_t(tile, span->lane, span->count, dims, keys);
}

/* Copies vectors of `heads` heads between rows and elements [head][position][head_dim], `stride` bytes from head to
 * head; scales are read and written where the page has them.
 */
static void copy_vectors(const RowsJob *job, const Span *span, int part, int heads, int64_t at, uint8_t *elements,
                         int64_t stride, float *scales) {
    const PageLayout *layout = job->layout;
    int64_t bytes = (int64_t)layout->head_dim * element_bytes(layout->format[part]), vector = layout->vector_bytes[part];
    for (int p = 0; p < span->count; p++, at += layout->row_bytes)
        for (int h = 0; h < heads; h++) {
            uint8_t *stored = elements + h * stride + p * bytes;
            uint8_t *scale = scales ? (uint8_t *)(scales + span->lane + p) + h * layout->head_bytes : NULL;
            int64_t begin = at + h * vector, end = begin + vector;
            if (job->out) {
                if (scale) memcpy(job->out + begin, scale, sizeof *scales);
                memcpy(job->out + end - bytes, stored, (size_t)bytes);
            } else {
                if (scale) memcpy(scale, job->in + begin, sizeof *scales);
                if (part == VALUES) stream(stored, job->in + end - bytes, bytes);
                else memcpy(stored, job->in + end - bytes, (size_t)bytes);
            }
        }
}

/* Keys of as many heads at once as fit into the tile. */
static void move_keys(const RowsJob *job, const Span *span, int layer) {
    _Alignas(64) uint8_t tile[LANES * MAX_HEAD_DIM * sizeof(float)];
    const PageLayout *layout = job->layout;
    int size = element_bytes(layout->format[KEYS]), heads;
    int64_t stride = (int64_t)LANES * layout->head_dim * size;
    for (int first = 0; first < layout->kv_heads; first += heads) {
        heads = (int)((int64_t)sizeof tile / stride);
        if (heads > layout->kv_heads - first) heads = layout->kv_heads - first;
        uint8_t *head = page_head(layout, span->page, layer, first);
        uint8_t *keys = group_elements(layout, head, KEYS, span->offset);
        for (int h = 0; job->out && h < heads; h++)
            tile_from_keys(size, span, layout->head_dim, keys + h * layout->head_bytes, tile + h * stride);
        copy_vectors(job, span, KEYS, heads, span->row * layout->row_bytes + row_offset(layout, layer, KEYS, first), tile,
                     stride, group_scales(layout, head, KEYS, span->offset));
        for (int h = 0; job->in && h < heads; h++)
            keys_from_tile(size, span, layout->head_dim, tile + h * stride, keys + h * layout->head_bytes);
    }
}

static void move_values(const RowsJob *job, const Span *span, int layer) {
    const PageLayout *layout = job->layout;
    uint8_t *head = page_head(layout, span->page, layer, 0);
    uint8_t *values = group_elements(layout, head, VALUES, span->offset);
    values += (int64_t)span->lane * layout->head_dim * element_bytes(layout->format[VALUES]);
    copy_vectors(job, span, VALUES, layout->kv_heads, span->row * layout->row_bytes + row_offset(layout, layer, VALUES, 0),
                 values, layout->head_bytes, group_scales(layout, head, VALUES, span->offset));
}

static void move_rows(const RowsJob *job) {
    if (job->end <= job->start) return;
    for (int64_t group = job->start / LANES; group * LANES < job->end; group++) {
        Span span = span_at(job, group);
        for (int layer = 0; layer < job->layout->layers; layer++) {
            move_keys(job, &span, layer);
            move_values(job, &span, layer);
        }
    }
}

void export_rows(const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end, uint8_t *rows) {
    move_rows(&(RowsJob){layout, pages, start, end, rows, NULL});
}

void import_rows(const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end, const uint8_t *rows) {
    move_rows(&(RowsJob){layout, pages, start, end, NULL, rows});
    end_stream();
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

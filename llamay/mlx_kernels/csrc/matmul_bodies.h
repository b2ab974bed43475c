/* Quantised activations and matrix products; see kernel_bodies.h. */

INLINE vf clamp127(vf x) {
    vf highest = v_set1(127.0f);
    return v_max(v_select_gt(x, highest, highest, x), v_set1(-127.0f));
}

/* Rounds 32 values, already divided by the scale, into a block; what is left over, times 256, replaces them. */
INLINE int32_t round_block(vf *low, vf *high, ActivationBlock *block) {
    vi q_low = v_round(clamp127(*low)), q_high = v_round(clamp127(*high));
    vi_store_bytes(block->q, q_low);
    vi_store_bytes(block->q + LANES, q_high);
    *low = v_mul(v_sub(*low, v_float(q_low)), v_set1(256.0f));
    *high = v_mul(v_sub(*high, v_float(q_high)), v_set1(256.0f));
    block->half_sums[0] = (int16_t)vi_sum(q_low);
    block->half_sums[1] = (int16_t)vi_sum(q_high);
    return block->half_sums[0] + block->half_sums[1];
}

/* max |x| / 127 of a span of values; NaN where one is no number. */
INLINE float span_scale(const float *x, int span) {
    vf zero = v_set1(0.0f), largest = zero, not_finite = zero;
    for (int k = 0; k < span; k += LANES) {
        vf v = v_load(x + k);
        largest = v_max(largest, v_abs(v));
        not_finite = v_fma(v, zero, not_finite);
    }
    return v_largest(largest) / 127.0f + v_sum(not_finite);
}

INLINE void quantize_block(const float *x, float scale, int planes, ActivationBlock *blocks, int64_t width) {
    const float smallest_scale = 0x1p-100f; /* below, quotients and scales could be subnormal: call it zero */
    if (!(scale >= smallest_scale)) {
        for (int plane = 0; plane < planes; plane++) memset(blocks + plane * width, 0, sizeof *blocks);
        if (isnan(scale)) blocks->scale = blocks->scaled_sum = NAN; /* so are the products, and the logits */
        return;
    }
    vf low = v_div(v_load(x), v_set1(scale)), high = v_div(v_load(x + LANES), v_set1(scale));
    blocks->sum = round_block(&low, &high, blocks);
    if (planes == 2) {
        blocks->sum = 256 * blocks->sum + round_block(&low, &high, blocks + width);
        scale /= 256.0f;
    }
    blocks->scale = scale;
    blocks->scaled_sum = scale * (float)blocks->sum;
}

static void NAME(quantize)(const float *x, int64_t columns, int planes, int span, ActivationBlock *blocks,
                           int64_t width) {
    for (int64_t k = 0; k < columns; k += span) {
        float scale = span_scale(x + k, span);
        for (int64_t b = k / BLOCK; b < (k + span) / BLOCK; b++)
            quantize_block(x + b * BLOCK, scale, planes, blocks + b * planes * width, width);
    }
}

/* --- integer products of a block of weights --------------------------------------------------------------- */

INLINE int has_signed_codes(const Packing p) { return p.bytes || p.table; }

/* Of codes without a sign. */
INLINE int largest_code(const Packing p) { return (1 << (bits_at(p) + p.bits)) - 1; }

/* What the instruction set's codes are too large by. */
INLINE int code_offset(const Packing p) { return has_signed_codes(p) ? BYTE_BIAS : p.offset; }

/* Products of so many quads are summed apart before they are added to the block's sum, weighed by the sub-block's
 * scale; 0: they are added at once.
 */
INLINE int quads_per_fold(const Packing p) {
    int room = PARTIAL_QUADS(has_signed_codes(p), largest_code(p));
    int wanted = p.sub_scales ? QUADS / p.sub_scales : room ? QUADS : 0;
    return room && room < wanted ? room : wanted;
}

/* Codes of quad i of a packed block. */
INLINE vq load_quad(const Packing p, const uint8_t *block, const int i) {
    if (p.bytes) return vq_load_bytes(block + VECTOR * i);
    vq code = {0};
    if (p.nibbles) code = vq_field(vq_load(block + VECTOR * (i % 4)), i < 4 ? 0 : 4, 15);
    if (p.table) return vq_lookup(code);
    const uint8_t *rest = block + VECTOR * p.nibbles;
    if (p.pairs) {
        vq pair = vq_field(vq_load(rest + VECTOR * (i / 4)), 2 * (i % 4) - pairs_at(p), 3 << pairs_at(p));
        code = p.nibbles ? vq_or(code, pair) : pair;
    }
    if (p.bits) code = vq_or(code, vq_field(vq_load(rest + VECTOR * p.pairs), i - bits_at(p), 1 << bits_at(p)));
    return code;
}

#ifndef OWN_ADD_QUADS
/* Adds the products of two quads with activations [at, at + 8). */
INLINE void add_quads(const int has_sign, const int columns, vq first, vq second, const ActivationBlock *x, const int at,
                      vi *sum) {
    UNROLL for (int c = 0; c < columns; c++) {
        const int8_t *q = x[c].q + at;
        sum[c] = has_sign ? v_dot4_signed(sum[c], first, q) : v_dot4(sum[c], first, q);
        sum[c] = has_sign ? v_dot4_signed(sum[c], second, q + 4) : v_dot4(sum[c], second, q + 4);
    }
}

/* Puts sums in their lanes. */
INLINE void settle(const int columns, vi *sum) { (void)columns, (void)sum; }
#endif

/* sum += partial * scale of sub-block `sub`, if the format has scales. */
INLINE void fold(const Packing p, const int columns, const int sub, const uint8_t *block, vi *partial, vi *sum) {
    vi scales = v_ones();
    if (p.sub_scales) scales = v_load_factors(block + code_bytes(p) + sub * LANES);
    settle(columns, partial);
    UNROLL for (int c = 0; c < columns; c++)
        sum[c] = has_signed_codes(p) ? v_fold_signed(sum[c], partial[c], p.sub_scales, scales)
                                     : v_fold(sum[c], partial[c], p.sub_scales, scales);
}

/* Adds the products of quads [begin, end) of one block of weights. */
INLINE void add_quad_range(const Packing p, const int columns, const int begin, const int end, const uint8_t *block,
                           const ActivationBlock *x, vi *sum) {
    UNROLL for (int i = begin; i < end; i += 2)
        add_quads(has_signed_codes(p), columns, load_quad(p, block, i), load_quad(p, block, i + 1), x, 4 * i, sum);
}

/* Adds the integer products of one block of weights with one plane of `columns` activation rows. */
INLINE void add_products(const Packing p, const int columns, const uint8_t *block, const ActivationBlock *x, vi *sum) {
    const int quads = quads_per_fold(p);
    if (quads == 0) {
        add_quad_range(p, columns, 0, QUADS, block, x, sum);
        return;
    }
    UNROLL for (int begin = 0; begin < QUADS; begin += quads) {
        vi partial[TILE_COLUMNS];
        UNROLL for (int c = 0; c < columns; c++) partial[c] = vi_set1(0);
        add_quad_range(p, columns, begin, begin + quads, block, x, partial);
        fold(p, columns, begin * p.sub_scales / QUADS, block, partial, sum);
    }
}

/* --- tiles: one group of weights by activation rows --------------------------------------------------------- */

enum { FETCH_AHEAD = 2048 }; /* bytes; 1,024 and 4,096 were slower */

/* Fetches weights ahead, past the end of the group those of the next. The widest tiles are many, of which the first
 * brings weights near; narrower ones are alone.
 */
INLINE void prefetch_block(const Packing p, const int columns, const uint8_t *block) {
    if (columns == TILE_COLUMNS) return;
    for (int i = 0; i < block_bytes(p); i += 64) __builtin_prefetch(block + FETCH_AHEAD + i);
}

/* Weights whose scales are of 32, one accumulator per output. */
INLINE void block_tile(const Packing p, const int planes, const int columns, const uint8_t *weights, int64_t blocks,
                       const ActivationBlock *x, vf *acc) {
    for (int64_t b = 0; b < blocks; b++, weights += span_bytes(p), x += planes * columns) {
        vi sum[TILE_COLUMNS];
        prefetch_block(p, columns, weights);
        UNROLL for (int c = 0; c < columns; c++) sum[c] = vi_set1(planes == 1 ? -code_offset(p) * x[c].sum : 0);
        add_products(p, columns, weights, x, sum);
        if (planes == 2) {
            UNROLL for (int c = 0; c < columns; c++)
                sum[c] = vi_add(vi_shift_left(sum[c], 8), vi_set1(-code_offset(p) * x[c].sum));
            add_products(p, columns, weights, x + columns, sum);
        }
        const uint8_t *halves = weights + block_bytes(p);
        vf scale = v_load_half(halves);
        UNROLL for (int c = 0; c < columns; c++)
            acc[c] = v_fma(v_mul(scale, v_set1(x[c].scale)), v_float(sum[c]), acc[c]);
        if (p.halves == 1) continue;
        vf minimum = v_load_half(halves + LANES * HALF);
        UNROLL for (int c = 0; c < columns; c++) acc[c] = v_fma(minimum, v_set1(x[c].scaled_sum), acc[c]);
    }
}

/* weighed += the block's sub-block factors, scales or minima, times the sums of the activations that they meet. */
INLINE void weigh_sums(const Packing p, const int columns, const uint8_t *block, const ActivationBlock *x, vi *weighed) {
    const uint8_t *factors = block + code_bytes(p) + (p.sub_minima ? p.sub_scales * LANES : 0);
    vi first = v_load_factors(factors), second = p.sub_scales == 2 ? v_load_factors(factors + LANES) : first;
    UNROLL for (int c = 0; c < columns; c++) weighed[c] = v_weigh(weighed[c], first, second, x[c].half_sums);
}

/* One plane's integer sums over a superblock, without the codes' offset. Minima times sums, of which a plane before
 * counts 256 times, are left in `weighed`.
 */
INLINE void add_superblock(const Packing p, const int planes, const int plane, const int columns,
                           const uint8_t *weights, const ActivationBlock *x, vi *sum, vi *weighed) {
    UNROLL for (int c = 0; c < columns; c++) {
        sum[c] = vi_set1(0);
        weighed[c] = p.sub_minima ? vi_shift_left(weighed[c], 8) : vi_set1(0);
    }
    for (int b = 0; b < SUPERBLOCK / BLOCK; b++, weights += block_bytes(p), x += planes * columns) {
        if (plane == 0) prefetch_block(p, columns, weights);
        add_products(p, columns, weights, x, sum);
        if (p.sub_minima || code_offset(p)) weigh_sums(p, columns, weights, x, weighed);
    }
    if (p.sub_minima || !code_offset(p)) return;
    UNROLL for (int c = 0; c < columns; c++)
        sum[c] = vi_sub(sum[c], vi_shift_left(weighed[c], __builtin_ctz((unsigned)code_offset(p))));
}

/* Weights whose scales are of 256: one floating-point step for a superblock, and one for its minima. */
INLINE void superblock_tile(const Packing p, const int planes, const int columns, const uint8_t *weights,
                            int64_t superblocks, const ActivationBlock *x, vf *acc) {
    const int64_t x_stride = SUPERBLOCK / BLOCK * planes * columns;
    for (int64_t s = 0; s < superblocks; s++, weights += span_bytes(p), x += x_stride) {
        vi sum[TILE_COLUMNS], weighed[TILE_COLUMNS];
        vf value[TILE_COLUMNS];
        UNROLL for (int c = 0; c < columns; c++) {
            weighed[c] = vi_set1(0);
            value[c] = v_set1(0.0f);
        }
        for (int plane = 0; plane < planes; plane++) {
            add_superblock(p, planes, plane, columns, weights, x + plane * columns, sum, weighed);
            UNROLL for (int c = 0; c < columns; c++) value[c] = v_fma(v_set1(256.0f), value[c], v_float(sum[c]));
        }
        const uint8_t *halves = weights + SUPERBLOCK / BLOCK * block_bytes(p);
        vf scale = v_load_half(halves);
        UNROLL for (int c = 0; c < columns; c++)
            acc[c] = v_fma(v_mul(scale, v_set1(x[c].scale)), value[c], acc[c]);
        if (!p.sub_minima) continue;
        vf minimum = v_load_half(halves + LANES * HALF);
        UNROLL for (int c = 0; c < columns; c++)
            acc[c] = v_fma(v_mul(minimum, v_set1(x[c].scale)), v_float(vi_sub(vi_set1(0), weighed[c])), acc[c]);
    }
}

/* Float weights: one ascending chain of fused multiply-adds per output. */
INLINE void float_tile(const WeightFormat format, const int columns, const uint8_t *weights, int64_t length,
                       const float *x, vf *acc) {
    for (int64_t k = 0; k < length; k++) {
        const uint8_t *at = weights + k * LANES * float_bytes(format);
        vf w = format == F32 ? v_load((const float *)at) : format == F16 ? v_load_half(at) : v_load_bf16(at);
        UNROLL for (int c = 0; c < columns; c++) acc[c] = v_fma(w, v_set1(x[c * length + k]), acc[c]);
    }
}

/* One tile of activation rows by one group of weights. */
INLINE void tile(const WeightFormat format, const int planes, const int columns, const Matrix *w, int64_t group,
                 const Activations *x, int64_t first, float *y, int64_t ld) {
    const Packing p = packing(format);
    const int64_t spans = p.span ? w->columns / p.span : 0, row = group * LANES;
    const uint8_t *weights = w->data + group * (p.span ? spans * span_bytes(p) : w->columns * LANES * float_bytes(format));
    const ActivationBlock *blocks = x->blocks[span_index(format)] + first * planes * (w->columns / BLOCK);
    vf acc[TILE_COLUMNS];
    for (int c = 0; c < columns; c++) acc[c] = v_set1(0.0f);
    if (!p.span) float_tile(format, columns, weights, w->columns, x->values + first * w->columns, acc);
    else if (p.span == BLOCK) block_tile(p, planes, columns, weights, spans, blocks, acc);
    else superblock_tile(p, planes, columns, weights, spans, blocks, acc);
    for (int c = 0; c < columns && first + c < x->rows; c++)
        store_first(y + (first + c) * ld + row, acc[c], w->rows - row);
}

/* The tile widths that are compiled, narrowest first; a tile that holds fewer rows is padded. */
#if TILE_COLUMNS == 12
static const int NAME(tile_widths)[] = {1, 2, 4, 8, 12};
#define EACH_WIDTH(X, format, planes)                                                                             \
    X(format, planes, 1) X(format, planes, 2) X(format, planes, 4) X(format, planes, 8) X(format, planes, 12)
#elif TILE_COLUMNS == 4
static const int NAME(tile_widths)[] = {1, 2, 4};
#define EACH_WIDTH(X, format, planes) X(format, planes, 1) X(format, planes, 2) X(format, planes, 4)
#else
static const int NAME(tile_widths)[] = {TILE_COLUMNS};
#define EACH_WIDTH(X, format, planes) X(format, planes, TILE_COLUMNS)
#endif

/* Float weights read float activations: planes is 0. */
#define FLOATS(X, format) X(format, 0)
#define INTEGERS(X, format) X(format, 1) X(format, 2)
#define EACH_FORMAT(X)                                                                                            \
    FLOATS(X, F32) FLOATS(X, F16) FLOATS(X, BF16) INTEGERS(X, Q4_0) INTEGERS(X, Q4_1) INTEGERS(X, Q5_0)           \
    INTEGERS(X, Q5_1) INTEGERS(X, Q8_0) INTEGERS(X, IQ4_NL) INTEGERS(X, Q2_K) INTEGERS(X, Q3_K)                   \
    INTEGERS(X, Q4_K) INTEGERS(X, Q5_K) INTEGERS(X, Q6_K) INTEGERS(X, IQ4_XS)

#define TILE_NAME(format, planes, columns) NAME(tile_##format##_##planes##_##columns)
#define DEFINE_TILE(format, planes, columns)                                                                      \
    static NOINLINE void TILE_NAME(format, planes, columns)(const Matrix *w, int64_t group, const Activations *x, \
                                                            int64_t first, float *y, int64_t ld) {                \
        tile(format, planes, columns, w, group, x, first, y, ld);                                                 \
    }
#define TILE_ENTRY(format, planes, columns) TILE_NAME(format, planes, columns),
#define DEFINE_TILES(format, planes) EACH_WIDTH(DEFINE_TILE, format, planes)
#define TILE_ROW(format_, planes_)                                                                                \
    {.format = format_, .planes = planes_, .tiles = {EACH_WIDTH(TILE_ENTRY, format_, planes_)}},

typedef void (*TileFunction)(const Matrix *, int64_t, const Activations *, int64_t, float *, int64_t);

EACH_FORMAT(DEFINE_TILES)

static const struct {
    WeightFormat format;
    int planes;
    TileFunction tiles[sizeof NAME(tile_widths) / sizeof(int)];
} NAME(tile_table)[] = {EACH_FORMAT(TILE_ROW)};

/* Index of the narrowest tile that holds `rows`, or the widest. */
INLINE int tile_index(int64_t rows) {
    int i = 0;
    while (NAME(tile_widths)[i] < rows && NAME(tile_widths)[i] < TILE_COLUMNS) i++;
    return i;
}

static int NAME(tile_width)(int64_t rows) { return NAME(tile_widths)[tile_index(rows)]; }

INLINE const TileFunction *find_tiles(WeightFormat format, int planes) {
    size_t i = 0;
    while (NAME(tile_table)[i].format != format || NAME(tile_table)[i].planes != planes) i++;
    return NAME(tile_table)[i].tiles;
}

static void NAME(matmul)(const Matrix *w, const Activations *x, float *y, int64_t ld, int64_t first_group,
                         int64_t end_group) {
    const TileFunction *tiles = find_tiles(w->format, is_quantized(w->format) ? x->planes : 0);
    for (int64_t group = first_group; group < end_group; group++)
        for (int64_t first = 0; first < x->rows; first += TILE_COLUMNS)
            tiles[tile_index(x->rows - first)](w, group, x, first, y, ld);
}

/* The kernels, written once over 16 lanes; a kernels_*.c includes this after its simd_*.h.
 *
 * NAME(x) appends the instruction set to a name. Nothing here may depend on how wide a register is:
 * tiles only choose which outputs are computed together.
 */

INLINE vf load_first(const float *p, int64_t n) {
    float lane[LANES] = {0};
    if (n >= LANES) return v_load(p);
    memcpy(lane, p, (size_t)n * sizeof(float));
    return v_load(lane);
}

INLINE void store_first(float *p, vf a, int64_t n) {
    float lane[LANES];
    if (n >= LANES) { v_store(p, a); return; }
    v_store(lane, a);
    memcpy(p, lane, (size_t)n * sizeof(float));
}

/* e^x for x <= 88, 0 below -87. x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 p(r), p fitted to 3e-9. */
INLINE vf v_exp(vf x) {
    vf bounded = v_select_gt(x, v_set1(-87.0f), x, v_set1(-87.0f));
    vi n = v_round(v_mul(bounded, v_set1(0x1.715476p+0f)));
    vf count = v_float(n);
    vf r = v_fma(count, v_set1(-0x1.62e4p-1f), bounded);
    r = v_fma(count, v_set1(-0x1.7f7d1cp-20f), r);
    vf p = v_set1(0x1.6a238cp-10f);
    p = v_fma(p, r, v_set1(0x1.123a6cp-7f));
    p = v_fma(p, r, v_set1(0x1.5558f4p-5f));
    p = v_fma(p, r, v_set1(0x1.55549p-3f));
    p = v_fma(p, r, v_set1(0x1.fffffcp-2f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set1(1.0f)));
    return v_select_gt(x, v_set1(-87.0f), v_mul(p, v_pow2(n)), v_set1(0.0f));
}

INLINE float exp1(float x) {
    float lane[LANES];
    v_store(lane, v_exp(v_set1(x)));
    return lane[0];
}

static void NAME(rms_norm)(const float *x, const float *weight, int64_t columns, float eps, float *out) {
    vf squares = v_set1(0.0f);
    for (int64_t k = 0; k < columns; k += LANES) {
        vf v = load_first(x + k, columns - k);
        squares = v_fma(v, v, squares);
    }
    vf scale = v_set1(1.0f / sqrtf(v_sum(squares) / (float)columns + eps));
    for (int64_t k = 0; k < columns; k += LANES) {
        vf v = v_mul(load_first(x + k, columns - k), scale);
        store_first(out + k, v_mul(v, load_first(weight + k, columns - k)), columns - k);
    }
}

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
    return vi_sum(vi_add(q_low, q_high));
}

static void NAME(quantize)(const float *x, int64_t columns, int planes, ActivationBlock *blocks, int64_t width) {
    const float smallest_scale = 0x1p-100f; /* below, quotients and scales could be subnormal: call it zero */
    for (int64_t b = 0; b < columns / BLOCK; b++, x += BLOCK, blocks += planes * width) {
        vf low = v_load(x), high = v_load(x + LANES);
        vf zero = v_set1(0.0f), not_finite = v_fma(low, zero, v_mul(high, zero)); /* NaN where a value is no number */
        float scale = v_largest(v_max(v_abs(low), v_abs(high))) / 127.0f + v_sum(not_finite);
        if (!(scale >= smallest_scale)) {
            for (int plane = 0; plane < planes; plane++) memset(blocks + plane * width, 0, sizeof *blocks);
            if (isnan(scale)) blocks->scale = blocks->scaled_sum = NAN; /* so are the products, and the logits */
            continue;
        }
        low = v_div(low, v_set1(scale));
        high = v_div(high, v_set1(scale));
        blocks->sum = round_block(&low, &high, blocks);
        if (planes == 2) {
            blocks->sum = 256 * blocks->sum + round_block(&low, &high, blocks + width);
            scale /= 256.0f;
        }
        blocks->scale = scale;
        blocks->scaled_sum = scale * (float)blocks->sum;
    }
}

/* Quads i and i + 4 of a packed block. */
INLINE void load_quads(WeightFormat format, const uint8_t *block, int i, vq *first, vq *second) {
    if (format == Q8_0) {
        *first = vq_load_bytes(block + 64 * i);
        *second = vq_load_bytes(block + 64 * (i + 4));
    } else {
        vq both = vq_load(block + 64 * i);
        *first = vq_low_nibbles(both);
        *second = vq_high_nibbles(both);
    }
}

INLINE int block_bytes(WeightFormat format) {
    return format == Q8_0 ? 544 : format == Q4_1 ? 320 : 288;
}

/* What a block's integer sum starts from: it takes off the offset that the format's weights carry. */
INLINE int32_t first_sum(WeightFormat format, const ActivationBlock *x) {
    return format == Q8_0 ? -BYTE_BIAS * x->sum : format == Q4_0 ? -8 * x->sum : 0;
}

/* Adds the integer products of one block of weights with one plane of `columns` activation rows. */
INLINE void add_products(const WeightFormat format, const int groups, const int columns, const uint8_t *weights,
                         int64_t group_stride, const ActivationBlock *x, vi (*sum)[TILE_COLUMNS]) {
    UNROLL for (int i = 0; i < 4; i++) {
        vq first[GROUPS_AT_ONCE], second[GROUPS_AT_ONCE];
        UNROLL for (int g = 0; g < groups; g++) load_quads(format, weights + g * group_stride, i, &first[g], &second[g]);
        UNROLL for (int c = 0; c < columns; c++)
            UNROLL for (int g = 0; g < groups; g++) {
                const int8_t *q = x[c].q + 4 * i;
                if (format == Q8_0) {
                    sum[g][c] = v_dot4_signed(sum[g][c], first[g], q);
                    sum[g][c] = v_dot4_signed(sum[g][c], second[g], q + 16);
                } else {
                    sum[g][c] = v_dot4_nibbles(sum[g][c], first[g], q);
                    sum[g][c] = v_dot4_nibbles(sum[g][c], second[g], q + 16);
                }
            }
    }
}

/* `groups` packed groups by `columns` activation rows of quantised weights, one accumulator per output. */
INLINE void quantized_tile(const WeightFormat format, const int planes, const int groups, const int columns,
                           const uint8_t *weights, int64_t group_stride, int64_t blocks, const ActivationBlock *x,
                           vf (*acc)[TILE_COLUMNS]) {
    for (int g = 0; g < groups; g++)
        for (int c = 0; c < columns; c++) acc[g][c] = v_set1(0.0f);
    for (int64_t b = 0; b < blocks; b++, weights += block_bytes(format), x += planes * columns) {
        vi sum[GROUPS_AT_ONCE][TILE_COLUMNS];
        if (columns <= 2)
            for (int g = 0; g < groups; g++)
                for (int i = 0; i < block_bytes(format); i += 64) v_prefetch(weights + g * group_stride + 2048 + i);
        UNROLL for (int c = 0; c < columns; c++)
            for (int g = 0; g < groups; g++) sum[g][c] = vi_set1(planes == 1 ? first_sum(format, x + c) : 0);
        add_products(format, groups, columns, weights, group_stride, x, sum);
        if (planes == 2) {
            UNROLL for (int c = 0; c < columns; c++)
                for (int g = 0; g < groups; g++)
                    sum[g][c] = vi_add(vi_times256(sum[g][c]), vi_set1(first_sum(format, x + c)));
            add_products(format, groups, columns, weights, group_stride, x + columns, sum);
        }
        for (int g = 0; g < groups; g++) {
            const uint8_t *halves = weights + g * group_stride + block_bytes(format) - (format == Q4_1 ? 64 : 32);
            vf scale = v_load_half(halves);
            UNROLL for (int c = 0; c < columns; c++)
                acc[g][c] = v_fma(v_mul(scale, v_set1(x[c].scale)), v_float(sum[g][c]), acc[g][c]);
            if (format != Q4_1) continue;
            vf minimum = v_load_half(halves + 32);
            UNROLL for (int c = 0; c < columns; c++)
                acc[g][c] = v_fma(minimum, v_set1(x[c].scaled_sum), acc[g][c]);
        }
    }
}

/* The same for float weights: one ascending chain of fused multiply-adds per output. */
INLINE void float_tile(const WeightFormat format, const int groups, const int columns, const uint8_t *weights,
                       int64_t group_stride, int64_t length, const float *x, vf (*acc)[TILE_COLUMNS]) {
    const int step = format == F32 ? 64 : 32;
    for (int g = 0; g < groups; g++)
        for (int c = 0; c < columns; c++) acc[g][c] = v_set1(0.0f);
    for (int64_t k = 0; k < length; k++)
        for (int g = 0; g < groups; g++) {
            const uint8_t *at = weights + g * group_stride + k * step;
            vf w = format == F32 ? v_load((const float *)at) : v_load_half(at);
            UNROLL for (int c = 0; c < columns; c++) acc[g][c] = v_fma(w, v_set1(x[c * length + k]), acc[g][c]);
        }
}

/* One tile of activation rows by groups [g, g + groups) of weights. */
INLINE void tile(const WeightFormat format, const int planes, const int groups, const int columns, const Matrix *w,
                 int64_t group, const Activations *x, int64_t first, float *y, int64_t ld) {
    const int quantized = planes > 0;
    const int64_t blocks = w->columns / BLOCK;
    const int64_t stride = quantized ? blocks * block_bytes(format) : w->columns * (format == F32 ? 64 : 32);
    const uint8_t *weights = w->data + group * stride;
    vf acc[GROUPS_AT_ONCE][TILE_COLUMNS];
    if (quantized)
        quantized_tile(format, planes, groups, columns, weights, stride, blocks, x->blocks + first * planes * blocks, acc);
    else
        float_tile(format, groups, columns, weights, stride, w->columns, x->values + first * w->columns, acc);
    for (int c = 0; c < columns && first + c < x->rows; c++)
        for (int g = 0; g < groups; g++) {
            int64_t row = (group + g) * LANES;
            store_first(y + (first + c) * ld + row, acc[g][c], w->rows - row);
        }
}

/* The tile widths that are compiled, narrowest first; a tile that holds fewer rows is padded. */
#if TILE_COLUMNS == 12
static const int NAME(tile_widths)[] = {1, 2, 4, 8, 12};
#define EACH_WIDTH(X, format, planes, groups)                                                                     \
    X(format, planes, groups, 1) X(format, planes, groups, 2) X(format, planes, groups, 4)                        \
    X(format, planes, groups, 8) X(format, planes, groups, 12)
#else
static const int NAME(tile_widths)[] = {1, 2, 4};
#define EACH_WIDTH(X, format, planes, groups)                                                                     \
    X(format, planes, groups, 1) X(format, planes, groups, 2) X(format, planes, groups, 4)
#endif

#if GROUPS_AT_ONCE == 2
#define EACH_GROUPING(X, format, planes) X(format, planes, 1) X(format, planes, 2)
#else
#define EACH_GROUPING(X, format, planes) X(format, planes, 1)
#endif

/* Float weights read float activations: planes is 0. */
#define EACH_FORMAT(X)                                                                                            \
    EACH_GROUPING(X, F32, 0) EACH_GROUPING(X, F16, 0) EACH_GROUPING(X, Q4_0, 1) EACH_GROUPING(X, Q4_0, 2)         \
    EACH_GROUPING(X, Q4_1, 1) EACH_GROUPING(X, Q4_1, 2) EACH_GROUPING(X, Q8_0, 1) EACH_GROUPING(X, Q8_0, 2)

#define TILE_NAME(format, planes, groups, columns) NAME(tile_##format##_##planes##_##groups##x##columns)
#define DEFINE_TILE(format, planes, groups, columns)                                                              \
    static NOINLINE void TILE_NAME(format, planes, groups, columns)(                                              \
        const Matrix *w, int64_t group, const Activations *x, int64_t first, float *y, int64_t ld) {              \
        tile(format, planes, groups, columns, w, group, x, first, y, ld);                                         \
    }
#define TILE_ENTRY(format, planes, groups, columns) TILE_NAME(format, planes, groups, columns),
#define DEFINE_TILES(format, planes, groups) EACH_WIDTH(DEFINE_TILE, format, planes, groups)
#define TILE_ROW(format_, planes_, groups_)                                                                       \
    {.format = format_, .planes = planes_, .groups = groups_,                                                     \
     .tiles = {EACH_WIDTH(TILE_ENTRY, format_, planes_, groups_)}},

typedef void (*TileFunction)(const Matrix *, int64_t, const Activations *, int64_t, float *, int64_t);

EACH_FORMAT(DEFINE_TILES)

static const struct {
    WeightFormat format;
    int planes, groups;
    TileFunction tiles[sizeof NAME(tile_widths) / sizeof(int)];
} NAME(tile_table)[] = {EACH_FORMAT(TILE_ROW)};

/* Index of the narrowest tile that holds `rows`, or the widest. */
INLINE int tile_index(int64_t rows) {
    int i = 0;
    while (NAME(tile_widths)[i] < rows && NAME(tile_widths)[i] < TILE_COLUMNS) i++;
    return i;
}

static int NAME(tile_width)(int64_t rows) { return NAME(tile_widths)[tile_index(rows)]; }

INLINE const TileFunction *find_tiles(WeightFormat format, int planes, int groups) {
    size_t i = 0;
    while (NAME(tile_table)[i].format != format || NAME(tile_table)[i].planes != planes ||
           NAME(tile_table)[i].groups != groups)
        i++;
    return NAME(tile_table)[i].tiles;
}

static void NAME(matmul)(const Matrix *w, const Activations *x, float *y, int64_t ld, int64_t first_group,
                         int64_t end_group) {
    int planes = w->format == F32 || w->format == F16 ? 0 : x->planes, groups;
    for (int64_t group = first_group; group < end_group; group += groups) {
        groups = end_group - group >= GROUPS_AT_ONCE ? GROUPS_AT_ONCE : 1;
        const TileFunction *tiles = find_tiles(w->format, planes, groups);
        for (int64_t first = 0; first < x->rows; first += TILE_COLUMNS)
            tiles[tile_index(x->rows - first)](w, group, x, first, y, ld);
    }
}

static void NAME(silu_mul)(float *gate, const float *up, int64_t count) {
    vf one = v_set1(1.0f), highest = v_set1(87.0f);
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = load_first(gate + i, count - i), minus = v_sub(v_set1(0.0f), x);
        vf sigmoid = v_div(one, v_add(one, v_exp(v_select_gt(minus, highest, highest, minus))));
        store_first(gate + i, v_mul(v_mul(x, sigmoid), load_first(up + i, count - i)), count - i);
    }
}

/* 16 elements of stored keys or values, from element `at`; scales not applied. */
INLINE vf load_stored(const KVFormat format, const uint8_t *p, int at) {
    return format == KV_I8 ? v_load_i8(p + at) : format == KV_F16 ? v_load_half(p + 2 * at) : v_load((const float *)p + at);
}

/* scores[r][t] = scale * (key scale * (q_r . k_t)), each one chain over ascending head dimensions. */
INLINE void score_rows(const AttentionRun *run, const KVFormat format, const int rows, int first, int groups) {
    vf scale = v_set1(run->scale);
    const float *q[QUERIES_AT_ONCE];
    for (int r = 0; r < rows; r++) q[r] = run->queries[first + r];
    for (int g = 0; g < groups; g++) {
        vf acc[QUERIES_AT_ONCE];
        UNROLL for (int r = 0; r < rows; r++) acc[r] = v_set1(0.0f);
        const uint8_t *keys = run->keys[g];
        for (int d = 0; d < run->head_dim; d++) {
            vf k = load_stored(format, keys, d * LANES);
            UNROLL for (int r = 0; r < rows; r++) acc[r] = v_fma(k, v_set1(q[r][d]), acc[r]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            if (format == KV_I8) acc[r] = v_mul(acc[r], v_load(run->key_scales[g]));
            v_store(run->scores + (first + r) * RUN_TOKENS + g * LANES, v_mul(acc[r], scale));
        }
    }
}

INLINE void score_every_row(const AttentionRun *run, const KVFormat format, int groups) {
    int row = 0;
    for (; row + QUERIES_AT_ONCE <= run->rows; row += QUERIES_AT_ONCE)
        score_rows(run, format, QUERIES_AT_ONCE, row, groups);
    for (; row + 3 <= run->rows; row += 3) score_rows(run, format, 3, row, groups);
    for (; row < run->rows; row++) score_rows(run, format, 1, row, groups);
}

/* Turns a query's scores into weights, and those into what stored values are multiplied with; unseen positions weigh
 * nothing.
 */
INLINE void weigh_row(const AttentionRun *run, int row) {
    float *scores = run->scores + row * RUN_TOKENS, *out = run->out[row];
    int visible = run->visible[row], groups = (visible + LANES - 1) / LANES;
    vf lowest = v_set1(-INFINITY), largest = lowest, sum = v_set1(0.0f);
    for (int g = 0; g < groups; g++) {
        int here = visible - g * LANES < LANES ? visible - g * LANES : LANES;
        vf s = v_first(v_load(scores + g * LANES), lowest, here);
        v_store(scores + g * LANES, s);
        largest = v_max(largest, s);
    }
    out[PARTIAL_MAX] = v_largest(largest);
    for (int g = 0; g < groups; g++) {
        vf w = v_exp(v_sub(v_load(scores + g * LANES), v_set1(out[PARTIAL_MAX])));
        sum = v_add(sum, w);
        v_store(scores + g * LANES, run->value_format == KV_I8 ? v_mul(w, v_load(run->value_scales[g])) : w);
    }
    out[PARTIAL_SUM] = v_sum(sum);
}

/* Adds positions [begin, end) to the weighted sums of values, in order, for 16 * `chunks` head dimensions from d. */
INLINE void add_values(const AttentionRun *run, const KVFormat format, const int rows, const int chunks, int first,
                       int d, int begin, int end) {
    vf acc[VALUE_ROWS][VALUE_CHUNKS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < chunks; j++)
            acc[r][j] = v_load(run->out[first + r] + PARTIAL_VALUES + d + j * LANES);
    for (int t = begin; t < end; t++) {
        int at = (t % LANES) * run->head_dim + d;
        vf v[VALUE_CHUNKS];
        UNROLL for (int j = 0; j < chunks; j++) v[j] = load_stored(format, run->values[t / LANES], at + j * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            vf weight = v_set1(run->scores[(first + r) * RUN_TOKENS + t]);
            UNROLL for (int j = 0; j < chunks; j++) acc[r][j] = v_fma(weight, v[j], acc[r][j]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < chunks; j++)
            v_store(run->out[first + r] + PARTIAL_VALUES + d + j * LANES, acc[r][j]);
}

INLINE void add_values_all_dims(const AttentionRun *run, const KVFormat format, const int rows, int first, int begin,
                                int end) {
    int d = 0;
    for (; d + VALUE_CHUNKS * LANES <= run->head_dim; d += VALUE_CHUNKS * LANES)
        add_values(run, format, rows, VALUE_CHUNKS, first, d, begin, end);
    for (; d < run->head_dim; d += LANES) add_values(run, format, rows, 1, first, d, begin, end);
}

/* Positions that every query sees in one pass for several queries, the rest for each alone. */
INLINE void add_every_row(const AttentionRun *run, const KVFormat format, int least) {
    int row = 0;
    for (; row + VALUE_ROWS <= run->rows; row += VALUE_ROWS) add_values_all_dims(run, format, VALUE_ROWS, row, 0, least);
    for (; row + 3 <= run->rows; row += 3) add_values_all_dims(run, format, 3, row, 0, least);
    for (; row < run->rows; row++) add_values_all_dims(run, format, 1, row, 0, least);
    for (row = 0; row < run->rows; row++)
        if (run->visible[row] > least) add_values_all_dims(run, format, 1, row, least, run->visible[row]);
}

#define DEFINE_ATTENTION(format)                                                                                  \
    static NOINLINE void NAME(score_##format)(const AttentionRun *run, int groups) {                              \
        score_every_row(run, format, groups);                                                                     \
    }                                                                                                             \
    static NOINLINE void NAME(add_##format)(const AttentionRun *run, int least) { add_every_row(run, format, least); }
DEFINE_ATTENTION(KV_F32)
DEFINE_ATTENTION(KV_F16)
DEFINE_ATTENTION(KV_I8)

/* By KVFormat. */
static void (*const NAME(score)[])(const AttentionRun *, int) = {NAME(score_KV_F32), NAME(score_KV_F16),
                                                                 NAME(score_KV_I8)};
static void (*const NAME(add)[])(const AttentionRun *, int) = {NAME(add_KV_F32), NAME(add_KV_F16), NAME(add_KV_I8)};

static void NAME(attend)(const AttentionRun *run) {
    int most = 0, least = RUN_TOKENS;
    for (int r = 0; r < run->rows; r++) {
        if (run->visible[r] > most) most = run->visible[r];
        if (run->visible[r] < least) least = run->visible[r];
    }
    NAME(score)[run->key_format](run, (most + LANES - 1) / LANES);
    for (int r = 0; r < run->rows; r++) {
        weigh_row(run, r);
        memset(run->out[r] + PARTIAL_VALUES, 0, (size_t)run->head_dim * sizeof(float));
    }
    NAME(add)[run->value_format](run, least);
}

static void NAME(merge)(float *state, const float *next, int head_dim) {
    float largest = state[PARTIAL_MAX] > next[PARTIAL_MAX] ? state[PARTIAL_MAX] : next[PARTIAL_MAX];
    float old = exp1(state[PARTIAL_MAX] - largest), new = exp1(next[PARTIAL_MAX] - largest);
    state[PARTIAL_MAX] = largest;
    state[PARTIAL_SUM] = fmaf(state[PARTIAL_SUM], old, next[PARTIAL_SUM] * new);
    vf keep = v_set1(old), take = v_set1(new);
    for (int d = PARTIAL_VALUES; d < PARTIAL_VALUES + head_dim; d += LANES)
        v_store(state + d, v_fma(v_load(state + d), keep, v_mul(v_load(next + d), take)));
}

static void NAME(finish)(const float *state, int head_dim, float *out) {
    vf sum = v_set1(state[PARTIAL_SUM]);
    for (int d = 0; d < head_dim; d += LANES) v_store(out + d, v_div(v_load(state + PARTIAL_VALUES + d), sum));
}

static float NAME(exp_shifted)(const float *logits, int64_t count, float *weights) {
    vf lowest = v_set1(-INFINITY), largest = lowest;
    for (int64_t i = 0; i < count; i += LANES) {
        int here = count - i < LANES ? (int)(count - i) : LANES;
        largest = v_max(largest, v_first(load_first(logits + i, here), lowest, here));
    }
    float max = v_largest(largest);
    for (int64_t i = 0; i < count; i += LANES)
        store_first(weights + i, v_exp(v_sub(load_first(logits + i, count - i), v_set1(max))), count - i);
    return max;
}

const KernelSet NAME(kernels) = {
    .name = SET_NAME,
    .tile_columns = TILE_COLUMNS,
    .tile_width = NAME(tile_width),
    .rms_norm = NAME(rms_norm),
    .quantize = NAME(quantize),
    .matmul = NAME(matmul),
    .silu_mul = NAME(silu_mul),
    .attend = NAME(attend),
    .merge = NAME(merge),
    .finish = NAME(finish),
    .exp_shifted = NAME(exp_shifted),
};

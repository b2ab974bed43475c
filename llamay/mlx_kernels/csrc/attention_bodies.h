/* Attention over one run of positions; see kernel_bodies.h. */

INLINE int stored_bytes(const KVFormat format) { return format == KV_I8 ? 1 : format == KV_F16 ? 2 : 4; }

/* 16 elements of stored keys or values, from element `at`; scales not applied. */
INLINE vf load_stored(const KVFormat format, const uint8_t *p, int at) {
    return format == KV_I8 ? v_load_i8(p + at) : format == KV_F16 ? v_load_half(p + 2 * at) : v_load((const float *)p + at);
}

/* Fetches element `at` when it is the first of the `index`-th 16 that begins a line of the cache; to the second cache,
 * because the nearest holds what the queries read now.
 */
INLINE void prefetch_stored(const KVFormat format, const uint8_t *p, int at, int index) {
    if (index % (64 / (LANES * stored_bytes(format))) == 0)
        __builtin_prefetch(p + (size_t)at * (size_t)stored_bytes(format), 0, 2);
}

/* Part of `count` that queries [first, first + rows) fetch of what all read next: memory is kept busy evenly. */
typedef struct { int begin, end; } Share;

INLINE Share share_of(const AttentionRun *run, int count, int first, int rows) {
    return (Share){count * first / run->rows, count * (first + rows) / run->rows};
}

INLINE int is_in(Share share, int index) { return index >= share.begin && index < share.end; }

/* Groups of keys that `rows` queries have accumulators for. */
#define MOST_KEY_GROUPS 4
#define KEY_GROUPS(rows) ((rows) * 4 <= SCORE_ACCUMULATORS ? 4 : (rows) * 2 <= SCORE_ACCUMULATORS ? 2 : 1)

/* scores[r][t] = scale * (key scale * (q_r . k_t)) for the positions of `groups` groups from g, each one chain over
 * ascending head dimensions. Fetches its share of what is read later.
 */
INLINE void score_tile(const AttentionRun *run, const KVFormat format, const int rows, const int groups, int first,
                       int g) {
    const Share share = share_of(run, run->head_dim, first, rows);
    const float *q[QUERIES_AT_ONCE];
    vf acc[MOST_KEY_GROUPS][QUERIES_AT_ONCE];
    UNROLL for (int r = 0; r < rows; r++) q[r] = run->queries[first + r];
    UNROLL for (int i = 0; i < groups; i++)
        UNROLL for (int r = 0; r < rows; r++) acc[i][r] = v_set1(0.0f);
    for (int d = 0; d < run->head_dim; d++) {
        vf k[MOST_KEY_GROUPS];
        UNROLL for (int i = 0; i < groups; i++) {
            k[i] = load_stored(format, run->keys[g + i], d * LANES);
            if (is_in(share, d)) prefetch_stored(format, run->keys_ahead[g + i], d * LANES, d);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf x = v_set1(q[r][d]);
            UNROLL for (int i = 0; i < groups; i++) acc[i][r] = v_fma(k[i], x, acc[i][r]);
        }
    }
    UNROLL for (int i = 0; i < groups; i++)
        UNROLL for (int r = 0; r < rows; r++) {
            if (format == KV_I8) acc[i][r] = v_mul(acc[i][r], v_load(run->key_scales[g + i]));
            v_store(run->scores + (first + r) * SCORE_STRIDE + (g + i) * LANES, v_mul(acc[i][r], v_set1(run->scale)));
        }
}

/* Groups [begin, end) for `rows` queries. */
INLINE int score_rows(const AttentionRun *run, const KVFormat format, const int rows, int first, int begin, int end) {
    int g = begin;
    for (; g + KEY_GROUPS(rows) <= end; g += KEY_GROUPS(rows))
        score_tile(run, format, rows, KEY_GROUPS(rows), first, g);
    for (; g < end; g++) score_tile(run, format, rows, 1, first, g);
    return rows;
}

/* As many of the queries from `first` on as have a tile; returns how many. */
INLINE int score_some_rows(const AttentionRun *run, const KVFormat format, int first, int begin, int end) {
    int left = run->rows - first;
    if (left >= QUERIES_AT_ONCE) return score_rows(run, format, QUERIES_AT_ONCE, first, begin, end);
    if (left >= 4 && left != 6) return score_rows(run, format, 4, first, begin, end);
    if (left >= 3) return score_rows(run, format, 3, first, begin, end);
    return score_rows(run, format, 1, first, begin, end);
}

INLINE void score_every_row(const AttentionRun *run, const KVFormat format, int first, int groups) {
    for (int begin = first; begin < groups; begin += NEAR_GROUPS) {
        int end = begin + NEAR_GROUPS < groups ? begin + NEAR_GROUPS : groups;
        for (int row = 0; row < run->rows;) row += score_some_rows(run, format, row, begin, end);
    }
}

/* Turns a query's scores into weights, and those into what stored values are multiplied with; unseen positions weigh
 * nothing.
 */
INLINE void weigh_row(const AttentionRun *run, int row) {
    float *scores = run->scores + row * SCORE_STRIDE, *out = run->out[row];
    int first = run->first[row], visible = run->visible[row];
    int begin = first / LANES, groups = (visible + LANES - 1) / LANES;
    vf lowest = v_set1(-INFINITY), largest = lowest, sum = v_set1(0.0f);
    for (int g = begin; g < groups && run->soft_cap > 0.0f; g++)
        v_store(scores + g * LANES, v_soft_cap(v_load(scores + g * LANES), v_set1(run->soft_cap)));
    if (first % LANES) v_store(scores + begin * LANES, v_first(lowest, v_load(scores + begin * LANES), first % LANES));
    if (visible % LANES) {
        float *last = scores + (groups - 1) * LANES;
        v_store(last, v_first(v_load(last), lowest, visible % LANES));
    }
    for (int g = begin; g < groups; g++) largest = v_max(largest, v_load(scores + g * LANES));
    out[PARTIAL_MAX] = v_largest(largest);
    largest = v_set1(out[PARTIAL_MAX]);
    for (int g = begin; g < groups; g++) {
        vf w = v_exp(v_sub(v_load(scores + g * LANES), largest));
        sum = v_add(sum, w);
        v_store(scores + g * LANES, run->value_format == KV_I8 ? v_mul(w, v_load(run->value_scales[g])) : w);
    }
    out[PARTIAL_SUM] = v_sum(sum);
}

/* Adds positions [begin, end) to the weighted sums of values, in order, for 16 * `chunks` head dimensions from d.
 * Fetches its share of what is read later.
 */
INLINE void add_values(const AttentionRun *run, const KVFormat format, const int rows, const int chunks, int first,
                       int d, int begin, int end) {
    const Share share = share_of(run, LANES, first, rows);
    vf acc[VALUE_ROWS][VALUE_CHUNKS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < chunks; j++)
            acc[r][j] = v_load(run->out[first + r] + PARTIAL_VALUES + d + j * LANES);
    const float *weights = run->scores + first * SCORE_STRIDE;
    for (int group_end; begin < end; begin = group_end) {
        int g = begin / LANES, at = begin % LANES * run->head_dim + d;
        group_end = (g + 1) * LANES < end ? (g + 1) * LANES : end;
        for (int t = begin; t < group_end; t++, at += run->head_dim) {
            vf v[VALUE_CHUNKS];
            UNROLL for (int j = 0; j < chunks; j++) {
                v[j] = load_stored(format, run->values[g], at + j * LANES);
                if (is_in(share, t % LANES)) prefetch_stored(format, run->values_ahead[g], at + j * LANES, j);
            }
            UNROLL for (int r = 0; r < rows; r++) {
                vf weight = v_set1(weights[r * SCORE_STRIDE + t]);
                UNROLL for (int j = 0; j < chunks; j++) acc[r][j] = v_fma(weight, v[j], acc[r][j]);
            }
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

/* What each of some queries sees of positions [begin, end), one query after the other. */
INLINE void add_alone(const AttentionRun *run, const KVFormat format, const int rows, int first, int begin, int end) {
    for (int r = first; r < first + rows; r++) {
        int from = run->first[r] > begin ? run->first[r] : begin, to = run->visible[r] < end ? run->visible[r] : end;
        if (from < to) add_values_all_dims(run, format, 1, r, from, to);
    }
}

/* Of positions [begin, end), those that all of some queries see in one pass for these, the rest for each alone. */
INLINE void add_rows(const AttentionRun *run, const KVFormat format, const int rows, int first, int begin, int end) {
    int all_from = begin, all_to = end;
    for (int r = first; r < first + rows; r++) {
        if (run->first[r] > all_from) all_from = run->first[r];
        if (run->visible[r] < all_to) all_to = run->visible[r];
    }
    if (all_from >= all_to) {
        add_alone(run, format, rows, first, begin, end);
        return;
    }
    add_alone(run, format, rows, first, begin, all_from);
    add_values_all_dims(run, format, rows, first, all_from, all_to);
    add_alone(run, format, rows, first, all_to, end);
}

INLINE void add_every_row(const AttentionRun *run, const KVFormat format, int least, int most) {
    const int stretch = run->rows > VALUE_ROWS ? NEAR_GROUPS * LANES : RUN_TOKENS;
    for (int begin = least; begin < most; begin += stretch) {
        int row = 0, end = begin + stretch < most ? begin + stretch : most;
        for (; row + VALUE_ROWS <= run->rows; row += VALUE_ROWS) add_rows(run, format, VALUE_ROWS, row, begin, end);
        for (; row + 3 <= run->rows; row += 3) add_rows(run, format, 3, row, begin, end);
        for (; row < run->rows; row++) add_rows(run, format, 1, row, begin, end);
    }
}

#define DEFINE_ATTENTION(format)                                                                                  \
    static NOINLINE void NAME(score_##format)(const AttentionRun *run, int first, int groups) {                   \
        score_every_row(run, format, first, groups);                                                              \
    }                                                                                                             \
    static NOINLINE void NAME(add_##format)(const AttentionRun *run, int least, int most) {                       \
        add_every_row(run, format, least, most);                                                                  \
    }
DEFINE_ATTENTION(KV_F32)
DEFINE_ATTENTION(KV_F16)
DEFINE_ATTENTION(KV_I8)

/* By KVFormat. */
static void (*const NAME(score)[])(const AttentionRun *, int, int) = {NAME(score_KV_F32), NAME(score_KV_F16),
                                                                      NAME(score_KV_I8)};
static void (*const NAME(add)[])(const AttentionRun *, int, int) = {NAME(add_KV_F32), NAME(add_KV_F16),
                                                                    NAME(add_KV_I8)};

static void NAME(attend)(const AttentionRun *run) {
    int least = RUN_TOKENS, most = 0;
    for (int r = 0; r < run->rows; r++) {
        if (run->first[r] < least) least = run->first[r];
        if (run->visible[r] > most) most = run->visible[r];
    }
    NAME(score)[run->key_format](run, least / LANES, (most + LANES - 1) / LANES);
    for (int r = 0; r < run->rows; r++) {
        weigh_row(run, r);
        memset(run->out[r] + PARTIAL_VALUES, 0, (size_t)run->head_dim * sizeof(float));
    }
    NAME(add)[run->value_format](run, least, most);
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

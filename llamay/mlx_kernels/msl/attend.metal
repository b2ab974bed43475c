// Attention over one run of 256 positions, for rows that see the same pages there.
//
// A threadgroup takes an item and a kv head; its (row, query head) pairs are spread over the
// simdgroups. A run is folded in tiles of 32 positions, ascending: lane l computes the score of
// position l, one fma chain ascending in the head dimension; the tile's weights are added in the
// fixed tree; each element of the output is one fma chain ascending in positions. A row's result has no
// part of tiles, and of a tile's positions, that the row does not see.
//
// queries: [rows, heads * HEAD_DIM]; positions: [rows]
// items: [items, 12] = line of the page table, run, rows in use, 0, the rows, then any of them again
// pages: [lines, width] = slab << 26 | page in the slab, width a multiple of 8
// slab0..: [pages * page size, row words]
// partial: [rows, runs, heads, HEAD_DIM + 2] = largest score, sum of weights, weighted values; its
// first row is row sizes[4] of the queries
// sizes: width, row words, page size (a multiple of 16), runs, first row, positions that a row sees, its
// own the last
const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
const int kv_head = int(threadgroup_position_in_grid.x), kv_heads = int(threadgroups_per_grid.x);
const device int* item = items + int(threadgroup_position_in_grid.y) * 12;
const device int* line = pages + item[0] * sizes[0];
const int start = item[1] * 256, used = item[2], row_words = sizes[1], page_size = sizes[2];
const int window = sizes[5];
const int key_words = llamay::vector_words<KEYS>(HEAD_DIM), value_words = llamay::vector_words<VALUES>(HEAD_DIM);
const int key_at = kv_head * key_words, value_at = kv_heads * key_words + kv_head * value_words;
const device uint* slabs[16] = {slab0, slab1, slab2, slab3, slab4, slab5, slab6, slab7,
                                slab8, slab9, slab10, slab11, slab12, slab13, slab14, slab15};

threadgroup float keys[32 * (CHUNK + 1)];
threadgroup float weights[SIMDGROUPS * PAIRS * 32];
threadgroup float* own_weights = weights + simdgroup * (PAIRS * 32);

// Of each pair, its row's position from the run's first on, -1 if there is no such pair. It sees
// position p if 0 <= own - p < window, which is one comparison of unsigned numbers.
int own[PAIRS];
int pair_row[PAIRS], pair_head[PAIRS];
float largest[PAIRS], total[PAIRS], out[PAIRS][(HEAD_DIM + 31) / 32];
for (int i = 0; i < PAIRS; i++) {
    const int pair = int(simdgroup) + i * SIMDGROUPS, index = pair / GROUP;
    pair_row[i] = item[4 + index];
    pair_head[i] = kv_head * GROUP + pair % GROUP;
    own[i] = index < used ? positions[pair_row[i]] - start : -1;
    largest[i] = -INFINITY;
    total[i] = 0.0f;
    for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) out[i][j] = 0.0f;
}
int begin = 256, end = 0;  // what one of the rows sees lies in [begin, end)
for (int i = 0; i < used; i++) {
    const int row_end = positions[item[4 + i]] + 1 - start;
    begin = min(begin, max(0, row_end - window));
    end = max(end, min(row_end, 256));
}
if (begin >= end) return;

for (int tile = begin / 32 * 32; tile < end; tile += 32) {
    // Positions tile + 0..15 lie in one page, and so do tile + 16..31.
    const int middle = tile + 16;
    const int low_page = line[(start + tile) / page_size], high_page = line[(start + middle) / page_size];
    const device uint* low = slabs[low_page >> 26] +
        (ulong(low_page & 0x3ffffff) * page_size + (start + tile) % page_size) * row_words;
    const device uint* high = slabs[high_page >> 26] +
        (ulong(high_page & 0x3ffffff) * page_size + (start + middle) % page_size) * row_words;
    float scores[PAIRS];
    for (int i = 0; i < PAIRS; i++) scores[i] = 0.0f;
    for (int chunk = 0; chunk < HEAD_DIM; chunk += CHUNK) {
        const int width = min(CHUNK, HEAD_DIM - chunk);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = int(thread_index_in_threadgroup); i < 32 * width; i += SIMDGROUPS * 32) {
            const int t = i / width, d = i % width;
            if (tile + t < end) {
                const device uint* vector = (t < 16 ? low : high) + t % 16 * row_words + key_at;
                keys[t * (CHUNK + 1) + d] = llamay::stored_element<KEYS>(vector, chunk + d);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = 0; i < PAIRS; i++) {
            if (uint(own[i] - tile - int(lane)) >= uint(window)) continue;
            const device float* query = queries + (pair_row[i] * kv_heads * GROUP + pair_head[i]) * HEAD_DIM + chunk;
            for (int d = 0; d < width; d++) scores[i] = fma(query[d], keys[lane * (CHUNK + 1) + d], scores[i]);
        }
    }
    float key_scale = 1.0f, value_scale = 1.0f;
    if (tile + int(lane) < end) {
        const device uint* stored = (lane < 16 ? low : high) + lane % 16 * row_words;
        key_scale = llamay::stored_scale<KEYS>(stored + key_at);
        value_scale = llamay::stored_scale<VALUES>(stored + value_at);
    }
    for (int i = 0; i < PAIRS; i++) {
        if (tile > own[i] || tile + 31 <= own[i] - window) continue;
        const bool sees = uint(own[i] - tile - int(lane)) < uint(window);
        float score = scores[i] * key_scale * scale;
        if (CAPPED) score = llamay::soft_capped(score, soft_cap);
        if (!sees) score = -INFINITY;
        const float before = largest[i];
        largest[i] = max(before, simd_max(score));
        float weight = sees ? llamay::exp_fixed(score - largest[i]) : 0.0f;
        own_weights[i * 32 + lane] = sees ? weight * value_scale : 0.0f;
        const float kept = llamay::exp_fixed(before - largest[i]);
        total[i] = fma(total[i], kept, llamay::sum_lanes<1>(&weight, lane));
        for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) out[i][j] *= kept;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = 0; t < min(32, end - tile); t++) {
        const device uint* vector = (t < 16 ? low : high) + t % 16 * row_words + value_at;
        for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
            const int d = int(lane) + 32 * j;
            if (d >= HEAD_DIM) continue;
            const float element = llamay::stored_element<VALUES>(vector, d);
            for (int i = 0; i < PAIRS; i++) {
                if (uint(own[i] - tile - t) < uint(window)) out[i][j] = fma(own_weights[i * 32 + t], element, out[i][j]);
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

for (int i = 0; i < PAIRS; i++) {
    if (own[i] < 0) continue;
    device float* target = partial + ((ulong(pair_row[i] - sizes[4]) * sizes[3] + item[1]) * kv_heads * GROUP + pair_head[i]) * (HEAD_DIM + 2);
    if (lane == 0) {
        target[0] = largest[i];
        target[1] = total[i];
    }
    for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
        const int d = int(lane) + 32 * j;
        if (d < HEAD_DIM) target[2 + d] = out[i][j];
    }
}

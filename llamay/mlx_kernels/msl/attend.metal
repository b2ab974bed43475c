// Attention over one run of 256 positions, for rows that see the same pages there.
//
// A threadgroup takes an item and a kv head; its (row, query head) pairs are spread over the
// simdgroups. A run is folded in tiles of 32 positions, ascending: lane l computes the score of
// position l, one fma chain ascending in the head dimension; the tile's weights are added in the
// fixed tree; each element of the output is one fma chain ascending in positions.
//
// queries: [rows, heads * HEAD_DIM]; positions: [rows]
// items: [items, 12] = line of the page table, run, rows in use, 0, the rows, then any of them again
// pages: [lines, width] = slab << 26 | page in the slab, width a multiple of 8
// slab0..: [pages * page size, row words]
// partial: [rows, runs, heads, HEAD_DIM + 2] = largest score, sum of weights, weighted values; its
// first row is row sizes[4] of the queries
// sizes: width, row words, page size (a multiple of 16), runs, first row
const uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
const int kv_head = int(threadgroup_position_in_grid.x), kv_heads = int(threadgroups_per_grid.x);
const device int* item = items + int(threadgroup_position_in_grid.y) * 12;
const device int* line = pages + item[0] * sizes[0];
const int start = item[1] * 256, used = item[2], row_words = sizes[1], page_size = sizes[2];
const int key_words = llamay::vector_words<KEYS>(HEAD_DIM), value_words = llamay::vector_words<VALUES>(HEAD_DIM);
const int key_at = kv_head * key_words, value_at = kv_heads * key_words + kv_head * value_words;
const device uint* slabs[16] = {slab0, slab1, slab2, slab3, slab4, slab5, slab6, slab7,
                                slab8, slab9, slab10, slab11, slab12, slab13, slab14, slab15};

threadgroup float keys[32 * (CHUNK + 1)];
threadgroup float weights[SIMDGROUPS * PAIRS * 32];
threadgroup float* own_weights = weights + simdgroup * (PAIRS * 32);

int seen[PAIRS];  // positions that a pair sees from the run's first on; 0 if there is no such pair
int pair_row[PAIRS], pair_head[PAIRS];
float largest[PAIRS], total[PAIRS], out[PAIRS][(HEAD_DIM + 31) / 32];
for (int i = 0; i < PAIRS; i++) {
    const int pair = int(simdgroup) + i * SIMDGROUPS, index = pair / GROUP;
    pair_row[i] = item[4 + index];
    pair_head[i] = kv_head * GROUP + pair % GROUP;
    seen[i] = index < used ? positions[pair_row[i]] + 1 - start : 0;
    largest[i] = -INFINITY;
    total[i] = 0.0f;
    for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) out[i][j] = 0.0f;
}
int end = 0;
for (int i = 0; i < used; i++) end = max(end, min(positions[item[4 + i]] + 1 - start, 256));

for (int tile = 0; tile < end; tile += 32) {
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
            if (tile + int(lane) >= seen[i]) continue;
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
        if (tile >= seen[i]) continue;
        const bool sees = tile + int(lane) < seen[i];
        const float score = sees ? scores[i] * key_scale * scale : -INFINITY;
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
                if (tile + t < seen[i]) out[i][j] = fma(own_weights[i * 32 + t], element, out[i][j]);
            }
        }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

for (int i = 0; i < PAIRS; i++) {
    if (seen[i] <= 0) continue;
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

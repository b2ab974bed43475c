// RMS norm of each head of queries and keys if HEAD_NORMS, rope on them, and keys and values as pages
// hold them; one simdgroup for each head.
// qkv: [rows, (query, key, value heads) * HEAD_DIM]; norms: [2, HEAD_DIM], of queries and of
// keys; cosine, sine: [rows, pairs]
// queries: [rows, heads * HEAD_DIM]; stored: [rows, words of a position's row]
// sizes: rows, heads, kv heads, pairs that rope turns
const int head = int(threadgroup_position_in_grid.x), row = int(threadgroup_position_in_grid.y);
const int heads = sizes[1], kv_heads = sizes[2], pairs = sizes[3];
const uint lane = thread_index_in_simdgroup;
const device float* vector = qkv + (row * (heads + 2 * kv_heads) + head) * HEAD_DIM;
const bool is_value = head >= heads + kv_heads, normed = HEAD_NORMS && !is_value;
const float factor = normed ? llamay::rms_factor(vector, HEAD_DIM, eps, lane) : 1.0f;
const llamay::Head given = {vector, norms + (head < heads ? 0 : HEAD_DIM), factor, normed};
const int turned = is_value ? 0 : pairs;
float4 values[(HEAD_DIM + 127) / 128];
for (int i = 0; int(lane) + 32 * i < HEAD_DIM / 4; i++) {
    for (int j = 0; j < 4; j++) {
        const int d = 4 * (int(lane) + 32 * i) + j;
        values[i][j] = llamay::rotated(given, d, turned, INTERLEAVED, cosine + row * pairs, sine + row * pairs);
    }
}
if (head < heads) {
    device float* target = queries + (row * heads + head) * HEAD_DIM;
    for (int i = 0; int(lane) + 32 * i < HEAD_DIM / 4; i++) {
        for (int j = 0; j < 4; j++) target[4 * (int(lane) + 32 * i) + j] = values[i][j];
    }
} else {
    const int key_words = llamay::vector_words<KEYS>(HEAD_DIM), value_words = llamay::vector_words<VALUES>(HEAD_DIM);
    device uint* target = stored + ulong(row) * (kv_heads * (key_words + value_words));
    const int index = head - heads;
    if (index < kv_heads) {
        llamay::store_vector<KEYS, HEAD_DIM>(values, target + index * key_words, lane);
    } else {
        target += kv_heads * key_words + (index - kv_heads) * value_words;
        llamay::store_vector<VALUES, HEAD_DIM>(values, target, lane);
    }
}

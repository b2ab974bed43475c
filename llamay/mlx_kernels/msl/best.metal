// The logits that come first in each row, by value descending, ties to the lower id, and the sum of
// exp(logit - largest) in units of 2^-40, each rounded down: integers, so that no order matters.
//
// One threadgroup of 1024 for each row. Thread t looks after logits t, t + 1024, ...; `value` is the
// first of these that was not taken yet.
// values, ids: [rows, count]; totals: [rows], 0 if a logit is not finite
// sizes: vocab, count
const int vocab = sizes[0], count = sizes[1], row = int(threadgroup_position_in_grid.y);
const int thread_index = int(thread_index_in_threadgroup), simdgroup = int(simdgroup_index_in_threadgroup);
const uint lane = thread_index_in_simdgroup;
const int none = 0x7fffffff;
const device float* given = logits + ulong(row) * vocab;
threadgroup float group_values[32];
threadgroup int group_ids[32];
threadgroup ulong group_sums[32];
threadgroup bool group_finite[32];

float value = -INFINITY, largest = 0.0f;
int id = none;
bool finite = true;
for (int i = thread_index; i < vocab; i += 1024) {
    finite = finite && abs(given[i]) < INFINITY;
    if (given[i] > value) {
        value = given[i];
        id = i;
    }
}
for (int k = 0; k < count; k++) {
    const float group_value = simd_max(value);
    const int group_id = simd_min(value == group_value ? id : none);
    if (lane == 0) {
        group_values[simdgroup] = group_value;
        group_ids[simdgroup] = group_id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float taken = simd_max(group_values[lane]);
    const int taken_id = simd_min(group_values[lane] == taken ? group_ids[lane] : none);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k == 0) largest = taken;
    if (thread_index == 0) {
        values[row * count + k] = taken;
        ids[row * count + k] = taken_id;
    }
    // What the thread that had it has left is found by its whole simdgroup.
    const int owner = taken_id % 1024;
    if (simdgroup == owner / 32) {
        float left = -INFINITY;
        int left_id = none;
        for (int i = owner + 1024 * int(lane); i < vocab; i += 32 * 1024) {
            const bool later = given[i] < taken || (given[i] == taken && i > taken_id);
            if (later && given[i] > left) {
                left = given[i];
                left_id = i;
            }
        }
        const float next = simd_max(left);
        const int next_id = simd_min(left == next ? left_id : none);
        if (thread_index == owner) {
            value = next;
            id = next_id;
        }
    }
}

ulong sum = 0;
for (int i = thread_index; i < vocab; i += 1024) {
    sum += ulong(llamay::exp_fixed(given[i] - largest) * 1099511627776.0f);
}
for (int bit = 16; bit > 0; bit /= 2) {
    const uint low = simd_shuffle_xor(uint(sum), bit), high = simd_shuffle_xor(uint(sum >> 32), bit);
    sum += ulong(high) << 32 | low;
}
finite = simd_all(finite);
if (lane == 0) {
    group_sums[simdgroup] = sum;
    group_finite[simdgroup] = finite;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0) {
    ulong total = 0;
    for (int i = 0; i < 32; i++) {
        total += group_sums[i];
        finite = finite && group_finite[i];
    }
    totals[row] = finite ? total : 0;
}

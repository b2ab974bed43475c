// Attention's runs merged in ascending order from the first that the row sees on, one simdgroup for each
// row and head.
// partial: [rows, runs, heads, HEAD_DIM + 2] as attend.metal writes it; positions: of all rows
// y: [rows, heads * HEAD_DIM]
// sizes: runs, heads, first of the positions, positions that a row sees
const uint lane = thread_index_in_simdgroup;
const int head = int(threadgroup_position_in_grid.x), row = int(threadgroup_position_in_grid.y);
const int runs = sizes[0], heads = sizes[1];
const int end = positions[sizes[2] + row] + 1, first = max(0, end - sizes[3]) / 256;
const device float* part = partial + ((ulong(row) * runs + first) * heads + head) * (HEAD_DIM + 2);
float largest = part[0], total = part[1], out[(HEAD_DIM + 31) / 32];
for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
    const int d = int(lane) + 32 * j;
    out[j] = d < HEAD_DIM ? part[2 + d] : 0.0f;
}
for (int run = first + 1; run * 256 < end; run++) {
    part += heads * (HEAD_DIM + 2);
    const float before = largest;
    largest = max(before, part[0]);
    const float kept = llamay::exp_fixed(before - largest), added = llamay::exp_fixed(part[0] - largest);
    total = fma(total, kept, part[1] * added);
    for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
        const int d = int(lane) + 32 * j;
        if (d < HEAD_DIM) out[j] = fma(out[j], kept, part[2 + d] * added);
    }
}
for (int j = 0; j < (HEAD_DIM + 31) / 32; j++) {
    const int d = int(lane) + 32 * j;
    if (d < HEAD_DIM) y[(row * heads + head) * HEAD_DIM + d] = out[j] / total;
}

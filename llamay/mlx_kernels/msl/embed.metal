// stream[row] = scale * table[tokens[row]], one thread for each unit of 16 weights.
// sizes: columns
const int unit = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);
const int columns = sizes[0];
typedef llamay::Blocks<FORMAT> B;
if (unit < columns / 16) {
    const device uchar* weights = table + ulong(tokens[row]) * (columns / B::LENGTH * B::BYTES);
    llamay::Eight halves[2];
    B::template read<0>(weights, unit, halves[0]);
    B::template read<1>(weights, unit, halves[1]);
    device float* at = stream + row * columns + B::first(unit);
    for (int i = 0; i < 16; i++) {
        const llamay::Eight w = halves[i / 8];
        const float minimum = B::HAS_MINIMUM ? w.minimum : 0.0f;
        at[i / 8 * B::GAP + i % 8] = fma(w.scale, w.q[i % 8 / 4][i % 4], minimum) * scale;
    }
}

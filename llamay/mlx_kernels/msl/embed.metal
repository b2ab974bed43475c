// stream[row] = table[tokens[row]], one thread for each unit of 16 weights.
// sizes: rows, columns
const int unit = int(thread_position_in_grid.x), row = int(thread_position_in_grid.y);
const int columns = sizes[1];
typedef llamay::Blocks<FORMAT> B;
if (unit < columns / 16 && row < sizes[0]) {
    llamay::Unit w;
    B::read(table + ulong(tokens[row]) * (columns / B::LENGTH * B::BYTES), unit, w);
    device float* at = stream + row * columns + B::first(unit);
    for (int i = 0; i < 16; i++) {
        const int half_unit = i / 8;
        const float minimum = B::HAS_MINIMUM ? w.minimum[half_unit] : 0.0f;
        at[half_unit * B::GAP + i % 8] = fma(w.scale[half_unit], w.q[i / 4][i % 4], minimum);
    }
}

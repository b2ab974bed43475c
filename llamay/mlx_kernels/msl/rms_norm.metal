// y[row] = x[row] * factor * norm (+ residual[row] if ADD), one simdgroup for each row.
// sizes: rows, columns
const int row = int(thread_position_in_grid.y), columns = sizes[1];
const uint lane = thread_index_in_simdgroup;
const float factor = llamay::rms_factor(x + row * columns, columns, eps, lane);
for (int column = int(lane); column < columns; column += 32) {
    const int at = row * columns + column;
    const float scaled = x[at] * factor;
    y[at] = ADD ? fma(scaled, norm[column], residual[at]) : scaled * norm[column];
}

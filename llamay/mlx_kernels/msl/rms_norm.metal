// y[row] = x[row] * factor * norm, one simdgroup for each row.
// sizes: rows, columns
const int row = int(thread_position_in_grid.y), columns = sizes[1];
const uint lane = thread_index_in_simdgroup;
const float factor = llamay::rms_factor(x + row * columns, columns, eps, lane);
for (int column = int(lane); column < columns; column += 32) {
    y[row * columns + column] = x[row * columns + column] * factor * norm[column];
}

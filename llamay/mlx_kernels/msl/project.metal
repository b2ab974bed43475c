// y[row] = weights . x[row] (+ residual[row] if ADD); a simdgroup computes OUTPUTS outputs of ROWS rows.
// sizes: rows, columns, outputs
const uint lane = thread_index_in_simdgroup;
const int columns = sizes[1], outputs = sizes[2];
const int row = int(threadgroup_position_in_grid.y) * ROWS, rows = min(ROWS, sizes[0] - row);
const int output = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * OUTPUTS;
if (output < outputs) {
    const llamay::Plain inputs = {x + row * columns, columns};
    const float value = llamay::product<FORMAT, ROWS, OUTPUTS>(
        llamay::weights_of<FORMAT>(weights, output, columns), outputs - output, rows, columns, inputs, lane);
    const llamay::Owned<ROWS, OUTPUTS> owned(lane);
    if (owned.first && owned.row < rows && output + owned.output < outputs) {
        const int at = (row + owned.row) * outputs + output + owned.output;
        y[at] = ADD ? residual[at] + value : value;
    }
}

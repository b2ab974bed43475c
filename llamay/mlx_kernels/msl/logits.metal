// y[row] = head . n, n = norm(x[row]) if NORM, else x[row]; soft-capped if CAPPED, and then
// NaN if it was not finite, so that damage is noticed.
// A simdgroup computes OUTPUTS outputs of a tile of ROWS rows.
// sizes: rows, columns, outputs
const uint lane = thread_index_in_simdgroup;
const int columns = sizes[1], outputs = sizes[2];
const int row = int(threadgroup_position_in_grid.y) * ROWS, rows = min(ROWS, sizes[0] - row);
const int output = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * OUTPUTS;
threadgroup float factors[ROWS];
if (NORM) {
    llamay::rms_factors(x + row * columns, rows, columns, eps, factors, simdgroup_index_in_threadgroup, SIMDGROUPS, lane);
}
const auto inputs = llamay::InputsOf<NORM>::of(x + row * columns, norm, factors, columns);
if (output < outputs) {
    const float value = llamay::product<FORMAT, ROWS, OUTPUTS>(
        llamay::weights_of<FORMAT>(head, output, columns), outputs - output, rows, columns, inputs, lane);
    const llamay::Owned<ROWS, OUTPUTS> owned(lane);
    if (owned.first && owned.row < rows && output + owned.output < outputs) {
        const float capped = llamay::soft_capped(value, soft_cap) + (value - value);
        y[(row + owned.row) * outputs + output + owned.output] = CAPPED ? capped : value;
    }
}

// y[row] = [query, key, value] weights . n (+ bias), n = norm(x[row]) if NORM, else x[row].
// A simdgroup computes OUTPUTS outputs of a tile of ROWS rows; no threadgroup has outputs of two.
// sizes: rows, columns, query outputs, key outputs, value outputs (multiples of 16)
const uint lane = thread_index_in_simdgroup;
const int columns = sizes[1], total = sizes[2] + sizes[3] + sizes[4];
const int row = int(threadgroup_position_in_grid.y) * ROWS, rows = min(ROWS, sizes[0] - row);
const int output = (int(threadgroup_position_in_grid.x) * SIMDGROUPS + int(simdgroup_index_in_threadgroup)) * OUTPUTS;
threadgroup float factors[ROWS];
if (NORM) {
    llamay::rms_factors(x + row * columns, rows, columns, eps, factors, simdgroup_index_in_threadgroup, SIMDGROUPS, lane);
}
const auto inputs = llamay::InputsOf<NORM>::of(x + row * columns, norm, factors, columns);
float value;
if (output < sizes[2]) {
    value = llamay::product<QUERY, ROWS, OUTPUTS>(
        llamay::weights_of<QUERY>(query, output, columns), OUTPUTS, rows, columns, inputs, lane);
} else if (output < sizes[2] + sizes[3]) {
    value = llamay::product<KEY, ROWS, OUTPUTS>(
        llamay::weights_of<KEY>(key, output - sizes[2], columns), OUTPUTS, rows, columns, inputs, lane);
} else {
    value = llamay::product<VALUE, ROWS, OUTPUTS>(
        llamay::weights_of<VALUE>(value_weights, output - sizes[2] - sizes[3], columns), OUTPUTS, rows, columns, inputs, lane);
}
const llamay::Owned<ROWS, OUTPUTS> owned(lane);
if (owned.first && owned.row < rows) {
    const int n = output + owned.output;
    y[(row + owned.row) * total + n] = BIAS ? value + bias[n] : value;
}

// RMS norm of rows.
namespace llamay {

inline float4 load4(const device float* at) {
    return *reinterpret_cast<const device float4*>(at);
}

// 1 / sqrt(mean of squares + eps) of x[columns], columns a multiple of 4, in every lane.
inline float rms_factor(const device float* x, int columns, float eps, uint lane) {
    float sum = 0.0f;
    for (int column = int(lane) * 4; column < columns; column += 128) {
        const float4 v = load4(x + column);
        sum = fma(v.x, v.x, sum);
        sum = fma(v.y, v.y, sum);
        sum = fma(v.z, v.z, sum);
        sum = fma(v.w, v.w, sum);
    }
    sum = sum_lanes<1>(&sum, lane);
    return 1.0f / sqrt(sum / float(columns) + eps);
}

// Fills factors[rows] with each row's norm; every thread of the threadgroup calls it.
inline void rms_factors(const device float* x, int rows, int columns, float eps,
                        threadgroup float* factors, uint simdgroup, uint simdgroups, uint lane) {
    for (int row = int(simdgroup); row < rows; row += int(simdgroups)) {
        const float factor = rms_factor(x + row * columns, columns, eps, lane);
        if (lane == 0) factors[row] = factor;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace llamay

// Products of rows of inputs with rows of quantised weights.
//
// Order of reduction, part of the numerics contract: a row of weights is cut into units of 16 (see
// blocks.metal); lane l takes units l, l + 32, ..., each as two halves of 8, ascending:
// sum = one fma chain over the half, acc = fma(scale, sum, acc), then for formats with a minimum
// acc = fma(minimum, sum of the half's inputs, acc). The 32 lanes are then added in a fixed tree:
// lane l with l ^ 16, then ^ 8, ^ 4, ^ 2, ^ 1.
namespace llamay {

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fixed(min(-x, 87.0f))); }

inline float silu_times(float gate, float up) { return gate * sigmoid(gate) * up; }

// The approximation of gelu by (1 + tanh(u)) / 2, which is sigmoid(2 u).
inline float gelu_times(float gate, float up) {
    const float u = 0.7978846f * fma(0.044715f * gate * gate, gate, gate);
    return gate * sigmoid(2.0f * u) * up;
}

// Inputs of a product: rows of x[rows, columns] as they are.
struct Plain {
    const device float* x;
    int columns;
    float4 at(int row, int column) const { return load4(x + row * columns + column); }
};

// Inputs of a product: rows of x[rows, columns] after RMS norm, whose factors[rows] are known.
struct Normed {
    const device float* x;
    const device float* norm;
    const threadgroup float* factors;
    int columns;
    float4 at(int row, int column) const {
        return load4(x + row * columns + column) * factors[row] * load4(norm + column);
    }
};

template <bool NORM>
struct InputsOf {
    static Plain of(const device float* x, const device float*, const threadgroup float*, int columns) {
        return Plain{x, columns};
    }
};

template <>
struct InputsOf<true> {
    static Normed of(const device float* x, const device float* norm, const threadgroup float* factors,
                     int columns) {
        return Normed{x, norm, factors, columns};
    }
};

inline float dot8(float4 a, float4 b, float4 x, float4 y) {
    float sum = a.x * x.x;
    sum = fma(a.y, x.y, sum);
    sum = fma(a.z, x.z, sum);
    sum = fma(a.w, x.w, sum);
    sum = fma(b.x, y.x, sum);
    sum = fma(b.y, y.y, sum);
    sum = fma(b.z, y.z, sum);
    return fma(b.w, y.w, sum);
}

inline float sum8(float4 x, float4 y) {
    return ((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w));
}

// Adds to acc[ROWS * OUTPUTS] the products of one half of a unit.
template <int FORMAT, int ROWS, int OUTPUTS, int HALF, typename Inputs>
inline void add_half(const device uchar* weights, int outputs, int rows, int columns, int unit,
                     Inputs inputs, thread float* acc) {
    typedef Blocks<FORMAT> B;
    const int row_bytes = columns / B::LENGTH * B::BYTES, column = B::first(unit) + HALF * B::GAP;
    Eight w[OUTPUTS];
    for (int n = 0; n < OUTPUTS; n++) {
        B::template read<HALF>(weights + min(n, outputs - 1) * row_bytes, unit, w[n]);
    }
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        const float4 x = inputs.at(r, column), y = inputs.at(r, column + 4);
        for (int n = 0; n < OUTPUTS; n++) {
            float sum = fma(w[n].scale, dot8(w[n].q[0], w[n].q[1], x, y), acc[r * OUTPUTS + n]);
            if (B::HAS_MINIMUM) sum = fma(w[n].minimum, sum8(x, y), sum);
            acc[r * OUTPUTS + n] = sum;
        }
    }
}

// Products of up to ROWS rows of inputs with up to OUTPUTS rows of weights, of one simdgroup.
// weights: the first row's bytes. Rows that do not exist are neither read nor computed.
// Returns, in lane l, the product of row i / OUTPUTS and output i % OUTPUTS,
// i = l / (32 / (ROWS * OUTPUTS)); its order does not depend on ROWS, OUTPUTS, rows or outputs.
template <int FORMAT, int ROWS, int OUTPUTS, typename Inputs>
inline float product(const device uchar* weights, int outputs, int rows, int columns, Inputs inputs,
                     uint lane) {
    float acc[ROWS * OUTPUTS];
    for (int i = 0; i < ROWS * OUTPUTS; i++) acc[i] = 0.0f;
    for (int unit = int(lane); unit < columns / 16; unit += 32) {
        add_half<FORMAT, ROWS, OUTPUTS, 0>(weights, outputs, rows, columns, unit, inputs, acc);
        add_half<FORMAT, ROWS, OUTPUTS, 1>(weights, outputs, rows, columns, unit, inputs, acc);
    }
    return sum_lanes<ROWS * OUTPUTS>(acc, lane);
}

// Which result of `product` a lane holds, and whether it is the first lane that does.
template <int ROWS, int OUTPUTS>
struct Owned {
    int row, output;
    bool first;
    Owned(uint lane) {
        const int lanes = 32 / (ROWS * OUTPUTS), index = int(lane) / lanes;
        row = index / OUTPUTS;
        output = index % OUTPUTS;
        first = int(lane) % lanes == 0;
    }
};

// The bytes of row `output` of weights.
template <int FORMAT>
inline const device uchar* weights_of(const device uchar* weights, int output, int columns) {
    typedef Blocks<FORMAT> B;
    return weights + ulong(output) * (columns / B::LENGTH * B::BYTES);
}

}  // namespace llamay

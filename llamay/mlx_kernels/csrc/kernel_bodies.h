/* The kernels, written once over 16 lanes; a kernels_*.c includes this after its simd_*.h.
 *
 * NAME(x) appends the instruction set to a name. Nothing here may depend on how wide a register is:
 * tiles only choose which outputs are computed together.
 */

INLINE vf load_first(const float *p, int64_t n) {
    float lane[LANES] = {0};
    if (n >= LANES) return v_load(p);
    memcpy(lane, p, (size_t)n * sizeof(float));
    return v_load(lane);
}

INLINE void store_first(float *p, vf a, int64_t n) {
    float lane[LANES];
    if (n >= LANES) { v_store(p, a); return; }
    v_store(lane, a);
    memcpy(p, lane, (size_t)n * sizeof(float));
}

/* e^x for x <= 88, 0 below -87. x = n ln 2 + r, |r| <= ln 2 / 2; e^r = 1 + r + r^2 p(r), p fitted to 3e-9. */
INLINE vf v_exp(vf x) {
    vf bounded = v_select_gt(x, v_set1(-87.0f), x, v_set1(-87.0f));
    vi n = v_round(v_mul(bounded, v_set1(0x1.715476p+0f)));
    vf count = v_float(n);
    vf r = v_fma(count, v_set1(-0x1.62e4p-1f), bounded);
    r = v_fma(count, v_set1(-0x1.7f7d1cp-20f), r);
    vf p = v_set1(0x1.6a238cp-10f);
    p = v_fma(p, r, v_set1(0x1.123a6cp-7f));
    p = v_fma(p, r, v_set1(0x1.5558f4p-5f));
    p = v_fma(p, r, v_set1(0x1.55549p-3f));
    p = v_fma(p, r, v_set1(0x1.fffffcp-2f));
    p = v_fma(p, v_mul(r, r), v_add(r, v_set1(1.0f)));
    return v_select_gt(x, v_set1(-87.0f), v_mul(p, v_pow2(n)), v_set1(0.0f));
}

INLINE float exp1(float x) {
    float lane[LANES];
    v_store(lane, v_exp(v_set1(x)));
    return lane[0];
}

static void NAME(rms_norm)(const float *x, const float *weight, int64_t columns, float eps, float *out) {
    vf squares = v_set1(0.0f);
    for (int64_t k = 0; k < columns; k += LANES) {
        vf v = load_first(x + k, columns - k);
        squares = v_fma(v, v, squares);
    }
    vf scale = v_set1(1.0f / sqrtf(v_sum(squares) / (float)columns + eps));
    for (int64_t k = 0; k < columns; k += LANES) {
        vf v = v_mul(load_first(x + k, columns - k), scale);
        store_first(out + k, v_mul(v, load_first(weight + k, columns - k)), columns - k);
    }
}

#include "matmul_bodies.h"

/* 1 / (1 + e^minus) */
INLINE vf v_sigmoid_of_minus(vf minus) {
    vf one = v_set1(1.0f), highest = v_set1(87.0f);
    return v_div(one, v_add(one, v_exp(v_select_gt(minus, highest, highest, minus))));
}

static void NAME(silu_mul)(float *gate, const float *up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = load_first(gate + i, count - i), sigmoid = v_sigmoid_of_minus(v_sub(v_set1(0.0f), x));
        store_first(gate + i, v_mul(v_mul(x, sigmoid), load_first(up + i, count - i)), count - i);
    }
}

/* gelu(x) = x / 2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3). */
static void NAME(gelu_mul)(float *gate, const float *up, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = load_first(gate + i, count - i);
        vf inner = v_fma(v_mul(v_mul(x, x), x), v_set1(0x1.6e4e26p-5f), x);
        vf sigmoid = v_sigmoid_of_minus(v_mul(inner, v_set1(-0x1.988454p+0f)));
        store_first(gate + i, v_mul(v_mul(x, sigmoid), load_first(up + i, count - i)), count - i);
    }
}

/* cap * tanh(x / cap), tanh |x| = (1 - t) / (1 + t) with t = e^(-2 |x|); NaN stays NaN. */
INLINE vf v_soft_cap(vf x, vf cap) {
    vf zero = v_set1(0.0f), one = v_set1(1.0f), ratio = v_div(x, cap);
    vf size = v_select_gt(ratio, zero, ratio, v_sub(zero, ratio)), t = v_exp(v_mul(size, v_set1(-2.0f)));
    vf y = v_mul(v_div(v_sub(one, t), v_add(one, t)), cap);
    return v_select_gt(ratio, zero, y, v_select_gt(zero, ratio, v_sub(zero, y), ratio));
}

static void NAME(soft_cap)(float *x, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) {
        vf v = load_first(x + i, count - i);
        store_first(x + i, v_add(v_soft_cap(v, v_set1(cap)), v_sub(v, v)), count - i);
    }
}

#include "attention_bodies.h"

static float NAME(exp_shifted)(const float *logits, int64_t count, float *weights) {
    vf lowest = v_set1(-INFINITY), largest = lowest;
    for (int64_t i = 0; i < count; i += LANES) {
        int here = count - i < LANES ? (int)(count - i) : LANES;
        largest = v_max(largest, v_first(load_first(logits + i, here), lowest, here));
    }
    float max = v_largest(largest);
    for (int64_t i = 0; i < count; i += LANES)
        store_first(weights + i, v_exp(v_sub(load_first(logits + i, count - i), v_set1(max))), count - i);
    return max;
}

const KernelSet NAME(kernels) = {
    .name = SET_NAME,
    .tile_columns = TILE_COLUMNS,
    .tile_width = NAME(tile_width),
    .rms_norm = NAME(rms_norm),
    .quantize = NAME(quantize),
    .matmul = NAME(matmul),
    .silu_mul = NAME(silu_mul),
    .gelu_mul = NAME(gelu_mul),
    .soft_cap = NAME(soft_cap),
    .attend = NAME(attend),
    .merge = NAME(merge),
    .finish = NAME(finish),
    .exp_shifted = NAME(exp_shifted),
};

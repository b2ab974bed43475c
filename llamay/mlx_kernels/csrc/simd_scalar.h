/* 16 lanes in plain C: what every instruction set must equal. */
#include <math.h>
#include <string.h>

#define TILE_COLUMNS 1
#define QUERIES_AT_ONCE 4
#define SCORE_ACCUMULATORS 4
#define VALUE_ROWS 3
#define VALUE_CHUNKS 2
#define BYTE_BIAS 0
#define PARTIAL_QUADS(has_sign, largest) 0

typedef struct { float lane[LANES]; } vf;
typedef struct { int32_t lane[LANES]; } vi;
typedef struct { int8_t lane[4 * LANES]; } vq; /* a quad of bytes for each lane */

#define EACH_LANE for (int l = 0; l < LANES; l++)
#define LANEWISE(type, expression) type r; EACH_LANE r.lane[l] = (expression); return r

INLINE vf v_load(const float *p) { vf r; memcpy(r.lane, p, sizeof r); return r; }
INLINE void v_store(float *p, vf a) { memcpy(p, a.lane, sizeof a); }
INLINE vf v_set1(float x) { LANEWISE(vf, x); }
INLINE vf v_load_half(const uint8_t *p) { uint16_t h[LANES]; memcpy(h, p, sizeof h); LANEWISE(vf, half_to_float(h[l])); }
INLINE vf v_load_i8(const uint8_t *p) { LANEWISE(vf, (float)(int8_t)p[l]); }
INLINE vf v_load_bf16(const uint8_t *p) {
    uint16_t half[LANES];
    uint32_t bits[LANES];
    vf r;
    memcpy(half, p, sizeof half);
    EACH_LANE bits[l] = (uint32_t)half[l] << 16;
    memcpy(r.lane, bits, sizeof r);
    return r;
}
INLINE vf v_add(vf a, vf b) { LANEWISE(vf, a.lane[l] + b.lane[l]); }
INLINE vf v_sub(vf a, vf b) { LANEWISE(vf, a.lane[l] - b.lane[l]); }
INLINE vf v_mul(vf a, vf b) { LANEWISE(vf, a.lane[l] * b.lane[l]); }
INLINE vf v_div(vf a, vf b) { LANEWISE(vf, a.lane[l] / b.lane[l]); }
INLINE vf v_fma(vf a, vf b, vf c) { LANEWISE(vf, fmaf(a.lane[l], b.lane[l], c.lane[l])); }
INLINE vf v_max(vf a, vf b) { LANEWISE(vf, a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]); }
INLINE vf v_abs(vf a) { LANEWISE(vf, fabsf(a.lane[l])); }
/* x > bound ? a : b */
INLINE vf v_select_gt(vf x, vf bound, vf a, vf b) { LANEWISE(vf, x.lane[l] > bound.lane[l] ? a.lane[l] : b.lane[l]); }
/* Lanes below n from a, the others from b. */
INLINE vf v_first(vf a, vf b, int n) { LANEWISE(vf, l < n ? a.lane[l] : b.lane[l]); }
/* To the nearest integer, ties to even; |x| < 2^22. */
INLINE vi v_round(vf a) { LANEWISE(vi, (int32_t)((a.lane[l] + 12582912.0f) - 12582912.0f)); }
INLINE vf v_float(vi a) { LANEWISE(vf, (float)a.lane[l]); }
/* 2^n for -126 <= n <= 127 */
INLINE vf v_pow2(vi n) { vf r; EACH_LANE { uint32_t bits = (uint32_t)(n.lane[l] + 127) << 23; memcpy(&r.lane[l], &bits, 4); } return r; }
INLINE vi vi_set1(int32_t x) { LANEWISE(vi, x); }
INLINE vi vi_add(vi a, vi b) { LANEWISE(vi, a.lane[l] + b.lane[l]); }
INLINE vi vi_sub(vi a, vi b) { LANEWISE(vi, a.lane[l] - b.lane[l]); }
INLINE vi vi_shift_left(vi a, int n) { LANEWISE(vi, a.lane[l] * (1 << n)); }
INLINE void vi_store_bytes(int8_t *p, vi a) { EACH_LANE p[l] = (int8_t)a.lane[l]; }
INLINE int32_t vi_sum(vi a) { int32_t s = 0; EACH_LANE s += a.lane[l]; return s; }

INLINE vq vq_load(const uint8_t *p) { vq r; memcpy(r.lane, p, sizeof r); return r; }
/* Of each byte the bits of `mask`, after a shift to the right; left if it is negative. */
INLINE vq vq_field(vq a, int right, int mask) {
    vq r;
    for (int j = 0; j < VECTOR; j++) {
        uint8_t byte = (uint8_t)a.lane[j];
        r.lane[j] = (int8_t)((right < 0 ? byte << -right : byte >> right) & mask);
    }
    return r;
}
INLINE vq vq_or(vq a, vq b) { vq r; for (int j = 0; j < VECTOR; j++) r.lane[j] = a.lane[j] | b.lane[j]; return r; }
/* The value that each code stands for in the formats with a table. */
INLINE vq vq_lookup(vq code) { vq r; for (int j = 0; j < VECTOR; j++) r.lane[j] = code_values[code.lane[j]]; return r; }
INLINE vq vq_load_bytes(const uint8_t *p) { return vq_load(p); }
INLINE vi v_dot4_signed(vi acc, vq w, const int8_t *x) {
    EACH_LANE for (int j = 0; j < 4; j++) acc.lane[l] += w.lane[4 * l + j] * x[j];
    return acc;
}
/* The same for codes from 0 to 63. */
INLINE vi v_dot4(vi acc, vq w, const int8_t *x) { return v_dot4_signed(acc, w, x); }
/* 16 factors of 8 bits, in the form that v_fold and v_weigh take. */
INLINE vi v_load_factors(const uint8_t *p) { LANEWISE(vi, (int8_t)p[l]); }
INLINE vi v_ones(void) { return vi_set1(1); }
/* sum + partial, or if scaled + partial * factors; partial is a sum of v_dot4. */
INLINE vi v_fold(vi sum, vi partial, int scaled, vi factors) {
    LANEWISE(vi, sum.lane[l] + (scaled ? partial.lane[l] * factors.lane[l] : partial.lane[l]));
}
/* The same for a sum of v_dot4_signed. */
INLINE vi v_fold_signed(vi sum, vi partial, int scaled, vi factors) { return v_fold(sum, partial, scaled, factors); }
/* acc + first * sums[0] + second * sums[1] */
INLINE vi v_weigh(vi acc, vi first, vi second, const int16_t *sums) {
    LANEWISE(vi, acc.lane[l] + first.lane[l] * sums[0] + second.lane[l] * sums[1]);
}
/* Fixed trees: lane l with l + 8, then + 4, + 2, + 1. */
INLINE float v_sum(vf a) {
    for (int width = LANES / 2; width; width /= 2) for (int l = 0; l < width; l++) a.lane[l] += a.lane[l + width];
    return a.lane[0];
}
INLINE float v_largest(vf a) {
    for (int width = LANES / 2; width; width /= 2)
        for (int l = 0; l < width; l++) a.lane[l] = a.lane[l] > a.lane[l + width] ? a.lane[l] : a.lane[l + width];
    return a.lane[0];
}

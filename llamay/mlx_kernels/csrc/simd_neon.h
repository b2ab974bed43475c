/* 16 lanes as four NEON registers. NEON_DOTPROD and NEON_I8MM say which instructions there are beside those that
 * every arm64 processor has.
 */
#define TILE_COLUMNS 4
#define QUERIES_AT_ONCE 6
#define SCORE_ACCUMULATORS 6
#define VALUE_ROWS 3
#define VALUE_CHUNKS 2
#define BYTE_BIAS 0
#if defined(NEON_I8MM)
#define PARTIAL_QUADS(has_sign, largest) 8 /* smmla's sums stand in an order of their own until they are folded */
#else
#define PARTIAL_QUADS(has_sign, largest) 0
#endif

typedef struct { float32x4_t part[4]; } vf;
typedef struct { int32x4_t part[4]; } vi;
typedef struct { int8x16_t part[4]; } vq;

#define EACH_PART UNROLL for (int i = 0; i < 4; i++) /* or clang keeps parts in memory and indexes them */
#define PARTWISE(type, expression) type r; EACH_PART r.part[i] = (expression); return r

INLINE vf v_load(const float *p) { PARTWISE(vf, vld1q_f32(p + 4 * i)); }
INLINE void v_store(float *p, vf a) { EACH_PART vst1q_f32(p + 4 * i, a.part[i]); }
INLINE vf v_set1(float x) { PARTWISE(vf, vdupq_n_f32(x)); }
INLINE vf v_load_half(const uint8_t *p) { PARTWISE(vf, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p + 8 * i)))); }
INLINE vf v_load_i8(const uint8_t *p) {
    int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (vf){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
INLINE vf v_load_bf16(const uint8_t *p) {
    PARTWISE(vf, vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p + 8 * i)), 16)));
}
INLINE vf v_add(vf a, vf b) { PARTWISE(vf, vaddq_f32(a.part[i], b.part[i])); }
INLINE vf v_sub(vf a, vf b) { PARTWISE(vf, vsubq_f32(a.part[i], b.part[i])); }
INLINE vf v_mul(vf a, vf b) { PARTWISE(vf, vmulq_f32(a.part[i], b.part[i])); }
INLINE vf v_div(vf a, vf b) { PARTWISE(vf, vdivq_f32(a.part[i], b.part[i])); }
INLINE vf v_fma(vf a, vf b, vf c) { PARTWISE(vf, vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
INLINE vf v_select_gt(vf x, vf bound, vf a, vf b) {
    PARTWISE(vf, vbslq_f32(vcgtq_f32(x.part[i], bound.part[i]), a.part[i], b.part[i]));
}
/* By comparison, as on x86: fmax treats NaN and signed zeros in its own way. */
INLINE vf v_max(vf a, vf b) { return v_select_gt(a, b, a, b); }
INLINE vf v_abs(vf a) { PARTWISE(vf, vabsq_f32(a.part[i])); }
INLINE vf v_first(vf a, vf b, int n) {
    static const int32_t lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    PARTWISE(vf, vbslq_f32(vcltq_s32(vld1q_s32(lane + 4 * i), vdupq_n_s32(n)), a.part[i], b.part[i]));
}
INLINE vi v_round(vf a) { PARTWISE(vi, vcvtnq_s32_f32(a.part[i])); }
INLINE vf v_float(vi a) { PARTWISE(vf, vcvtq_f32_s32(a.part[i])); }
INLINE vf v_pow2(vi n) {
    PARTWISE(vf, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n.part[i], vdupq_n_s32(127)), 23)));
}
INLINE vi vi_set1(int32_t x) { PARTWISE(vi, vdupq_n_s32(x)); }
INLINE vi vi_add(vi a, vi b) { PARTWISE(vi, vaddq_s32(a.part[i], b.part[i])); }
INLINE vi vi_sub(vi a, vi b) { PARTWISE(vi, vsubq_s32(a.part[i], b.part[i])); }
INLINE vi vi_shift_left(vi a, int n) { PARTWISE(vi, vshlq_s32(a.part[i], vdupq_n_s32(n))); }
INLINE void vi_store_bytes(int8_t *p, vi a) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a.part[0]), vqmovn_s32(a.part[1]));
    int16x8_t high = vcombine_s16(vqmovn_s32(a.part[2]), vqmovn_s32(a.part[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
INLINE int32_t vi_sum(vi a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[1]), vaddq_s32(a.part[2], a.part[3])));
}

INLINE vq vq_load(const uint8_t *p) { PARTWISE(vq, vreinterpretq_s8_u8(vld1q_u8(p + 16 * i))); }
INLINE vq vq_field(vq a, int right, int mask) {
    EACH_PART {
        uint8x16_t bytes = vreinterpretq_u8_s8(a.part[i]);
        if (right) bytes = right < 0 ? bytes << -right : bytes >> right;
        a.part[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8((uint8_t)mask)));
    }
    return a;
}
INLINE vq vq_or(vq a, vq b) { PARTWISE(vq, vorrq_s8(a.part[i], b.part[i])); }
INLINE vq vq_lookup(vq code) {
    int8x16_t values = vld1q_s8(code_values);
    PARTWISE(vq, vqtbl1q_s8(values, vreinterpretq_u8_s8(code.part[i])));
}
INLINE vq vq_load_bytes(const uint8_t *p) { return vq_load(p); }
#if defined(NEON_I8MM)
/* smmla multiplies two rows by two columns, 8 weights deep. So for columns c and c + 1 the sums of rows 4i and 4i + 1
 * stand in part i of c's, of rows 4i + 2 and 4i + 3 in part i of c + 1's, until `settle`.
 */
#define OWN_ADD_QUADS
INLINE int8x16_t load_octets(const int8_t *low, const int8_t *high) { return vcombine_s8(vld1_s8(low), vld1_s8(high)); }
INLINE int8x16_t rows_01(vq first, vq second, int i) {
    return vreinterpretq_s8_s32(
        vzip1q_s32(vreinterpretq_s32_s8(first.part[i]), vreinterpretq_s32_s8(second.part[i])));
}
INLINE int8x16_t rows_23(vq first, vq second, int i) {
    return vreinterpretq_s8_s32(
        vzip2q_s32(vreinterpretq_s32_s8(first.part[i]), vreinterpretq_s32_s8(second.part[i])));
}
INLINE void add_quads(const int has_sign, const int columns, vq first, vq second, const ActivationBlock *x, const int at,
                      vi *sum) {
    (void)has_sign;
    if (columns == 1) {
        int8x16_t octets = load_octets(x[0].q + at, x[0].q + at);
        EACH_PART {
            sum[0].part[i] = vdotq_laneq_s32(sum[0].part[i], first.part[i], octets, 0);
            sum[0].part[i] = vdotq_laneq_s32(sum[0].part[i], second.part[i], octets, 1);
        }
        return;
    }
    EACH_PART {
        int8x16_t low = rows_01(first, second, i), high = rows_23(first, second, i);
        UNROLL for (int c = 0; c < columns; c += 2) {
            int8x16_t octets = load_octets(x[c].q + at, x[c + 1].q + at);
            sum[c].part[i] = vmmlaq_s32(sum[c].part[i], low, octets);
            sum[c + 1].part[i] = vmmlaq_s32(sum[c + 1].part[i], high, octets);
        }
    }
}
INLINE void settle(const int columns, vi *sum) {
    UNROLL for (int c = 0; c + 1 < columns; c += 2) {
        vi low = sum[c], high = sum[c + 1];
        EACH_PART {
            sum[c].part[i] = vuzp1q_s32(low.part[i], high.part[i]);
            sum[c + 1].part[i] = vuzp2q_s32(low.part[i], high.part[i]);
        }
    }
}
#else
INLINE vi v_dot4_signed(vi acc, vq w, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(quad));
#if defined(NEON_DOTPROD)
    PARTWISE(vi, vdotq_s32(acc.part[i], w.part[i], xs));
#else
    EACH_PART {
        int16x8_t low = vmull_s8(vget_low_s8(w.part[i]), vget_low_s8(xs)); /* rows 0, 1: 4 products each */
        int16x8_t high = vmull_high_s8(w.part[i], xs);
        acc.part[i] = vaddq_s32(acc.part[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
    return acc;
#endif
}
INLINE vi v_dot4(vi acc, vq w, const int8_t *x) { return v_dot4_signed(acc, w, x); }
#endif
INLINE vi v_load_factors(const uint8_t *p) {
    int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (vi){{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
                 vmovl_high_s16(high)}};
}
INLINE vi v_ones(void) { return vi_set1(1); }
INLINE vi v_fold(vi sum, vi partial, int scaled, vi factors) {
    if (!scaled) return vi_add(sum, partial);
    PARTWISE(vi, vmlaq_s32(sum.part[i], partial.part[i], factors.part[i]));
}
INLINE vi v_fold_signed(vi sum, vi partial, int scaled, vi factors) { return v_fold(sum, partial, scaled, factors); }
INLINE vi v_weigh(vi acc, vi first, vi second, const int16_t *sums) {
    PARTWISE(vi, vmlaq_n_s32(vmlaq_n_s32(acc.part[i], first.part[i], sums[0]), second.part[i], sums[1]));
}
INLINE float v_sum(vf a) {
    float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float v_largest(vf a) {
    float32x4_t four = vmaxq_f32(vmaxq_f32(a.part[0], a.part[2]), vmaxq_f32(a.part[1], a.part[3]));
    return vmaxvq_f32(four);
}

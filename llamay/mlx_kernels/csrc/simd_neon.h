/* 16 lanes as four NEON registers, with the instructions that every arm64 processor has. */
#define TILE_COLUMNS 4
#define GROUPS_AT_ONCE 1
#define QUERIES_AT_ONCE 3
#define VALUE_ROWS 3
#define VALUE_CHUNKS 2
#define BYTE_BIAS 0

typedef struct { float32x4_t part[4]; } vf;
typedef struct { int32x4_t part[4]; } vi;
typedef struct { int8x16_t part[4]; } vq;

#define EACH_PART for (int i = 0; i < 4; i++)
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
INLINE vi vi_times256(vi a) { PARTWISE(vi, vshlq_n_s32(a.part[i], 8)); }
INLINE void vi_store_bytes(int8_t *p, vi a) {
    int16x8_t low = vcombine_s16(vqmovn_s32(a.part[0]), vqmovn_s32(a.part[1]));
    int16x8_t high = vcombine_s16(vqmovn_s32(a.part[2]), vqmovn_s32(a.part[3]));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
}
INLINE int32_t vi_sum(vi a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.part[0], a.part[1]), vaddq_s32(a.part[2], a.part[3])));
}

INLINE vq vq_load(const uint8_t *p) { PARTWISE(vq, vreinterpretq_s8_u8(vld1q_u8(p + 16 * i))); }
INLINE vq vq_low_nibbles(vq a) { PARTWISE(vq, vandq_s8(a.part[i], vdupq_n_s8(15))); }
INLINE vq vq_high_nibbles(vq a) {
    PARTWISE(vq, vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(a.part[i]), 4)));
}
INLINE vq vq_load_bytes(const uint8_t *p) { return vq_load(p); }
INLINE vi v_dot4_signed(vi acc, vq w, const int8_t *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    int8x16_t xs = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    EACH_PART {
        int16x8_t low = vmull_s8(vget_low_s8(w.part[i]), vget_low_s8(xs)); /* rows 0, 1: 4 products each */
        int16x8_t high = vmull_high_s8(w.part[i], xs);
        acc.part[i] = vaddq_s32(acc.part[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
    return acc;
}
INLINE vi v_dot4_nibbles(vi acc, vq w, const int8_t *x) { return v_dot4_signed(acc, w, x); }
INLINE float v_sum(vf a) {
    float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float v_largest(vf a) {
    float32x4_t four = vmaxq_f32(vmaxq_f32(a.part[0], a.part[2]), vmaxq_f32(a.part[1], a.part[3]));
    return vmaxvq_f32(four);
}
INLINE void v_prefetch(const void *p) { __builtin_prefetch(p); }

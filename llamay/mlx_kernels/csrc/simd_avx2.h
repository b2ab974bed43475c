/* 16 lanes as two AVX2 registers, with FMA and F16C. */
#define TILE_COLUMNS 4
#define QUERIES_AT_ONCE 6
#define SCORE_ACCUMULATORS 6
#define VALUE_ROWS 3
#define VALUE_CHUNKS 2
#define BYTE_BIAS 0
/* Products of codes without a sign are summed in 16 bits, pairs of them at a time. */
#define PARTIAL_QUADS(has_sign, largest) ((has_sign) ? 0 : (largest) <= 15 ? 8 : (largest) <= 31 ? 4 : 2)

typedef struct { __m256 lo, hi; } vf;
typedef struct { __m256i lo, hi; } vi;
typedef vi vq;

#define BOTH_F(op) ((vf){op(a.lo, b.lo), op(a.hi, b.hi)})

INLINE vf v_load(const float *p) { return (vf){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
INLINE vf v_set1(float x) { __m256 v = _mm256_set1_ps(x); return (vf){v, v}; }
INLINE vf v_load_half(const uint8_t *p) {
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 16)))};
}
INLINE vf v_load_i8(const uint8_t *p) {
    return (vf){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))))};
}
INLINE vf v_load_bf16(const uint8_t *p) {
    __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 16)));
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
INLINE vf v_add(vf a, vf b) { return BOTH_F(_mm256_add_ps); }
INLINE vf v_sub(vf a, vf b) { return BOTH_F(_mm256_sub_ps); }
INLINE vf v_mul(vf a, vf b) { return BOTH_F(_mm256_mul_ps); }
INLINE vf v_div(vf a, vf b) { return BOTH_F(_mm256_div_ps); }
INLINE vf v_fma(vf a, vf b, vf c) { return (vf){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
INLINE vf v_max(vf a, vf b) { return BOTH_F(_mm256_max_ps); }
INLINE vf v_abs(vf a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return (vf){_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
INLINE vf v_select_gt(vf x, vf bound, vf a, vf b) {
    return (vf){_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_GT_OQ)),
                _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_GT_OQ))};
}
INLINE vf v_first(vf a, vf b, int n) {
    __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i lo = _mm256_cmpgt_epi32(count, lane);
    __m256i hi = _mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
    return (vf){_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lo)),
                _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(hi))};
}
INLINE vi v_round(vf a) { return (vi){_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
INLINE vf v_float(vi a) { return (vf){_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
INLINE vf v_pow2(vi n) {
    __m256i bias = _mm256_set1_epi32(127);
    return (vf){_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
INLINE vi vi_set1(int32_t x) { __m256i v = _mm256_set1_epi32(x); return (vi){v, v}; }
INLINE vi vi_add(vi a, vi b) { return (vi){_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
INLINE vi vi_sub(vi a, vi b) { return (vi){_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
INLINE vi vi_shift_left(vi a, int n) { return (vi){_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)}; }
INLINE void vi_store_bytes(int8_t *p, vi a) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
INLINE int32_t vi_sum(vi a) {
    int32_t lane[8], sum = 0;
    _mm256_storeu_si256((__m256i *)lane, _mm256_add_epi32(a.lo, a.hi));
    for (int l = 0; l < 8; l++) sum += lane[l];
    return sum;
}

INLINE vq vq_load(const uint8_t *p) {
    return (vq){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)(p + 32))};
}
INLINE __m256i field_of(__m256i a, int right, int mask) {
    if (right) a = right < 0 ? _mm256_slli_epi16(a, -right) : _mm256_srli_epi16(a, right);
    return _mm256_and_si256(a, _mm256_set1_epi8((char)mask));
}
INLINE vq vq_field(vq a, int right, int mask) { return (vq){field_of(a.lo, right, mask), field_of(a.hi, right, mask)}; }
INLINE vq vq_or(vq a, vq b) { return (vq){_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
INLINE vq vq_lookup(vq code) {
    __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)code_values));
    return (vq){_mm256_shuffle_epi8(values, code.lo), _mm256_shuffle_epi8(values, code.hi)};
}
INLINE vq vq_load_bytes(const uint8_t *p) { return vq_load(p); }
INLINE __m256i broadcast_quad(const void *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return _mm256_set1_epi32(quad);
}
/* acc: 32 sums of 16 bits, of every second product. Left alone, gcc adds products up in a tree, for which there are
 * not the registers.
 */
INLINE vi v_dot4(vi acc, vq w, const int8_t *x) {
    __m256i quad = broadcast_quad(x);
    acc.lo = _mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, quad));
    acc.hi = _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, quad));
    KEEP_ORDER(acc.lo);
    KEEP_ORDER(acc.hi);
    return acc;
}
/* maddubs adds pairs with saturation at 32767: |w| * sign(w) x is at most 2 * 128 * 127 = 32512. */
INLINE __m256i dot4_signed(__m256i acc, __m256i w, __m256i quad) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE vi v_dot4_signed(vi acc, vq w, const int8_t *x) {
    __m256i quad = broadcast_quad(x);
    acc = (vi){dot4_signed(acc.lo, w.lo, quad), dot4_signed(acc.hi, w.hi, quad)};
    KEEP_ORDER(acc.lo);
    KEEP_ORDER(acc.hi);
    return acc;
}
/* Each factor twice, as 16 bits. */
INLINE __m256i load_factors(const uint8_t *p) {
    __m256i factors = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
    return _mm256_blend_epi16(factors, _mm256_slli_epi32(factors, 16), 0xAA);
}
INLINE vi v_load_factors(const uint8_t *p) { return (vi){load_factors(p), load_factors(p + 8)}; }
INLINE vi v_ones(void) { __m256i one = _mm256_set1_epi16(1); return (vi){one, one}; }
INLINE vi v_fold(vi sum, vi partial, int scaled, vi factors) {
    (void)scaled;
    return (vi){_mm256_add_epi32(sum.lo, _mm256_madd_epi16(partial.lo, factors.lo)),
                _mm256_add_epi32(sum.hi, _mm256_madd_epi16(partial.hi, factors.hi))};
}
INLINE vi v_fold_signed(vi sum, vi partial, int scaled, vi factors) {
    if (scaled) {
        partial.lo = _mm256_mullo_epi32(partial.lo, _mm256_srai_epi32(factors.lo, 16));
        partial.hi = _mm256_mullo_epi32(partial.hi, _mm256_srai_epi32(factors.hi, 16));
    }
    return vi_add(sum, partial);
}
INLINE vi v_weigh(vi acc, vi first, vi second, const int16_t *sums) {
    __m256i both = broadcast_quad(sums);
    return (vi){_mm256_add_epi32(acc.lo, _mm256_madd_epi16(_mm256_blend_epi16(first.lo, second.lo, 0xAA), both)),
                _mm256_add_epi32(acc.hi, _mm256_madd_epi16(_mm256_blend_epi16(first.hi, second.hi, 0xAA), both))};
}
INLINE float v_sum(vf a) {
    __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float v_largest(vf a) {
    __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

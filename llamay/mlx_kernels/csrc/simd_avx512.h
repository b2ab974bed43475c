/* 16 lanes as one AVX-512 register; byte products by VNNI. */
#define TILE_COLUMNS 12
#define QUERIES_AT_ONCE 12
#define SCORE_ACCUMULATORS 24
#define VALUE_ROWS 6
#define VALUE_CHUNKS 4
/* vpdpbusd takes unsigned weights: signed ones are moved up by 128, and 128 * sum(x) is taken off. */
#define BYTE_BIAS 128
#define PARTIAL_QUADS(has_sign, largest) 0

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vq;

INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf v_load_half(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf v_load_i8(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
INLINE vf v_load_bf16(const uint8_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_select_gt(vf x, vf bound, vf a, vf b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ), b, a);
}
INLINE vf v_first(vf a, vf b, int n) { return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), b, a); }
INLINE vi v_round(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf v_float(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vf v_pow2(vi n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
typedef uint32_t words32 __attribute__((vector_size(64)));
typedef uint16_t words16 __attribute__((vector_size(64)));
INLINE vi vi_shift_left(vi a, int n) { return (vi)((words32)a << n); }
INLINE void vi_store_bytes(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(a)); }
INLINE int32_t vi_sum(vi a) { return _mm512_reduce_add_epi32(a); }

INLINE vq vq_load(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE vq vq_field(vq a, int right, int mask) {
    if (right) a = right < 0 ? (vq)((words16)a << -right) : (vq)((words16)a >> right);
    return _mm512_and_si512(a, _mm512_set1_epi8((char)mask));
}
INLINE vq vq_or(vq a, vq b) { return _mm512_or_si512(a, b); }
INLINE vq vq_lookup(vq code) {
    __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)code_values));
    return _mm512_xor_si512(_mm512_shuffle_epi8(values, code), _mm512_set1_epi8(-128));
}
INLINE vq vq_load_bytes(const uint8_t *p) { return _mm512_xor_si512(vq_load(p), _mm512_set1_epi8(-128)); }
INLINE __m512i broadcast_quad(const void *x) {
    int32_t quad;
    memcpy(&quad, x, sizeof quad);
    return _mm512_set1_epi32(quad);
}
INLINE vi v_dot4(vi acc, vq w, const int8_t *x) { return _mm512_dpbusd_epi32(acc, w, broadcast_quad(x)); }
INLINE vi v_dot4_signed(vi acc, vq w, const int8_t *x) { return v_dot4(acc, w, x); }
/* Each factor twice, as 16 bits. */
INLINE vi v_load_factors(const uint8_t *p) {
    __m512i factors = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm512_mask_blend_epi16(0xAAAAAAAA, factors, _mm512_slli_epi32(factors, 16));
}
INLINE vi v_ones(void) { return _mm512_set1_epi16(1); }
INLINE vi v_fold(vi sum, vi partial, int scaled, vi factors) {
    if (scaled) partial = _mm512_mullo_epi32(partial, _mm512_srai_epi32(factors, 16));
    return _mm512_add_epi32(sum, partial);
}
INLINE vi v_fold_signed(vi sum, vi partial, int scaled, vi factors) { return v_fold(sum, partial, scaled, factors); }
INLINE vi v_weigh(vi acc, vi first, vi second, const int16_t *sums) {
    return _mm512_dpwssd_epi32(acc, _mm512_mask_blend_epi16(0xAAAAAAAA, first, second), broadcast_quad(sums));
}
INLINE float v_sum(vf a) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float v_largest(vf a) { return _mm512_reduce_max_ps(a); }

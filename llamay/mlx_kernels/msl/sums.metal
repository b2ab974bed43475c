// Sums over lanes, exp and tanh, in one order.
//
// Every product that is added to something is an explicit fma or stands alone, so that no compiler
// has anything to contract.
namespace llamay {

// Adds COUNT (a power of two up to 32) values over the lanes.
// Returns the sum of values[lane / (32 / COUNT)], the same bits whatever COUNT is.
template <int COUNT>
inline float sum_lanes(thread float* values, uint lane) {
    int bit = 16;
    for (int kept = COUNT / 2; kept > 0; kept /= 2, bit /= 2) {
        const bool upper = (lane & bit) != 0;
        for (int i = 0; i < kept; i++) {
            const float low = values[i], high = values[kept + i];
            values[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, bit);
        }
    }
    for (; bit > 0; bit /= 2) values[0] += simd_shuffle_xor(values[0], bit);
    return values[0];
}

// e^x for x <= 87, to about 1 unit in the last place; 0 for x <= -87.
inline float exp_fixed(float x) {
    const float bounded = x > -87.0f ? x : -87.0f;
    const float count = rint(bounded * 1.442695f);
    float r = fma(count, -0.69314575f, bounded);
    r = fma(count, -1.4286068e-06f, r);
    float p = 0.0013814501f;
    p = fma(p, r, 0.008368781f);
    p = fma(p, r, 0.041668393f);
    p = fma(p, r, 0.1666652f);
    p = fma(p, r, 0.49999994f);
    p = fma(p, r * r, r + 1.0f);
    return x > -87.0f ? p * as_type<float>((int(count) + 127) << 23) : 0.0f;
}

// cap * tanh(x / cap); NaN if x is.
inline float soft_capped(float x, float cap) {
    const float t = exp_fixed(-2.0f * abs(x / cap));
    const float size = cap * ((1.0f - t) / (1.0f + t));
    return x < 0.0f ? -size : x > 0.0f ? size : x;
}

}  // namespace llamay

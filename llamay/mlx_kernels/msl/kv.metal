// Keys and values as pages hold them. A position's row is [key vectors][value vectors] of 32-bit words;
// KIND says what a vector is stored as: 4 float32, 2 float16, 1 a float32 scale and then int8.
namespace llamay {

template <int KIND>
inline int vector_words(int head_dim) {
    return KIND == 4 ? head_dim : KIND == 2 ? head_dim / 2 : 1 + head_dim / 4;
}

// The scale that a stored vector's elements are to be multiplied with.
template <int KIND>
inline float stored_scale(const device uint* vector) {
    return KIND == 1 ? as_type<float>(vector[0]) : 1.0f;
}

// Element d of a stored vector, without its scale.
template <int KIND>
inline float stored_element(const device uint* vector, int d) {
    if (KIND == 4) return as_type<float>(vector[d]);
    if (KIND == 2) return float(reinterpret_cast<const device half*>(vector)[d]);
    return float(reinterpret_cast<const device char*>(vector + 1)[d]);
}

// float32 to float16: to the nearest, at most 65504.
inline half to_half(float x) { return half(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); }

// max|x| / 127, rounded up to 16 significant bits; 0 below 2^-100, NaN if a value is not finite.
inline float scale_of(float largest, bool finite) {
    if (!finite) return NAN;
    if (largest < 7.888609e-31f) return 0.0f;
    const uint bits = (as_type<uint>(largest / 127.0f) + 0xffu) & 0xffffff00u;
    return min(as_type<float>(bits), 2.6793874e+36f);  // 127 times the next one is infinite
}

// Stores a vector, of which lane l holds elements 4 (l + 32 i) + 0..3 as values[i].
template <int KIND, int HEAD_DIM>
inline void store_vector(thread const float4* values, device uint* vector, uint lane) {
    const int groups = HEAD_DIM / 4;
    float scale = 0.0f;
    if (KIND == 1) {
        float largest = 0.0f;
        bool finite = true;
        for (int i = 0; int(lane) + 32 * i < groups; i++) {
            for (int j = 0; j < 4; j++) {
                const float size = abs(values[i][j]);
                finite = finite && size < INFINITY;
                largest = max(largest, size);
            }
        }
        scale = scale_of(simd_max(largest), simd_all(finite));
        if (lane == 0) vector[0] = as_type<uint>(scale);
    }
    for (int i = 0; int(lane) + 32 * i < groups; i++) {
        const int group = int(lane) + 32 * i;
        const float4 v = values[i];
        if (KIND == 4) {
            for (int j = 0; j < 4; j++) vector[4 * group + j] = as_type<uint>(v[j]);
        } else if (KIND == 2) {
            vector[2 * group] = as_type<uint>(half2(to_half(v.x), to_half(v.y)));
            vector[2 * group + 1] = as_type<uint>(half2(to_half(v.z), to_half(v.w)));
        } else {
            const float4 q = scale > 0.0f ? rint(v / scale) : float4(0.0f);
            vector[1 + group] = as_type<uint>(char4(char(q.x), char(q.y), char(q.z), char(q.w)));
        }
    }
}

// A head's vector, multiplied with its factor and its norm if it is normed.
struct Head {
    const device float* vector;
    const device float* norm;
    float factor;
    bool normed;
    float at(int d) const { return normed ? vector[d] * factor * norm[d] : vector[d]; }
};

// Element d of a head after rope on its first 2 * pairs elements.
inline float rotated(Head head, int d, int pairs, bool interleaved, const device float* cosine,
                     const device float* sine) {
    if (d >= 2 * pairs) return head.at(d);
    const int pair = interleaved ? d / 2 : d % pairs;
    const float a = head.at(interleaved ? 2 * pair : pair);
    const float b = head.at(interleaved ? 2 * pair + 1 : pair + pairs);
    const bool second = interleaved ? d % 2 == 1 : d >= pairs;
    return second ? fma(a, sine[pair], b * cosine[pair]) : fma(-b, sine[pair], a * cosine[pair]);
}

}  // namespace llamay

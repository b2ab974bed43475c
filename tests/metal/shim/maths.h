// Mathematics of the Metal Shading Language. Like there, functions are overloaded for each scalar
// type, so that arguments of mixed types are ambiguous; half and bfloat are computed in float.
#pragma once
#include "vectors.h"

namespace metal {

// Applies a function to each element; a scalar argument serves all elements.
template <class F, Vector V>
inline vector_of<V> each(F function, const V& vector) {
    return vector_of<V>(vector).map(function);
}

template <class A, class B>
using joint = vector_of<std::conditional_t<Vector<A>, A, B>>;

template <class F, class A, class B>
inline joint<A, B> each(F function, const A& first, const B& second) {
    const joint<A, B> a = first, b = second;
    joint<A, B> result;
    for (int i = 0; i < result.size; i++) result.all[i] = function(a.all[i], b.all[i]);
    return result;
}

#define UNARY(name, expression)                                                  \
    inline float name(float x) { return expression; }                            \
    inline half name(half argument) {                                            \
        const float x = argument;                                                \
        return half(expression);                                                 \
    }                                                                            \
    inline bfloat name(bfloat argument) {                                        \
        const float x = argument;                                                \
        return bfloat(expression);                                               \
    }                                                                            \
    template <Vector V>                                                          \
    inline vector_of<V> name(const V& v) {                                       \
        return each([](auto element) { return name(element); }, v);              \
    }

#define BINARY(name, expression)                                                 \
    inline float name(float x, float y) { return expression; }                   \
    inline half name(half a, half b) {                                           \
        const float x = a, y = b;                                                \
        return half(expression);                                                 \
    }                                                                            \
    inline bfloat name(bfloat a, bfloat b) {                                     \
        const float x = a, y = b;                                                \
        return bfloat(expression);                                               \
    }                                                                            \
    template <class A, class B>                                                  \
        requires(Vector<A> || Vector<B>)                                         \
    inline joint<A, B> name(const A& v, const B& w) {                            \
        return each([](auto a, auto b) { return name(a, b); }, v, w);            \
    }

// What `metal::precise` and `metal::fast` have too; here all three are the same.
#define MATHS                                                                    \
    UNARY(acos, __builtin_acosf(x))                                              \
    UNARY(asin, __builtin_asinf(x))                                              \
    UNARY(atan, __builtin_atanf(x))                                              \
    UNARY(ceil, __builtin_ceilf(x))                                              \
    UNARY(cos, __builtin_cosf(x))                                                \
    UNARY(cosh, __builtin_coshf(x))                                              \
    UNARY(exp, __builtin_expf(x))                                                \
    UNARY(exp2, __builtin_exp2f(x))                                              \
    UNARY(exp10, __builtin_powf(10.0f, x))                                       \
    UNARY(fabs, __builtin_fabsf(x))                                              \
    UNARY(floor, __builtin_floorf(x))                                            \
    UNARY(fract, x - __builtin_floorf(x))                                        \
    UNARY(log, __builtin_logf(x))                                                \
    UNARY(log2, __builtin_log2f(x))                                              \
    UNARY(log10, __builtin_log10f(x))                                            \
    UNARY(rint, __builtin_rintf(x))                                              \
    UNARY(round, __builtin_roundf(x))                                            \
    UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))                                      \
    UNARY(saturate, x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f)                       \
    UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)                       \
    UNARY(sin, __builtin_sinf(x))                                                \
    UNARY(sinh, __builtin_sinhf(x))                                              \
    UNARY(sqrt, __builtin_sqrtf(x))                                              \
    UNARY(tan, __builtin_tanf(x))                                                \
    UNARY(tanh, __builtin_tanhf(x))                                              \
    UNARY(trunc, __builtin_truncf(x))                                            \
    BINARY(atan2, __builtin_atan2f(x, y))                                        \
    BINARY(copysign, __builtin_copysignf(x, y))                                  \
    BINARY(fmax, __builtin_fmaxf(x, y))                                          \
    BINARY(fmin, __builtin_fminf(x, y))                                          \
    BINARY(fmod, __builtin_fmodf(x, y))                                          \
    BINARY(pow, __builtin_powf(x, y))                                            \
    BINARY(powr, __builtin_powf(x, y))                                           \
    inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

MATHS

// Exact in double up to the last rounding.
inline half fma(half a, half b, half c) { return half(double(a) * double(b) + double(c)); }

template <class A, class B, class C>
    requires(Vector<A> || Vector<B> || Vector<C>)
inline auto fma(const A& first, const B& second, const C& third) {
    using V = joint<joint<A, C>, B>;
    const V a = first, b = second, c = third;
    V result;
    for (int i = 0; i < V::size; i++) result.all[i] = fma(a.all[i], b.all[i], c.all[i]);
    return result;
}

#define EXTREMES(T)                                            \
    inline T min(T x, T y) { return y < x ? y : x; }           \
    inline T max(T x, T y) { return x < y ? y : x; }           \
    inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
EXTREMES(char)
EXTREMES(uchar)
EXTREMES(short)
EXTREMES(ushort)
EXTREMES(int)
EXTREMES(uint)
EXTREMES(long)
EXTREMES(ulong)
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline float clamp(float x, float low, float high) { return min(max(x, low), high); }
inline half min(half x, half y) { return fmin(x, y); }
inline half max(half x, half y) { return fmax(x, y); }
inline half clamp(half x, half low, half high) { return min(max(x, low), high); }
inline bfloat min(bfloat x, bfloat y) { return fmin(x, y); }
inline bfloat max(bfloat x, bfloat y) { return fmax(x, y); }
inline bfloat clamp(bfloat x, bfloat low, bfloat high) { return min(max(x, low), high); }

template <class A, class B>
    requires(Vector<A> || Vector<B>)
inline joint<A, B> min(const A& a, const B& b) {
    return each([](auto x, auto y) { return min(x, y); }, a, b);
}

template <class A, class B>
    requires(Vector<A> || Vector<B>)
inline joint<A, B> max(const A& a, const B& b) {
    return each([](auto x, auto y) { return max(x, y); }, a, b);
}

template <Vector V, class L, class H>
inline vector_of<V> clamp(const V& v, const L& low, const H& high) {
    return min(max(v, low), high);
}

namespace precise {
MATHS
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace precise

namespace fast {
MATHS
using metal::clamp;
using metal::max;
using metal::min;
inline float divide(float x, float y) { return x / y; }
}  // namespace fast

using std::is_unsigned_v;

inline float abs(float x) { return __builtin_fabsf(x); }
inline half abs(half x) { return fabs(x); }
inline bfloat abs(bfloat x) { return fabs(x); }
template <std::integral I>
inline I abs(I x) {
    if constexpr (std::is_signed_v<I>)
        return x < 0 ? I(-x) : x;
    else
        return x;
}
template <Vector V>
inline vector_of<V> abs(const V& v) {
    return each([](auto x) { return abs(x); }, v);
}

template <class T>
inline T mix(T x, T y, std::type_identity_t<T> a) {
    return x + (y - x) * a;
}

template <Scalar T>
inline T select(T a, T b, bool second) {
    return second ? b : a;
}
template <class T, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> second) {
    for (int i = 0; i < N; i++)
        if (second.all[i]) a.all[i] = b.all[i];
    return a;
}

template <class A, class B>
    requires(Vector<A> && Vector<B>)
inline auto dot(const A& first, const B& second) {
    const joint<A, B> a = first, b = second;
    auto sum = a.all[0] * b.all[0];
    for (int i = 1; i < a.size; i++) sum += a.all[i] * b.all[i];
    return sum;
}

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
inline bool isfinite(float x) { return __builtin_fabsf(x) < __builtin_inff(); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline float ldexp(float x, int exponent) { return __builtin_ldexpf(x, exponent); }

template <std::integral I>
inline I popcount(I x) {
    return I(__builtin_popcountll(std::make_unsigned_t<I>(x)));
}
template <std::integral I>
inline I clz(I x) {
    constexpr int bits = 8 * sizeof(I);
    return x ? I(__builtin_clzll(std::make_unsigned_t<I>(x)) - (64 - bits)) : I(bits);
}
template <std::integral I>
inline I ctz(I x) {
    return x ? I(__builtin_ctzll(std::make_unsigned_t<I>(x))) : I(8 * sizeof(I));
}
template <std::integral I>
inline I extract_bits(I x, uint offset, uint bits) {
    constexpr uint all = 8 * sizeof(I);
    return bits == 0 ? I(0) : I(I(x << (all - offset - bits)) >> (all - bits));
}
template <std::integral I>
    requires(sizeof(I) == 4)
inline I mulhi(I a, I b) {
    using Wide = std::conditional_t<std::is_signed_v<I>, int64_t, uint64_t>;
    return I(Wide(a) * Wide(b) >> 32);
}

}  // namespace metal

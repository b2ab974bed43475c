// Vectors of the Metal Shading Language: two to four elements, their swizzles, packed vectors.
#pragma once
#include "scalars.h"

namespace metal {

template <Scalar T, int N>
struct vec;

// Elements I... of a vector with N elements, read and written in its place. V = vec<T, sizeof...(I)>,
// whose operators are found through it.
template <class V, class T, int N, int... I>
struct swizzle {
    T all[N];

    operator V() const { return V(all[I]...); }
    swizzle& operator=(const V& value) {
        int from = 0;
        ((all[I] = value.all[from++]), ...);
        return *this;
    }
    swizzle& operator=(const swizzle& other) { return *this = V(other); }
    swizzle& operator+=(const V& b) { return *this = V(*this) + b; }
    swizzle& operator-=(const V& b) { return *this = V(*this) - b; }
    swizzle& operator*=(const V& b) { return *this = V(*this) * b; }
    swizzle& operator/=(const V& b) { return *this = V(*this) / b; }
};

// The vector that a vector or swizzle is; scalars count as vectors of one element.
template <class X>
struct vector_traits {
    static constexpr int size = 1;
};
template <class T, int N>
struct vector_traits<vec<T, N>> {
    static constexpr int size = N;
    using type = vec<T, N>;
};
template <class V, class T, int N, int... I>
struct vector_traits<swizzle<V, T, N, I...>> {
    static constexpr int size = sizeof...(I);
    using type = V;
};
template <class X>
concept Vector = (vector_traits<X>::size > 1);
template <class X>
using vector_of = typename vector_traits<X>::type;

#define VECTOR_OPERATOR(op, condition)                                                         \
    friend vec operator op(const vec& a, const vec& b) requires condition {                     \
        vec result;                                                                            \
        for (int i = 0; i < size; i++) result.all[i] = T(a.all[i] op b.all[i]);                   \
        return result;                                                                         \
    }                                                                                          \
    vec& operator op##=(const vec& b) requires condition { return *this = *this op b; }

#define VECTOR_COMPARISON(op)                                                                  \
    friend vec<bool, size> operator op(const vec& a, const vec& b) {                             \
        vec<bool, size> result;                                                                \
        for (int i = 0; i < size; i++) result.all[i] = a.all[i] op b.all[i];                     \
        return result;                                                                         \
    }

#define VECTOR_MEMBERS(n)                                                                      \
    static constexpr int size = n;                                                             \
    vec() {}                                                                                   \
    vec(const vec& other) { __builtin_memcpy(all, other.all, sizeof all); }                      \
    vec& operator=(const vec& other) {                                                         \
        __builtin_memcpy(all, other.all, sizeof all);                                          \
        return *this;                                                                          \
    }                                                                                          \
    template <Scalar S>                                                                        \
    constexpr vec(S value) {                                                                   \
        for (T& element : all) element = T(value);                                             \
    }                                                                                          \
    template <Vector V>                                                                        \
        requires(vector_traits<V>::size == n && !std::same_as<vector_of<V>, vec>)               \
    explicit vec(const V& other) {                                                             \
        const vector_of<V> from = other;                                                       \
        for (int i = 0; i < n; i++) all[i] = T(from.all[i]);                                     \
    }                                                                                          \
    template <class... A>                                                                      \
        requires(sizeof...(A) > 1 && (vector_traits<A>::size + ...) == n)                       \
    vec(const A&... parts) {                                                                   \
        int filled = 0;                                                                        \
        (append(filled, parts), ...);                                                          \
    }                                                                                          \
    template <class A>                                                                         \
    void append(int& filled, const A& part) {                                                  \
        if constexpr (Vector<A>)                                                               \
            for (auto element : vector_of<A>(part).all) all[filled++] = T(element);              \
        else                                                                                   \
            all[filled++] = T(part);                                                           \
    }                                                                                          \
    T& operator[](int i) { return all[i]; }                                                    \
    const T& operator[](int i) const { return all[i]; }                                        \
    vec operator-() const { return map([](T x) { return T(-x); }); }                            \
    vec operator~() const requires std::integral<T> { return map([](T x) { return T(~x); }); }   \
    vec<bool, n> operator!() const {                                                           \
        vec<bool, n> result;                                                                   \
        for (int i = 0; i < n; i++) result.all[i] = !all[i];                                     \
        return result;                                                                         \
    }                                                                                          \
    template <class F>                                                                         \
    vec map(F function) const {                                                                \
        vec result;                                                                            \
        for (int i = 0; i < n; i++) result.all[i] = function(all[i]);                            \
        return result;                                                                         \
    }                                                                                          \
    VECTOR_OPERATOR(+, true)                                                                   \
    VECTOR_OPERATOR(-, true)                                                                   \
    VECTOR_OPERATOR(*, true)                                                                   \
    VECTOR_OPERATOR(/, true)                                                                   \
    VECTOR_OPERATOR(%, std::integral<T>)                                                       \
    VECTOR_OPERATOR(&, std::integral<T>)                                                       \
    VECTOR_OPERATOR(|, std::integral<T>)                                                       \
    VECTOR_OPERATOR(^, std::integral<T>)                                                       \
    VECTOR_OPERATOR(<<, std::integral<T>)                                                      \
    VECTOR_OPERATOR(>>, std::integral<T>)                                                      \
    VECTOR_COMPARISON(==)                                                                      \
    VECTOR_COMPARISON(!=)                                                                      \
    VECTOR_COMPARISON(<)                                                                       \
    VECTOR_COMPARISON(<=)                                                                      \
    VECTOR_COMPARISON(>)                                                                       \
    VECTOR_COMPARISON(>=)                                                                      \
    VECTOR_COMPARISON(&&)                                                                      \
    VECTOR_COMPARISON(||)

#define SWIZZLE2(a, b, name) swizzle<vec<T, 2>, T, size, a, b> name;
#define SWIZZLE3(a, b, c, name) swizzle<vec<T, 3>, T, size, a, b, c> name;
#define SWIZZLE4(a, b, c, d, name) swizzle<vec<T, 4>, T, size, a, b, c, d> name;
#define SWIZZLES_XY SWIZZLE2(0, 0, xx) SWIZZLE2(0, 1, xy) SWIZZLE2(1, 0, yx) SWIZZLE2(1, 1, yy)
#define SWIZZLES_Z                                                                              \
    SWIZZLE2(0, 2, xz) SWIZZLE2(1, 2, yz) SWIZZLE2(2, 0, zx) SWIZZLE2(2, 1, zy) SWIZZLE2(2, 2, zz) \
    SWIZZLE3(0, 1, 2, xyz) SWIZZLE3(2, 1, 0, zyx)
#define SWIZZLES_W                                                                              \
    SWIZZLE2(0, 3, xw) SWIZZLE2(1, 3, yw) SWIZZLE2(2, 3, zw) SWIZZLE2(3, 0, wx)                    \
    SWIZZLE2(3, 1, wy) SWIZZLE2(3, 2, wz) SWIZZLE2(3, 3, ww) SWIZZLE3(1, 2, 3, yzw)                 \
    SWIZZLE4(0, 1, 2, 3, xyzw) SWIZZLE4(3, 2, 1, 0, wzyx)

template <Scalar T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    VECTOR_MEMBERS(2)
    union {
        T all[2];
        struct {
            T x, y;
        };
        SWIZZLES_XY
    };
};

template <Scalar T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
    VECTOR_MEMBERS(3)
    union {
        T all[3];
        struct {
            T x, y, z;
        };
        SWIZZLES_XY SWIZZLES_Z
    };
};

template <Scalar T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    VECTOR_MEMBERS(4)
    union {
        T all[4];
        struct {
            T x, y, z, w;
        };
        SWIZZLES_XY SWIZZLES_Z SWIZZLES_W
    };
};

// As a vector, but aligned as one element.
template <class T, int N>
struct packed_vec {
    T all[N];

    packed_vec() = default;
    packed_vec(const vec<T, N>& other) { __builtin_memcpy(all, other.all, sizeof all); }
    operator vec<T, N>() const {
        vec<T, N> result;
        __builtin_memcpy(result.all, all, sizeof all);
        return result;
    }
    T& operator[](int i) { return all[i]; }
    const T& operator[](int i) const { return all[i]; }
};

#define VECTOR_NAMES(T)                        \
    using T##2 = vec<T, 2>;                    \
    using T##3 = vec<T, 3>;                    \
    using T##4 = vec<T, 4>;                    \
    using packed_##T##2 = packed_vec<T, 2>;    \
    using packed_##T##3 = packed_vec<T, 3>;    \
    using packed_##T##4 = packed_vec<T, 4>;
VECTOR_NAMES(bool)
VECTOR_NAMES(char)
VECTOR_NAMES(uchar)
VECTOR_NAMES(short)
VECTOR_NAMES(ushort)
VECTOR_NAMES(int)
VECTOR_NAMES(uint)
VECTOR_NAMES(long)
VECTOR_NAMES(ulong)
VECTOR_NAMES(half)
VECTOR_NAMES(bfloat)
VECTOR_NAMES(float)

static_assert(sizeof(float3) == 16 && sizeof(half4) == 8 && sizeof(packed_float3) == 12);

template <Vector V>
inline bool any(const V& mask) {
    for (bool set : vector_of<V>(mask).all)
        if (set) return true;
    return false;
}

template <Vector V>
inline bool all(const V& mask) {
    for (bool set : vector_of<V>(mask).all)
        if (!set) return false;
    return true;
}

}  // namespace metal

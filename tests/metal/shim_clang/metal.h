// The Metal Shading Language for clang, on which Apple's compiler is built: declarations only, for a
// check of the syntax with real address spaces and real vector types. C++14, as Metal is.
#pragma once
#pragma GCC system_header  // it does what warnings are about

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;
typedef _Float16 half;
typedef half float16_t;
typedef __bf16 bfloat;
typedef bfloat bfloat16_t;

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread

#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-07f
#define HALF_MAX 65504.0h
#define M_PI_F 3.14159265358979f
#define M_LOG2E_F 1.44269504088896f
#define M_LN2_F 0.693147180559945f

constexpr half operator""h(long double value) { return half(value); }

namespace metal {

template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// clang knows no constructors of vectors: at the end of this file, `float4(` becomes `make_float4(`.
#define VECTORS(T)                                   \
    typedef vec<T, 2> T##2;                          \
    typedef vec<T, 3> T##3;                          \
    typedef vec<T, 4> T##4;                          \
    struct packed_##T##3 {                           \
        T x, y, z;                                   \
        packed_##T##3(T##3);                         \
        operator T##3() const;                       \
    };                                               \
    T##2 make_##T##2(T);                             \
    T##2 make_##T##2(T, T);                          \
    T##3 make_##T##3(T);                             \
    T##3 make_##T##3(T, T, T);                       \
    T##3 make_##T##3(T##2, T);                       \
    T##3 make_##T##3(T, T##2);                       \
    T##4 make_##T##4(T);                             \
    T##4 make_##T##4(T, T, T, T);                    \
    T##4 make_##T##4(T##2, T##2);                    \
    T##4 make_##T##4(T##2, T, T);                    \
    T##4 make_##T##4(T, T##2, T);                    \
    T##4 make_##T##4(T, T, T##2);                    \
    T##4 make_##T##4(T##3, T);                       \
    T##4 make_##T##4(T, T##3);                       \
    template <class S>                               \
    T##2 make_##T##2(vec<S, 2>);                     \
    template <class S>                               \
    T##3 make_##T##3(vec<S, 3>);                     \
    template <class S>                               \
    T##4 make_##T##4(vec<S, 4>);
VECTORS(bool)
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(int)
VECTORS(uint)
VECTORS(long)
VECTORS(ulong)
VECTORS(half)
VECTORS(bfloat)
VECTORS(float)

#define SIZES(X, name, T) X(name, T) X(name, T##2) X(name, T##3) X(name, T##4)
#define FLOATS(X, name) SIZES(X, name, float) SIZES(X, name, half) SIZES(X, name, bfloat)
#define INTEGERS(X, name)                                                          \
    SIZES(X, name, char) SIZES(X, name, uchar) SIZES(X, name, short)               \
    SIZES(X, name, ushort) SIZES(X, name, int) SIZES(X, name, uint)                \
    SIZES(X, name, long) SIZES(X, name, ulong)

#define UNARY(name, T) T name(T);
#define BINARY(name, T) T name(T, T);
#define TERNARY(name, T) T name(T, T, T);
#define MATHS                                                                                  \
    FLOATS(UNARY, acos) FLOATS(UNARY, asin) FLOATS(UNARY, atan) FLOATS(UNARY, ceil)            \
    FLOATS(UNARY, cos) FLOATS(UNARY, cosh) FLOATS(UNARY, exp) FLOATS(UNARY, exp2)              \
    FLOATS(UNARY, exp10) FLOATS(UNARY, fabs) FLOATS(UNARY, floor) FLOATS(UNARY, fract)         \
    FLOATS(UNARY, log) FLOATS(UNARY, log2) FLOATS(UNARY, log10) FLOATS(UNARY, rint)            \
    FLOATS(UNARY, round) FLOATS(UNARY, rsqrt) FLOATS(UNARY, saturate) FLOATS(UNARY, sign)      \
    FLOATS(UNARY, sin) FLOATS(UNARY, sinh) FLOATS(UNARY, sqrt) FLOATS(UNARY, tan)              \
    FLOATS(UNARY, tanh) FLOATS(UNARY, trunc)                                                   \
    FLOATS(BINARY, atan2) FLOATS(BINARY, copysign) FLOATS(BINARY, fmax) FLOATS(BINARY, fmin)   \
    FLOATS(BINARY, fmod) FLOATS(BINARY, pow) FLOATS(BINARY, powr)                              \
    FLOATS(TERNARY, fma) FLOATS(UNARY, abs)                                                    \
    FLOATS(BINARY, min) FLOATS(BINARY, max) FLOATS(TERNARY, clamp)
MATHS
INTEGERS(UNARY, abs)
INTEGERS(BINARY, min)
INTEGERS(BINARY, max)
INTEGERS(TERNARY, clamp)
INTEGERS(UNARY, popcount)
INTEGERS(UNARY, clz)
INTEGERS(UNARY, ctz)
INTEGERS(BINARY, mulhi)
FLOATS(TERNARY, mix)
#define EXTRACT_BITS(name, T) T name(T, uint, uint);
INTEGERS(EXTRACT_BITS, extract_bits)
namespace precise {
MATHS
}
namespace fast {
MATHS
FLOATS(BINARY, divide)
}  // namespace fast

#define SELECT(name, T) T name(T, T, bool);
SELECT(select, float)
SELECT(select, half)
SELECT(select, int)
SELECT(select, uint)
template <class T, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<bool, N>);
template <class T, int N>
T dot(vec<T, N>, vec<T, N>);
template <class T, int N>
bool any(vec<T, N>);
template <class T, int N>
bool all(vec<T, N>);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
bool signbit(float);
float ldexp(float, int);

template <class To, class From>
To as_type(From);

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define LANES(name) \
    template <class T> \
    T name(T);
LANES(simd_sum)
LANES(simd_product)
LANES(simd_max)
LANES(simd_min)
LANES(simd_and)
LANES(simd_or)
LANES(simd_xor)
LANES(simd_prefix_inclusive_sum)
LANES(simd_prefix_exclusive_sum)
LANES(simd_broadcast_first)
#define EXCHANGE(name) \
    template <class T> \
    T name(T, ushort);
EXCHANGE(simd_broadcast)
EXCHANGE(simd_shuffle)
EXCHANGE(simd_shuffle_xor)
EXCHANGE(simd_shuffle_down)
EXCHANGE(simd_shuffle_up)
EXCHANGE(simd_shuffle_rotate_down)
EXCHANGE(simd_shuffle_rotate_up)
EXCHANGE(quad_broadcast)
EXCHANGE(quad_shuffle)
EXCHANGE(quad_shuffle_xor)
template <class T>
T simd_shuffle_and_fill_up(T, T, ushort);
template <class T>
T simd_shuffle_and_fill_down(T, T, ushort);
bool simd_any(bool);
bool simd_all(bool);

template <class T, int ROWS, int COLUMNS>
struct simdgroup_matrix {
    simdgroup_matrix();
    explicit simdgroup_matrix(T);
    vec<T, 2>& thread_elements();
    const vec<T, 2>& thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int ROWS, int COLUMNS>
simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T);
#define MATRIX_MEMORY(space)                                                                    \
    template <class T>                                                                          \
    void simdgroup_load(simdgroup_matrix<T, 8, 8>&, const space T*, ulong = 8, ulong2 = 0, bool = false); \
    template <class T>                                                                          \
    void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T*, ulong = 8, ulong2 = 0, bool = false);
MATRIX_MEMORY(device)
MATRIX_MEMORY(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>,
                                   simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
    T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define IDENTITY(T) typename identity<T>::type
template <class T>
struct identity {
    typedef T type;
};
#define ATOMIC(name, space) \
    template <class T>      \
    T atomic_##name##_explicit(volatile space atomic<T>*, IDENTITY(T), memory_order);
#define ATOMICS(space)                                                                          \
    template <class T>                                                                          \
    T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                      \
    template <class T>                                                                          \
    void atomic_store_explicit(volatile space atomic<T>*, IDENTITY(T), memory_order);           \
    ATOMIC(exchange, space) ATOMIC(fetch_add, space) ATOMIC(fetch_sub, space)                   \
    ATOMIC(fetch_max, space) ATOMIC(fetch_min, space) ATOMIC(fetch_and, space)                  \
    ATOMIC(fetch_or, space)
ATOMICS(device)
ATOMICS(threadgroup)

template <class A, class B>
struct is_same {
    static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
    static constexpr bool value = true;
};
template <class A, class B>
constexpr bool is_same_v = is_same<A, B>::value;
template <bool FIRST, class A, class B>
struct conditional {
    typedef A type;
};
template <class A, class B>
struct conditional<false, A, B> {
    typedef B type;
};
template <bool FIRST, class A, class B>
using conditional_t = typename conditional<FIRST, A, B>::type;

}  // namespace metal

using namespace metal;

#define bool2(...) make_bool2(__VA_ARGS__)
#define bool3(...) make_bool3(__VA_ARGS__)
#define bool4(...) make_bool4(__VA_ARGS__)
#define char2(...) make_char2(__VA_ARGS__)
#define char3(...) make_char3(__VA_ARGS__)
#define char4(...) make_char4(__VA_ARGS__)
#define uchar2(...) make_uchar2(__VA_ARGS__)
#define uchar3(...) make_uchar3(__VA_ARGS__)
#define uchar4(...) make_uchar4(__VA_ARGS__)
#define short2(...) make_short2(__VA_ARGS__)
#define short3(...) make_short3(__VA_ARGS__)
#define short4(...) make_short4(__VA_ARGS__)
#define ushort2(...) make_ushort2(__VA_ARGS__)
#define ushort3(...) make_ushort3(__VA_ARGS__)
#define ushort4(...) make_ushort4(__VA_ARGS__)
#define int2(...) make_int2(__VA_ARGS__)
#define int3(...) make_int3(__VA_ARGS__)
#define int4(...) make_int4(__VA_ARGS__)
#define uint2(...) make_uint2(__VA_ARGS__)
#define uint3(...) make_uint3(__VA_ARGS__)
#define uint4(...) make_uint4(__VA_ARGS__)
#define long2(...) make_long2(__VA_ARGS__)
#define long3(...) make_long3(__VA_ARGS__)
#define long4(...) make_long4(__VA_ARGS__)
#define ulong2(...) make_ulong2(__VA_ARGS__)
#define ulong3(...) make_ulong3(__VA_ARGS__)
#define ulong4(...) make_ulong4(__VA_ARGS__)
#define half2(...) make_half2(__VA_ARGS__)
#define half3(...) make_half3(__VA_ARGS__)
#define half4(...) make_half4(__VA_ARGS__)
#define bfloat2(...) make_bfloat2(__VA_ARGS__)
#define bfloat3(...) make_bfloat3(__VA_ARGS__)
#define bfloat4(...) make_bfloat4(__VA_ARGS__)
#define float2(...) make_float2(__VA_ARGS__)
#define float3(...) make_float3(__VA_ARGS__)
#define float4(...) make_float4(__VA_ARGS__)

// Scalar types of the Metal Shading Language.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <concepts>
#include <limits>
#include <type_traits>

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using half = _Float16;  // rounded after each operation: -fexcess-precision=16

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

using ::size_t;

// bfloat16. As in Metal, floats do not become bfloats without a cast.
struct bfloat {
    uint16_t bits;

    bfloat() = default;
    template <std::floating_point F>
    constexpr explicit bfloat(F value) : bits(rounded(float(value))) {}
    constexpr explicit bfloat(half value) : bits(rounded(float(value))) {}
    template <std::integral I>
    constexpr bfloat(I value) : bits(rounded(float(value))) {}
    constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

    static constexpr uint16_t rounded(float value) {
        const uint32_t word = __builtin_bit_cast(uint32_t, value);
        if (value != value) return uint16_t(word >> 16 | 0x40);
        return uint16_t((word + 0x7FFF + (word >> 16 & 1)) >> 16);
    }

    constexpr bfloat operator-() const { return bfloat(-float(*this)); }
#define BFLOAT_OPERATOR(op)                                                                       \
    friend constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
    template <std::integral I>                                                                    \
    friend constexpr bfloat operator op(bfloat a, I b) { return a op bfloat(b); }                  \
    template <std::integral I>                                                                    \
    friend constexpr bfloat operator op(I a, bfloat b) { return bfloat(a) op b; }                  \
    constexpr bfloat& operator op##=(float b) { return *this = bfloat(float(*this) op b); }
    BFLOAT_OPERATOR(+)
    BFLOAT_OPERATOR(-)
    BFLOAT_OPERATOR(*)
    BFLOAT_OPERATOR(/)
#undef BFLOAT_OPERATOR
};

template <class T>
concept SmallFloat = std::same_as<T, half> || std::same_as<T, bfloat>;
template <class T>
concept Scalar = std::is_arithmetic_v<T> || SmallFloat<T>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};

template <>
struct numeric_limits<half> {
    static constexpr half max() { return half(65504.0f); }
    static constexpr half lowest() { return half(-65504.0f); }
    static constexpr half min() { return half(6.103515625e-05f); }
    static constexpr half epsilon() { return half(0.0009765625f); }
    static constexpr half infinity() { return half(__builtin_inff()); }
    static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};

template <>
struct numeric_limits<bfloat> {
    static constexpr bfloat max() { return bfloat(3.38953139e38f); }
    static constexpr bfloat lowest() { return bfloat(-3.38953139e38f); }
    static constexpr bfloat min() { return bfloat(1.17549435e-38f); }
    static constexpr bfloat epsilon() { return bfloat(0.0078125f); }
    static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
    static constexpr bfloat quiet_NaN() { return bfloat(__builtin_nanf("")); }
};

template <class To, class From>
inline To as_type(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "as_type: sizes differ");
    To result;
    __builtin_memcpy(static_cast<void*>(&result), static_cast<const void*>(&value), sizeof result);
    return result;
}

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_arithmetic;
using std::is_const;
using std::is_convertible;
using std::is_convertible_v;
using std::is_enum;
using std::is_floating_point;
using std::is_floating_point_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_signed;
using std::is_unsigned;
using std::is_void;
using std::is_void_v;
using std::make_signed;
using std::make_unsigned;
using std::remove_cv;
using std::remove_cv_t;
using std::remove_reference;
using std::remove_reference_t;
using std::true_type;

}  // namespace metal

using metal::bfloat;
using float16_t = half;
using bfloat16_t = bfloat;

// In place of MLX's, whose overloads differ in address spaces only; enough for its utils.h.
#pragma once
template <class T>
struct complex_t {
    T real, imag;
    constexpr complex_t(T real, T imag = T(0)) : real(real), imag(imag) {}
};
using complex64_t = complex_t<float>;
template <class T>
constexpr bool operator>=(complex_t<T> a, complex_t<T> b) {
    return a.real > b.real || (a.real == b.real && a.imag >= b.imag);
}

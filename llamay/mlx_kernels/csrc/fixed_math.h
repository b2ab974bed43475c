/* exp, log, sin and cos for doubles, from IEEE additions, products and quotients in a fixed order.
 *
 * libm's differ between systems; these give the same bits everywhere, to about 1e-15. Series are plain
 * Taylor series about a reduced argument, long enough that the first term left out is below 1e-18.
 */
#ifndef LLAMAY_FIXED_MATH_H
#define LLAMAY_FIXED_MATH_H

#include <stdint.h>
#include <string.h>

static inline double fixed_pow2(int n) { /* -1022 <= n <= 1023 */
    uint64_t bits = (uint64_t)(n + 1023) << 52;
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest integer, ties to even; |x| < 2^51. */
static inline double fixed_round(double x) { return (x + 0x1.8p52) - 0x1.8p52; }

/* e^x for -700 <= x <= 700. */
static inline double fixed_exp(double x) {
    double n = fixed_round(x * 0x1.71547652b82fep+0);
    double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    double sum = 1.0;
    for (int k = 15; k >= 1; k--) sum = 1.0 + sum * r / k;
    return sum * fixed_pow2((int)n);
}

/* Natural logarithm of a normal x > 0: x = m 2^n, log m = 2 atanh((m - 1) / (m + 1)). */
static inline double fixed_log(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int n = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | (uint64_t)1023 << 52;
    double m, sum = 0.0;
    memcpy(&m, &bits, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        n++;
    }
    double s = (m - 1.0) / (m + 1.0), square = s * s;
    for (int k = 27; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
    return n * 0x1.62e42feep-1 + (n * 0x1.a39ef35793c76p-33 + 2.0 * s * sum);
}

/* Sine and cosine of 0 <= x < 2^20; pi / 2 in three parts, so that the products with n are exact. */
static inline void fixed_sincos(double x, double *sine, double *cosine) {
    double n = fixed_round(x * 0x1.45f306dc9c883p-1);
    double r = ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a4p-34) - n * 0x1.13198a2e03707p-65;
    double square = r * r, s = 1.0, c = 1.0;
    for (int k = 18; k >= 2; k -= 2) {
        s = 1.0 - s * square / (k * (k + 1));
        c = 1.0 - c * square / (k * (k - 1));
    }
    s *= r;
    switch ((int64_t)n & 3) {
    case 0: *sine = s; *cosine = c; break;
    case 1: *sine = c; *cosine = -s; break;
    case 2: *sine = -s; *cosine = -c; break;
    default: *sine = -c; *cosine = s; break;
    }
}

#endif

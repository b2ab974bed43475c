/* Kernel set "avx2": x86-64 with AVX2, FMA and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_avx2
#define SET_NAME "avx2"

TARGET_BEGIN("avx2,fma,f16c")
#include "simd_avx2.h"

#include "kernel_bodies.h"
TARGET_END
#endif

/* Kernel set "avx512-vnni": x86-64 with AVX-512 F, BW, DQ, VL and VNNI. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_avx512
#define SET_NAME "avx512-vnni"

TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include "simd_avx512.h"

#include "kernel_bodies.h"
TARGET_END
#endif

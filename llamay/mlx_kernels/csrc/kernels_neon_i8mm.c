/* Kernel set "neon-i8mm": arm64 with dot products and 8-bit matrix products (FEAT_I8MM; M2 and later). */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_neon_i8mm
#define SET_NAME "neon-i8mm"
#define NEON_I8MM

TARGET_BEGIN("arch=armv8.2-a+dotprod+i8mm")
#include "simd_neon.h"

#include "kernel_bodies.h"
TARGET_END
#endif

/* Kernel set "neon-dotprod": arm64 with dot products (FEAT_DotProd; M1 and later). */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_neon_dotprod
#define SET_NAME "neon-dotprod"
#define NEON_DOTPROD

TARGET_BEGIN("arch=armv8.2-a+dotprod")
#include "simd_neon.h"

#include "kernel_bodies.h"
TARGET_END
#endif

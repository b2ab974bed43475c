/* Kernel set "neon": any arm64 processor. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_neon
#define SET_NAME "neon"

#include "simd_neon.h"

#include "kernel_bodies.h"
#endif

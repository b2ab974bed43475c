/* Kernel set "scalar": plain C, on every processor. */
#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_scalar
#define SET_NAME "scalar"
#undef UNROLL
#define UNROLL

#include "simd_scalar.h"

#include "kernel_bodies.h"

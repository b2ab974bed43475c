/* Kernel set "scalar": plain C, on every processor. */
#include "compiler.h"
#include "kernels.h"

#define NAME(x) x##_scalar
#define SET_NAME "scalar"

#include "simd_scalar.h"

#include "kernel_bodies.h"

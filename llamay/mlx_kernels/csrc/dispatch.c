/* Which kernel sets are compiled in, and which of them this processor runs. */
#include <string.h>

#include "kernels.h"

extern const KernelSet kernels_scalar;

#if defined(__x86_64__)
extern const KernelSet kernels_avx2, kernels_avx512;
const KernelSet *const kernel_sets[] = {&kernels_avx512, &kernels_avx2, &kernels_scalar, NULL};

int kernel_set_runs_here(const KernelSet *set) {
    __builtin_cpu_init();
    if (set == &kernels_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    if (set == &kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    return 1;
}
#elif defined(__aarch64__)
extern const KernelSet kernels_neon, kernels_neon_dotprod, kernels_neon_i8mm;
const KernelSet *const kernel_sets[] = {&kernels_neon_i8mm, &kernels_neon_dotprod, &kernels_neon, &kernels_scalar, NULL};

#if defined(__APPLE__)
#include <sys/sysctl.h>
static int has_feature(const char *name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value;
}
static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
#include <sys/auxv.h>
/* Bits of Linux's hwcap.h, which older headers lack. */
static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; }
static int has_i8mm(void) { return getauxval(AT_HWCAP2) >> 13 & 1; }
#endif

int kernel_set_runs_here(const KernelSet *set) {
    if (set == &kernels_neon_i8mm) return has_dotprod() && has_i8mm();
    return set != &kernels_neon_dotprod || has_dotprod();
}
#else
const KernelSet *const kernel_sets[] = {&kernels_scalar, NULL};

int kernel_set_runs_here(const KernelSet *set) {
    (void)set;
    return 1;
}
#endif

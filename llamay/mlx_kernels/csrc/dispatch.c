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
extern const KernelSet kernels_neon;
const KernelSet *const kernel_sets[] = {&kernels_neon, &kernels_scalar, NULL};

int kernel_set_runs_here(const KernelSet *set) {
    (void)set;
    return 1;
}
#else
const KernelSet *const kernel_sets[] = {&kernels_scalar, NULL};

int kernel_set_runs_here(const KernelSet *set) {
    (void)set;
    return 1;
}
#endif

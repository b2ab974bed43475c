/* What a core can do at most, for `scripts/bench_kernels`: it reads memory, or does what the matrix products do
 * with weights that are in registers already. -DSIMD names the instruction set's header in csrc.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <math.h>
#include <string.h>

#include "compiler.h"
#include "kernels.h"
#include SIMD

/* Vectors of weights that share what is read of the activations: two where there are registers enough. */
enum { WEIGHTS = TILE_COLUMNS == 12 ? 2 : 1 };
enum { STREAMS = 8, CHAINS = WEIGHTS * TILE_COLUMNS };
/* What it points to is unknown from here on: no round is left out, no two chains are made one. */
#define FORGET(pointer) __asm__ volatile("" : "+r"(pointer) : : "memory")
#define EACH_CHAIN UNROLL for (int c = 0; c < TILE_COLUMNS; c++) UNROLL for (int g = 0; g < WEIGHTS; g++)

static volatile int32_t sink;

/* bytes: a multiple of 512 */
void read_bytes(const uint8_t *data, int64_t bytes) {
    vq seen[STREAMS];
    memset(seen, 0, sizeof seen);
    for (int64_t at = 0; at < bytes; at += STREAMS * VECTOR) {
        for (int i = 0; i < STREAMS; i++) {
            __builtin_prefetch(data + at + i * VECTOR + 2048);
            seen[i] = vq_or(seen[i], vq_load(data + at + i * VECTOR));
        }
    }
    int32_t all[VECTOR / 4] = {0}, word[VECTOR / 4];
    for (int i = 0; i < STREAMS; i++) {
        memcpy(word, &seen[i], sizeof word);
        for (int k = 0; k < VECTOR / 4; k++) all[k] |= word[k];
    }
    for (int k = 0; k < VECTOR / 4; k++) sink |= all[k];
}

/* 8-bit products; returns how many. */
int64_t dot_products(int64_t rounds) {
    ActivationBlock activations[TILE_COLUMNS], *x = activations;
    uint8_t codes[2 * WEIGHTS * VECTOR], *weights = codes;
    memset(activations, 1, sizeof activations);
    memset(codes, 3, sizeof codes);
    FORGET(weights);
    vi sum[WEIGHTS][TILE_COLUMNS];
    vq first[WEIGHTS], second[WEIGHTS];
    EACH_CHAIN sum[g][c] = vi_set1(0);
    UNROLL for (int g = 0; g < WEIGHTS; g++) {
        first[g] = vq_load(weights + 2 * g * VECTOR);
        second[g] = vq_load(weights + (2 * g + 1) * VECTOR);
    }
    for (int64_t r = 0; r < rounds; r++) {
        FORGET(x);
#if defined(OWN_ADD_QUADS)
        add_quads(0, TILE_COLUMNS, first[0], second[0], x, 0, sum[0]);
#else
        EACH_CHAIN sum[g][c] = v_dot4(sum[g][c], first[g], x[c].q);
        EACH_CHAIN sum[g][c] = v_dot4(sum[g][c], second[g], x[c].q + 4);
#endif
    }
    EACH_CHAIN sink = vi_sum(sum[g][c]);
    return rounds * CHAINS * 8 * LANES;
}

/* float32 products; returns how many. */
int64_t float_products(int64_t rounds) {
    float activations[TILE_COLUMNS], *x = activations, ones[WEIGHTS * LANES], *weights = ones;
    for (int c = 0; c < TILE_COLUMNS; c++) x[c] = 0x1p-20f;
    for (int i = 0; i < WEIGHTS * LANES; i++) ones[i] = 1;
    FORGET(weights);
    vf acc[WEIGHTS][TILE_COLUMNS], w[WEIGHTS];
    UNROLL for (int g = 0; g < WEIGHTS; g++) w[g] = v_load(weights + g * LANES);
    EACH_CHAIN acc[g][c] = v_set1(0.0f);
    for (int64_t r = 0; r < rounds; r++) {
        FORGET(x);
        EACH_CHAIN acc[g][c] = v_fma(w[g], v_set1(x[c]), acc[g][c]);
    }
    EACH_CHAIN sink = (int32_t)v_sum(acc[g][c]);
    return rounds * CHAINS * LANES;
}

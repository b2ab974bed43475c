/* The contract between the forward pass (program.c) and the kernels of one instruction set.
 *
 * Every kernel set gives the same bits (see the numerics contract in llamay/mlx_kernels/__init__.py).
 * That holds by construction: kernel_bodies.h is written once over a vector of 16 float lanes, and an
 * instruction set only supplies the lanes (simd_*.h). Whatever a kernel sums, it sums in an order that
 * depends on the shape of one output alone.
 */
#ifndef LLAMAY_KERNELS_H
#define LLAMAY_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "weight_formats.h"

enum {
    RUN_TOKENS = 256,  /* attention reduces in runs of positions counted from 0, merged in order */
    RUN_GROUPS = RUN_TOKENS / LANES,
    SCORE_STRIDE = RUN_TOKENS + LANES, /* not a power of two, or few sets of the cache would hold all rows */
    NEAR_GROUPS = 4, /* of keys or values, read by all queries while in the nearest cache; as many are fetched ahead */
    ATTENTION_ROWS = 64, /* queries that read a run of keys and values together */
    MAX_HEAD_DIM = 1024,
};

/* A weight matrix, packed: see weight_formats.h. */
typedef struct {
    WeightFormat format;
    int64_t rows, columns;
    const uint8_t *data;
} Matrix;

/* 32 activations of one row, quantised: x is about scale * q, or in two planes scale * (256 * q + fine), where
 * `fine` is the q of the second plane's block. Scale and sum stand in the first plane's. A span of 32 or 256
 * activations, as the weights that they meet, has one scale.
 */
typedef struct {
    int8_t q[BLOCK];   /* round(x * 127 / max |x|); in the second plane what that left over, times 256 */
    float scale;       /* max |x| / 127, in two planes a 256th of it; 0 for tiny values */
    float scaled_sum;  /* scale * sum */
    int32_t sum;       /* of the integers that x is a multiple of */
    int16_t half_sums[2]; /* of the first and of the last 16 of this plane's q */
} ActivationBlock;

/* Index of a quantised format's kind of activations: in spans of 32, or of 256. */
enum { SPANS = 2 };
static inline int span_index(WeightFormat format) { return packing(format).span == SUPERBLOCK; }

/* Rows of activations that one matrix product reads.
 *
 * planes: 1 or 2. Two planes make 16-bit activations: for products whose errors weigh most (queries, keys and
 *         logits), where the second pass over the weights costs least.
 * values: [rows][columns] float32, what float weights read
 * blocks: by `span_index`, quantised rows in tiles: [tile][columns / 32][planes][tile width], each tile
 *         `tile_columns` rows wide but the last, whose width is `tile_width(rows left)`, padded with zero rows
 */
typedef struct {
    int64_t rows, columns;
    int planes;
    const float *values;
    ActivationBlock *blocks[SPANS];
} Activations;

/* How a head's keys or values are stored; KV_I8 with a float32 scale for each position. */
typedef enum { KV_F32, KV_F16, KV_I8 } KVFormat;

/* One run of up to 256 positions of one KV head, read by up to 64 queries. */
typedef struct {
    KVFormat key_format, value_format;
    const uint8_t *keys[RUN_GROUPS];        /* each [head_dim][16] */
    const uint8_t *values[RUN_GROUPS];      /* each [16][head_dim] */
    const uint8_t *keys_ahead[RUN_GROUPS];  /* what to fetch while a group of keys is read */
    const uint8_t *values_ahead[RUN_GROUPS];
    const float *key_scales[RUN_GROUPS];    /* each [16], if keys are KV_I8 */
    const float *value_scales[RUN_GROUPS];
    int head_dim;
    float scale, soft_cap; /* of scores; no cap if 0 */
    int rows;
    const float *queries[ATTENTION_ROWS]; /* each [head_dim] */
    int first[ATTENTION_ROWS];            /* the query sees positions [first, visible) of this run, */
    int visible[ATTENTION_ROWS];          /* 0 <= first < visible <= 256 */
    float *scores;                        /* scratch, [ATTENTION_ROWS][SCORE_STRIDE] */
    float *out[ATTENTION_ROWS];           /* partial results: [PARTIAL_VALUES + head_dim] */
} AttentionRun;

/* A partial result of attention: [0] largest score, [1] sum of weights, from [16] on the weighted sum of values. */
enum { PARTIAL_MAX = 0, PARTIAL_SUM = 1, PARTIAL_VALUES = LANES };

typedef void (*GateKernel)(float *gate, const float *up, int64_t count);

typedef struct {
    const char *name;
    int tile_columns; /* widest tile of activation rows */

    /* Smallest width of a tile that holds `rows` <= tile_columns rows. */
    int (*tile_width)(int64_t rows);

    /* out[c] = x[c] / sqrt(mean(x^2) + eps) * weight[c] */
    void (*rms_norm)(const float *x, const float *weight, int64_t columns, float eps, float *out);

    /* Quantises one row; plane p of block b goes to blocks[(b * planes + p) * width]. columns is a multiple of span. */
    void (*quantize)(const float *x, int64_t columns, int planes, int span, ActivationBlock *blocks, int64_t width);

    /* y[a * ld + r] = dot(weights row r, activations row a) for rows 16 * first_group <= r < 16 * end_group. */
    void (*matmul)(const Matrix *weights, const Activations *x, float *y, int64_t ld, int64_t first_group,
                   int64_t end_group);

    /* gate[i] = silu(gate[i]) * up[i], or gelu (by tanh) */
    GateKernel silu_mul, gelu_mul;

    /* x[i] = cap * tanh(x[i] / cap); NaN if x[i] is not finite, so that damage is noticed. */
    void (*soft_cap)(float *x, int64_t count, float cap);

    /* Each query's partial result over one run. */
    void (*attend)(const AttentionRun *run);

    /* Folds `next` into `state`, both partial results; order matters, so callers go by ascending run. */
    void (*merge)(float *state, const float *next, int head_dim);

    /* out = values / sum of a partial result */
    void (*finish)(const float *state, int head_dim, float *out);

    /* weights[i] = exp(logits[i] - max); returns max. */
    float (*exp_shifted)(const float *logits, int64_t count, float *weights);
} KernelSet;

/* Kernel sets compiled for this machine's architecture, best first, NULL at the end. */
extern const KernelSet *const kernel_sets[];

/* Whether this processor can run the set of that name. */
int kernel_set_runs_here(const KernelSet *set);

/* Row `row` of a packed matrix as floats (pack.c). */
void dequantize_row(const Matrix *matrix, int64_t row, float *out);

#endif

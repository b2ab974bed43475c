/* What a run of a program works with besides the program: buffers, kept between runs. */
#ifndef LLAMAY_SCRATCH_H
#define LLAMAY_SCRATCH_H

#include "attention.h"

enum { ROW_PADDING = 16 }; /* rows more than a step has, so that a last tile may be filled up */

/* Grown when a step has more rows. */
struct Scratch {
    int64_t rows; /* capacity */
    int threads;
    int64_t partial_capacity;
    float *stream;            /* residual stream, [rows][hidden] */
    float *inputs;            /* normed rows, [rows][widest] */
    float *projected[2];      /* [rows][widest]: queries or gate; up or a product before the residual */
    float *keys, *values;     /* [rows][num_kv_heads][head_dim] */
    float *attended;          /* [rows][num_heads * head_dim] */
    float *cosines, *sines;   /* [num_ropes][rows of the step][rope_dim / 2] */
    ActivationBlock *blocks[SPANS]; /* [rows][widest / 32][2], those that the weights' formats need */
    float *workspace;         /* attention, per worker */
    float *partials;
    AttentionPlan plan;
};

typedef struct {
    Program *program;
    Pool *pool;
    const Step *step;
    Scratch *scratch;
} Run;

/* Zeros, aligned to a line of the cache; NULL without memory. */
void *allocate(size_t bytes);

/* Whether a quantised matrix reads activations of that kind (see `span_index`). */
int needs_span(const Matrix *weights, int parts, int span);

/* Room for a step of so many rows. 0, or -1 without memory. */
int scratch_grow(Program *program, int64_t rows, int threads);

/* Plans the step's attention and finds room for its partial results. 0, or -1 without memory. */
int scratch_plan(Run *run);

/* Runs a task over rows; few of them cost less than waking the other threads. */
void for_rows(Run *run, int64_t rows, PoolTask task, void *argument);

#endif

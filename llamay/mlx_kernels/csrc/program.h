/* A model's forward pass as a list of coarse operations, run over a step of ragged rows. */
#ifndef LLAMAY_PROGRAM_H
#define LLAMAY_PROGRAM_H

#include <stdatomic.h>
#include <stdint.h>

#include "kernels.h"
#include "kv_page.h"
#include "pool.h"

typedef enum { EMBED, ATTENTION_INPUT, ATTENTION, ATTENTION_OUTPUT, FEED_FORWARD, LOGITS } OperationKind;

enum { QUERY = 0, KEY = 1, VALUE = 2, GATE = 0, UP = 1, DOWN = 2, MAX_PARTS = 3 };

typedef struct {
    OperationKind kind;
    int layer;
    int rope;                     /* index of the shape's */
    int window;                   /* positions that a row sees, its own the last; 0 for all */
    float soft_cap;               /* of scores or logits; 0 for none */
    float scale;                  /* of embeddings */
    float eps, post_eps;          /* of norm and head_norm, of post_norm */
    const float *norm;            /* [hidden], or NULL */
    const float *post_norm;       /* [hidden], of what is added to the stream, or NULL */
    const float *head_norm[2];    /* of QUERY and KEY, [head_dim] each, or NULL */
    GateKernel gate;              /* of GATE and UP */
    Matrix weights[MAX_PARTS];
    const float *bias[MAX_PARTS]; /* [rows of that matrix], or NULL */
} Operation;

typedef struct {
    int hidden, num_heads, num_kv_heads, head_dim, vocab;
    int rope_interleaved;      /* pairs (2i, 2i + 1) if set, else (i, i + rope_dim / 2) */
    int rope_dim;              /* leading dimensions of a head that are rotated */
    int num_ropes;
    const double *rope_inverse;   /* [num_ropes][rope_dim / 2] radians per position */
    const double *rope_magnitude; /* [num_ropes] factor of sine and cosine */
    float attention_scale;
} ModelShape;

typedef struct Scratch Scratch;

typedef struct {
    ModelShape shape;
    const KernelSet *kernels;
    int num_operations;
    Operation *operations;
    Scratch *scratch;
} Program;

/* Ragged rows of several contexts. Row i is token tokens[i] at positions[i] of context contexts[i]; if writes[i],
 * its keys and values are written to page positions[i] / page_tokens of that context, else they are there.
 */
typedef struct {
    int64_t rows;
    const int32_t *tokens, *positions, *contexts;
    const uint8_t *writes;
    int64_t num_contexts, max_pages;
    uint8_t *const *pages; /* [num_contexts][max_pages] */
    PageLayout layout;
    int64_t num_logit_rows;
    const int32_t *logit_rows; /* rows whose logits are wanted */
    float *logits;             /* [num_logit_rows][vocab] */
    _Atomic int64_t *control; /* [0] set by anyone to cancel; [1] counts operations done */
} Step;

typedef enum { STEP_DONE = 0, STEP_CANCELLED = 1, STEP_NO_MEMORY = 2 } StepResult;

/* The page that holds a position of a row's context. */
static inline uint8_t *page_at(const Step *step, int64_t row, int64_t position) {
    return step->pages[step->contexts[row] * step->max_pages + position / step->layout.page_tokens];
}

StepResult program_run(Program *program, Pool *pool, const Step *step);
void scratch_free(Scratch *scratch);

#endif

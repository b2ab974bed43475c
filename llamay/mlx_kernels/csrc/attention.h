/* Attention of a step's rows over their pages. */
#ifndef LLAMAY_ATTENTION_H
#define LLAMAY_ATTENTION_H

#include "program.h"

/* Up to ATTENTION_ROWS queries that read the same keys. Query f of the chunk is row rows[f / group],
 * head f % group of the KV head at hand, where group = num_heads / num_kv_heads.
 */
typedef struct {
    const int32_t *rows;
    int first_query, queries;
    int run; /* the one run it reads, or EVERY_RUN */
} AttentionChunk;

enum { EVERY_RUN = -1 };

/* How a step's attention is split into chunks; the same for all layers, as if none had a window. Results do not
 * depend on it.
 */
typedef struct {
    AttentionChunk *chunks;
    int64_t num_chunks, chunk_capacity;
    int32_t *row_lists;
    int64_t rows_used, row_capacity;
    int split; /* runs are computed apart and merged afterwards */
    int64_t max_runs;
} AttentionPlan;

/* 0, or -1 without memory. */
int plan_attention(AttentionPlan *plan, const ModelShape *shape, const Step *step);
void plan_free(AttentionPlan *plan);

/* Floats of `partials` that attend_step needs: [rows][heads][max_runs][PARTIAL_VALUES + head_dim] when split, else 0. */
int64_t partial_floats(const AttentionPlan *plan, const ModelShape *shape, const Step *step);

/* Floats of `workspace` per worker. */
int64_t attention_workspace_floats(const ModelShape *shape);

/* One layer's; queries and out: [rows][num_heads][head_dim]. */
void attend_step(const Program *program, Pool *pool, const Step *step, const AttentionPlan *plan, const Operation *op,
                 const float *queries, float *partials, float *workspace, float *out);

#endif

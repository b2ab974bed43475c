/* Keys are reduced in runs of 256 positions counted from 0, merged in ascending order. Whether a row's runs
 * are computed one after the other (many rows) or apart and merged later (few rows, so that threads have
 * enough to do, and rows of several contexts that share a page read it once) changes no bit.
 */
#include "attention.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SPLIT_ROWS = 16 }; /* steps of more rows have enough chunks without splitting runs */


/* Positions of the run that a row sees; 0 or less if it sees none. */
static int visible_in_run(const Step *step, int32_t row, int run) {
    int64_t visible = (int64_t)step->positions[row] + 1 - (int64_t)run * RUN_TOKENS;
    return visible > RUN_TOKENS ? RUN_TOKENS : (int)visible;
}

static int run_is_shared(const Step *step, int32_t a, int32_t b, int run) {
    if (step->contexts[a] == step->contexts[b]) return 1;
    if (visible_in_run(step, a, run) < RUN_TOKENS || visible_in_run(step, b, run) < RUN_TOKENS) return 0;
    int64_t begin = (int64_t)run * RUN_TOKENS;
    for (int64_t p = begin; p < begin + RUN_TOKENS; p += LANES)
        if (page_at(step, a, p) != page_at(step, b, p)) return 0;
    return 1;
}

static int add_chunks(AttentionPlan *plan, const ModelShape *shape, const int32_t *rows, int64_t count, int run) {
    int64_t queries = count * (shape->num_heads / shape->num_kv_heads);
    int64_t needed = plan->num_chunks + (queries + ATTENTION_ROWS - 1) / ATTENTION_ROWS;
    if (needed > plan->chunk_capacity) {
        AttentionChunk *chunks = realloc(plan->chunks, (size_t)(2 * needed) * sizeof *chunks);
        if (!chunks) return -1;
        plan->chunks = chunks;
        plan->chunk_capacity = 2 * needed;
    }
    for (int64_t first = 0; first < queries; first += ATTENTION_ROWS) {
        int64_t left = queries - first;
        plan->chunks[plan->num_chunks++] =
            (AttentionChunk){rows, (int)first, left < ATTENTION_ROWS ? (int)left : ATTENTION_ROWS, run};
    }
    return 0;
}

/* One chunk list for each stretch of rows of one context. */
static int plan_whole(AttentionPlan *plan, const ModelShape *shape, const Step *step) {
    for (int64_t row = 0; row < step->rows; row++) plan->row_lists[row] = (int32_t)row;
    for (int64_t first = 0, end; first < step->rows; first = end) {
        for (end = first + 1; end < step->rows && step->contexts[end] == step->contexts[first]; end++) {
        }
        if (add_chunks(plan, shape, plan->row_lists + first, end - first, EVERY_RUN)) return -1;
    }
    return 0;
}

/* For each run, one chunk list for each set of rows that read the same pages. */
static int plan_split(AttentionPlan *plan, const ModelShape *shape, const Step *step) {
    for (int run = 0; run < plan->max_runs; run++) {
        int taken[MAX_SPLIT_ROWS] = {0};
        for (int32_t leader = 0; leader < step->rows; leader++) {
            if (taken[leader] || visible_in_run(step, leader, run) <= 0) continue;
            int32_t *rows = plan->row_lists + plan->rows_used;
            int64_t count = 0;
            for (int32_t row = leader; row < step->rows; row++) {
                if (taken[row] || visible_in_run(step, row, run) <= 0 || !run_is_shared(step, leader, row, run))
                    continue;
                taken[row] = 1;
                rows[count++] = row;
            }
            plan->rows_used += count;
            if (add_chunks(plan, shape, rows, count, run)) return -1;
        }
    }
    return 0;
}

int plan_attention(AttentionPlan *plan, const ModelShape *shape, const Step *step) {
    int64_t last = 0;
    for (int64_t row = 0; row < step->rows; row++)
        if (step->positions[row] > last) last = step->positions[row];
    plan->max_runs = last / RUN_TOKENS + 1;
    plan->split = step->rows <= MAX_SPLIT_ROWS;
    plan->num_chunks = plan->rows_used = 0;
    int64_t needed = plan->split ? step->rows * plan->max_runs : step->rows;
    if (needed > plan->row_capacity) {
        free(plan->row_lists);
        plan->row_capacity = 0;
        plan->row_lists = malloc((size_t)(2 * needed) * sizeof *plan->row_lists);
        if (!plan->row_lists) return -1;
        plan->row_capacity = 2 * needed;
    }
    return plan->split ? plan_split(plan, shape, step) : plan_whole(plan, shape, step);
}

void plan_free(AttentionPlan *plan) {
    free(plan->chunks);
    free(plan->row_lists);
}

static int64_t partial_size(const ModelShape *shape) { return PARTIAL_VALUES + shape->head_dim; }

int64_t partial_floats(const AttentionPlan *plan, const ModelShape *shape, const Step *step) {
    return plan->split ? step->rows * shape->num_heads * plan->max_runs * partial_size(shape) : 0;
}

int64_t attention_workspace_floats(const ModelShape *shape) {
    return ATTENTION_ROWS * (SCORE_STRIDE + 2 * partial_size(shape));
}

typedef struct {
    const Program *program;
    const Step *step;
    const AttentionPlan *plan;
    int layer;
    const float *queries;
    float *partials, *workspace, *out;
} AttentionJob;

static int query_row(const AttentionJob *job, const AttentionChunk *chunk, int query) {
    int group = job->program->shape.num_heads / job->program->shape.num_kv_heads;
    return chunk->rows[(chunk->first_query + query) / group];
}

/* Index of [row][head] for query `query` of a chunk. */
static int64_t query_head(const AttentionJob *job, const AttentionChunk *chunk, int kv_head, int query) {
    const ModelShape *shape = &job->program->shape;
    int group = shape->num_heads / shape->num_kv_heads;
    int head = kv_head * group + (chunk->first_query + query) % group;
    return (int64_t)query_row(job, chunk, query) * shape->num_heads + head;
}

/* Attends one run with those queries of the chunk that see it; results[q] receives query q's partial. */
static void attend_run(const AttentionJob *job, const AttentionChunk *chunk, int kv_head, int run, float *scores,
                       float *const *results) {
    const ModelShape *shape = &job->program->shape;
    const Step *step = job->step;
    AttentionRun task = {.key_format = step->layout.format[KEYS],
                         .value_format = step->layout.format[VALUES],
                         .head_dim = shape->head_dim,
                         .scale = shape->attention_scale,
                         .scores = scores};
    int32_t furthest = -1;
    int most = 0;
    for (int q = 0; q < chunk->queries; q++) {
        int row = query_row(job, chunk, q), visible = visible_in_run(step, row, run);
        if (visible <= 0) continue;
        task.queries[task.rows] = job->queries + query_head(job, chunk, kv_head, q) * shape->head_dim;
        task.visible[task.rows] = visible;
        task.out[task.rows++] = results[q];
        if (visible > most) {
            most = visible;
            furthest = row;
        }
    }
    for (int g = 0; g * LANES < most; g++) {
        int64_t position = (int64_t)run * RUN_TOKENS + g * LANES;
        int offset = (int)(position % step->layout.page_tokens);
        uint8_t *head = page_head(&step->layout, page_at(step, furthest, position), job->layer, kv_head);
        task.keys[g] = group_elements(&step->layout, head, KEYS, offset);
        task.values[g] = group_elements(&step->layout, head, VALUES, offset);
        task.key_scales[g] = group_scales(&step->layout, head, KEYS, offset);
        task.value_scales[g] = group_scales(&step->layout, head, VALUES, offset);
    }
    job->program->kernels->attend(&task);
}

/* All runs of a chunk, one after the other. */
static void attend_every_run(const AttentionJob *job, const AttentionChunk *chunk, int kv_head, float *workspace) {
    const ModelShape *shape = &job->program->shape;
    int64_t size = partial_size(shape);
    float *scores = workspace, *states = scores + ATTENTION_ROWS * SCORE_STRIDE, *nexts = states + ATTENTION_ROWS * size;
    float *state[ATTENTION_ROWS], *next[ATTENTION_ROWS];
    int runs = 0;
    for (int q = 0; q < chunk->queries; q++) {
        state[q] = states + q * size;
        next[q] = nexts + q * size;
        int last = job->step->positions[query_row(job, chunk, q)] / RUN_TOKENS + 1;
        if (last > runs) runs = last;
    }
    for (int run = 0; run < runs; run++) {
        attend_run(job, chunk, kv_head, run, scores, run == 0 ? state : next);
        for (int q = 0; run > 0 && q < chunk->queries; q++)
            if (visible_in_run(job->step, query_row(job, chunk, q), run) > 0)
                job->program->kernels->merge(state[q], next[q], shape->head_dim);
    }
    for (int q = 0; q < chunk->queries; q++)
        job->program->kernels->finish(state[q], shape->head_dim,
                                      job->out + query_head(job, chunk, kv_head, q) * shape->head_dim);
}

static void attend_one_run(const AttentionJob *job, const AttentionChunk *chunk, int kv_head, float *workspace) {
    float *results[ATTENTION_ROWS];
    for (int q = 0; q < chunk->queries; q++)
        results[q] = job->partials + (query_head(job, chunk, kv_head, q) * job->plan->max_runs + chunk->run) *
                                         partial_size(&job->program->shape);
    attend_run(job, chunk, kv_head, chunk->run, workspace, results);
}

static void attend_chunks(void *argument, int64_t begin, int64_t end, int worker) {
    const AttentionJob *job = argument;
    float *workspace = job->workspace + worker * attention_workspace_floats(&job->program->shape);
    for (int64_t item = begin; item < end; item++) {
        const AttentionChunk *chunk = job->plan->chunks + item % job->plan->num_chunks;
        int kv_head = (int)(item / job->plan->num_chunks);
        if (chunk->run == EVERY_RUN) attend_every_run(job, chunk, kv_head, workspace);
        else attend_one_run(job, chunk, kv_head, workspace);
    }
}

/* Merges the runs of [row][head] items, computed apart, in ascending order. */
static void merge_runs(void *argument, int64_t begin, int64_t end, int worker) {
    const AttentionJob *job = argument;
    const ModelShape *shape = &job->program->shape;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        int runs = job->step->positions[item / shape->num_heads] / RUN_TOKENS + 1;
        float *state = job->partials + item * job->plan->max_runs * partial_size(shape);
        for (int run = 1; run < runs; run++)
            job->program->kernels->merge(state, state + run * partial_size(shape), shape->head_dim);
        job->program->kernels->finish(state, shape->head_dim, job->out + item * shape->head_dim);
    }
}

void attend_step(const Program *program, Pool *pool, const Step *step, const AttentionPlan *plan, int layer,
                 const float *queries, float *partials, float *workspace, float *out) {
    AttentionJob job = {program, step, plan, layer, queries, partials, workspace, out};
    pool_run(pool, plan->num_chunks * program->shape.num_kv_heads, 1, attend_chunks, &job);
    if (plan->split) pool_run(pool, step->rows * program->shape.num_heads, 32, merge_runs, &job);
}

/* Keys are reduced in runs of 256 positions counted from 0, merged in ascending order. Whether a row's runs
 * are computed one after the other (many rows) or apart and merged later (few rows, so that threads have
 * enough to do, and rows of several contexts that share a page read it once) changes no bit.
 */
#include "attention.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SPLIT_ROWS = 16 }; /* steps of more rows have enough chunks without splitting runs */

/* Positions of the run up to the row's own; 0 or less if there are none. */
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
    const Operation *op;
    const float *queries;
    float *partials, *workspace, *out;
    int64_t items; /* chunks of all KV heads */
    int threads;
} AttentionJob;

/* The first position that a row sees. */
static int64_t first_seen(const AttentionJob *job, int32_t row) {
    int64_t before = (int64_t)job->step->positions[row] + 1 - job->op->window;
    return job->op->window && before > 0 ? before : 0;
}

static int32_t query_row(const AttentionJob *job, const AttentionChunk *chunk, int query) {
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

/* A run of a chunk, for one KV head. */
typedef struct {
    const AttentionChunk *chunk;
    int kv_head, run;
} ChunkRun;

static ChunkRun first_run(const AttentionJob *job, int64_t item) {
    const AttentionChunk *chunk = job->plan->chunks + item % job->plan->num_chunks;
    return (ChunkRun){chunk, (int)(item / job->plan->num_chunks), chunk->run == EVERY_RUN ? 0 : chunk->run};
}

/* Where the page has a group's elements, and its scales if it has any. */
static const uint8_t *stored_group(const AttentionJob *job, const ChunkRun *at, int32_t row, int group, int part,
                                   const float **scales) {
    const PageLayout *layout = &job->step->layout;
    int64_t position = (int64_t)at->run * RUN_TOKENS + group * LANES;
    int offset = (int)(position % layout->page_tokens);
    uint8_t *head = page_head(layout, page_at(job->step, row, position), job->op->layer, at->kv_head);
    *scales = group_scales(layout, head, part, offset);
    return group_elements(layout, head, part, offset);
}

/* Has each group fetch the one that is read NEAR_GROUPS later: of keys, of values or of the next run's keys. */
static void set_ahead(const AttentionJob *job, const ChunkRun *next, int groups, AttentionRun *task) {
    const uint8_t *reads[2 * RUN_GROUPS + NEAR_GROUPS];
    const float *scales;
    int32_t row = query_row(job, next->chunk, 0);
    for (int g = 0; g < groups; g++) {
        reads[g] = task->keys[g];
        reads[groups + g] = task->values[g];
    }
    for (int g = 0; g < NEAR_GROUPS; g++) {
        int there = g * LANES < visible_in_run(job->step, row, next->run);
        reads[2 * groups + g] = there ? stored_group(job, next, row, g, KEYS, &scales) : task->keys[0];
    }
    for (int g = 0; g < groups; g++) {
        task->keys_ahead[g] = reads[g + NEAR_GROUPS];
        task->values_ahead[g] = reads[groups + g + NEAR_GROUPS];
    }
}

/* Attends a run with those queries of the chunk that see it; results[q] receives query q's partial.
 *
 * next: what the thread is likely to attend then
 */
static void attend_run(const AttentionJob *job, const ChunkRun *at, const ChunkRun *next, float *scores,
                       float *const *results) {
    const ModelShape *shape = &job->program->shape;
    const Step *step = job->step;
    AttentionRun task = {.key_format = step->layout.format[KEYS],
                         .value_format = step->layout.format[VALUES],
                         .head_dim = shape->head_dim,
                         .scale = shape->attention_scale,
                         .soft_cap = job->op->soft_cap,
                         .scores = scores};
    int32_t furthest = -1;
    int most = 0;
    for (int q = 0; q < at->chunk->queries; q++) {
        int32_t row = query_row(job, at->chunk, q), visible = visible_in_run(step, row, at->run);
        int64_t first = first_seen(job, row) - (int64_t)at->run * RUN_TOKENS;
        if (visible <= 0 || first >= RUN_TOKENS) continue;
        task.first[task.rows] = first > 0 ? (int)first : 0;
        task.queries[task.rows] = job->queries + query_head(job, at->chunk, at->kv_head, q) * shape->head_dim;
        task.visible[task.rows] = visible;
        task.out[task.rows++] = results[q];
        if (visible > most) {
            most = visible;
            furthest = row;
        }
    }
    if (task.rows == 0) return;
    int groups = (most + LANES - 1) / LANES;
    for (int g = 0; g < groups; g++) {
        task.keys[g] = stored_group(job, at, furthest, g, KEYS, &task.key_scales[g]);
        task.values[g] = stored_group(job, at, furthest, g, VALUES, &task.value_scales[g]);
    }
    set_ahead(job, next, groups, &task);
    job->program->kernels->attend(&task);
}

/* All runs of a chunk, one after the other. */
static void attend_every_run(const AttentionJob *job, const ChunkRun *first, const ChunkRun *next, float *workspace) {
    const AttentionChunk *chunk = first->chunk;
    const ModelShape *shape = &job->program->shape;
    int64_t size = partial_size(shape);
    float *scores = workspace, *states = scores + ATTENTION_ROWS * SCORE_STRIDE, *nexts = states + ATTENTION_ROWS * size;
    float *results[ATTENTION_ROWS];
    int first_runs[ATTENTION_ROWS], begin = INT_MAX, runs = 0;
    for (int q = 0; q < chunk->queries; q++) {
        int32_t row = query_row(job, chunk, q);
        int last = job->step->positions[row] / RUN_TOKENS + 1;
        first_runs[q] = (int)(first_seen(job, row) / RUN_TOKENS);
        if (first_runs[q] < begin) begin = first_runs[q];
        if (last > runs) runs = last;
    }
    for (int run = begin; run < runs; run++) {
        ChunkRun at = {chunk, first->kv_head, run}, after = {chunk, first->kv_head, run + 1};
        for (int q = 0; q < chunk->queries; q++) results[q] = (run == first_runs[q] ? states : nexts) + q * size;
        attend_run(job, &at, run + 1 < runs ? &after : next, scores, results);
        for (int q = 0; q < chunk->queries; q++)
            if (run > first_runs[q] && visible_in_run(job->step, query_row(job, chunk, q), run) > 0)
                job->program->kernels->merge(states + q * size, results[q], shape->head_dim);
    }
    for (int q = 0; q < chunk->queries; q++)
        job->program->kernels->finish(states + q * size, shape->head_dim,
                                      job->out + query_head(job, chunk, first->kv_head, q) * shape->head_dim);
}

static void attend_one_run(const AttentionJob *job, const ChunkRun *at, const ChunkRun *next, float *workspace) {
    float *results[ATTENTION_ROWS];
    for (int q = 0; q < at->chunk->queries; q++)
        results[q] = job->partials + (query_head(job, at->chunk, at->kv_head, q) * job->plan->max_runs + at->run) *
                                         partial_size(&job->program->shape);
    attend_run(job, at, next, workspace, results);
}

static void attend_chunks(void *argument, int64_t begin, int64_t end, int worker) {
    const AttentionJob *job = argument;
    float *workspace = job->workspace + worker * attention_workspace_floats(&job->program->shape);
    for (int64_t item = begin; item < end; item++) {
        int64_t following = item + 1 < end ? item + 1 : item + job->threads; /* each thread takes an item meanwhile */
        ChunkRun at = first_run(job, item), next = first_run(job, following < job->items ? following : item);
        if (at.chunk->run == EVERY_RUN) attend_every_run(job, &at, &next, workspace);
        else attend_one_run(job, &at, &next, workspace);
    }
}

/* Merges the runs of [row][head] items, computed apart, in ascending order. */
static void merge_runs(void *argument, int64_t begin, int64_t end, int worker) {
    const AttentionJob *job = argument;
    const ModelShape *shape = &job->program->shape;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        int32_t row = (int32_t)(item / shape->num_heads);
        int64_t first = first_seen(job, row) / RUN_TOKENS, last = job->step->positions[row] / RUN_TOKENS;
        float *state = job->partials + (item * job->plan->max_runs + first) * partial_size(shape);
        for (int64_t run = first + 1; run <= last; run++)
            job->program->kernels->merge(state, state + (run - first) * partial_size(shape), shape->head_dim);
        job->program->kernels->finish(state, shape->head_dim, job->out + item * shape->head_dim);
    }
}

void attend_step(const Program *program, Pool *pool, const Step *step, const AttentionPlan *plan, const Operation *op,
                 const float *queries, float *partials, float *workspace, float *out) {
    AttentionJob job = {program, step, plan, op, queries, partials, workspace, out,
                        plan->num_chunks * program->shape.num_kv_heads, pool_threads(pool)};
    pool_run(pool, job.items, 1, attend_chunks, &job);
    if (plan->split) pool_run(pool, step->rows * program->shape.num_heads, 32, merge_runs, &job);
}

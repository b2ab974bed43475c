#include "scratch.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64, SERIAL_ROWS = 4 };

void *allocate(size_t bytes) {
    size_t rounded = (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT;
    void *memory = aligned_alloc(ALIGNMENT, rounded);
    if (memory) memset(memory, 0, rounded);
    return memory;
}

static void free_buffers(Scratch *s) {
    void *buffers[] = {s->stream, s->inputs, s->projected[0], s->projected[1], s->keys, s->values, s->attended,
                       s->cosines, s->sines, s->blocks[0], s->blocks[1], s->workspace, s->partials};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) free(buffers[i]);
    AttentionPlan plan = s->plan;
    memset(s, 0, sizeof *s);
    s->plan = plan;
}

void scratch_free(Scratch *scratch) {
    if (!scratch) return;
    free_buffers(scratch);
    plan_free(&scratch->plan);
    free(scratch);
}

/* Longest row that any matrix of the program reads or writes, logits apart. */
static int64_t widest_row(const Program *program) {
    int64_t widest = program->shape.hidden, queries = (int64_t)program->shape.num_heads * program->shape.head_dim;
    if (queries > widest) widest = queries;
    for (int i = 0; i < program->num_operations; i++)
        for (int part = 0; part < MAX_PARTS; part++) {
            const Matrix *w = program->operations[i].weights + part;
            if (w->columns > widest) widest = w->columns;
            if (program->operations[i].kind != EMBED && program->operations[i].kind != LOGITS && w->rows > widest)
                widest = w->rows;
        }
    return widest;
}

int needs_span(const Matrix *weights, int parts, int span) {
    for (int part = 0; part < parts; part++)
        if (weights[part].data && is_quantized(weights[part].format) && span_index(weights[part].format) == span)
            return 1;
    return 0;
}

static int program_needs_span(const Program *program, int span) {
    for (int i = 0; i < program->num_operations; i++)
        if (program->operations[i].kind != EMBED && needs_span(program->operations[i].weights, MAX_PARTS, span)) return 1;
    return 0;
}

int scratch_grow(Program *program, int64_t rows, int threads) {
    if (!program->scratch) program->scratch = calloc(1, sizeof *program->scratch);
    Scratch *s = program->scratch;
    if (!s) return -1;
    if (rows <= s->rows && threads <= s->threads) return 0;
    if (rows < s->rows) rows = s->rows;
    if (threads < s->threads) threads = s->threads;
    const ModelShape *shape = &program->shape;
    int64_t widest = widest_row(program);
    size_t padded = (size_t)(rows + ROW_PADDING), wide = padded * (size_t)widest * sizeof(float);
    size_t kv = padded * (size_t)(shape->num_kv_heads * shape->head_dim) * sizeof(float);
    size_t rope = (size_t)shape->num_ropes * padded * (size_t)(shape->rope_dim / 2 + 1) * sizeof(float);
    free_buffers(s);
    s->stream = allocate(padded * (size_t)shape->hidden * sizeof(float));
    s->inputs = allocate(wide);
    s->projected[0] = allocate(wide);
    s->projected[1] = allocate(wide);
    s->keys = allocate(kv);
    s->values = allocate(kv);
    s->attended = allocate(padded * (size_t)(shape->num_heads * shape->head_dim) * sizeof(float));
    s->cosines = allocate(rope);
    s->sines = allocate(rope);
    int missing = 0;
    for (int span = 0; span < SPANS; span++) {
        if (!program_needs_span(program, span)) continue;
        s->blocks[span] = allocate(padded * (size_t)(widest / BLOCK + 1) * 2 * sizeof(ActivationBlock));
        missing |= !s->blocks[span];
    }
    s->workspace = allocate((size_t)threads * (size_t)attention_workspace_floats(shape) * sizeof(float));
    if (!s->stream || !s->inputs || !s->projected[0] || !s->projected[1] || !s->keys || !s->values || !s->attended ||
        !s->cosines || !s->sines || missing || !s->workspace) {
        free_buffers(s);
        return -1;
    }
    s->rows = rows;
    s->threads = threads;
    return 0;
}

int scratch_plan(Run *run) {
    Scratch *s = run->scratch;
    const ModelShape *shape = &run->program->shape;
    if (plan_attention(&s->plan, shape, run->step)) return -1;
    int64_t floats = partial_floats(&s->plan, shape, run->step);
    if (floats <= s->partial_capacity) return 0;
    free(s->partials);
    s->partials = allocate((size_t)floats * sizeof(float));
    s->partial_capacity = s->partials ? floats : 0;
    return s->partials ? 0 : -1;
}

void for_rows(Run *run, int64_t rows, PoolTask task, void *argument) {
    if (rows <= SERIAL_ROWS) task(argument, 0, rows, 0);
    else pool_run(run->pool, rows, 1, task, argument);
}

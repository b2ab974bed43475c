/* Runs a program: every operation is a few jobs for the thread pool, split by output rows or by step rows. */
#include "program.h"

#include <fenv.h>

#include "fixed_math.h"
#include "products.h"

/* --- rotary embedding ---------------------------------------------------------------------------------- */

static void rope_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const Run *run = argument;
    const ModelShape *shape = &run->program->shape;
    int half = shape->rope_dim / 2;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        for (int i = 0; i < half; i++) {
            double sine, cosine;
            fixed_sincos(run->step->positions[row] * shape->rope_inverse[i], &sine, &cosine);
            run->scratch->sines[row * half + i] = (float)(sine * shape->rope_magnitude);
            run->scratch->cosines[row * half + i] = (float)(cosine * shape->rope_magnitude);
        }
}

static void rotate(const ModelShape *shape, const float *cosines, const float *sines, float *head) {
    int half = shape->rope_dim / 2, step = shape->rope_interleaved ? 2 : 1;
    int partner = shape->rope_interleaved ? 1 : half;
    for (int i = 0; i < half; i++) {
        float a = head[i * step], b = head[i * step + partner];
        head[i * step] = a * cosines[i] - b * sines[i];
        head[i * step + partner] = a * sines[i] + b * cosines[i];
    }
}

/* --- operations ---------------------------------------------------------------------------------------- */

typedef struct {
    Run *run;
    const Operation *operation;
} OperationJob;

static void embed_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const OperationJob *job = argument;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        dequantize_row(job->operation->weights, job->run->step->tokens[row],
                       job->run->scratch->stream + row * job->run->program->shape.hidden);
}

static void add_bias(float *x, const float *bias, int64_t count) {
    for (int64_t i = 0; bias && i < count; i++) x[i] += bias[i];
}

/* Stores a row's keys and values in its page. */
static void write_row(const Step *step, int64_t row, int layer, const float *keys, const float *values) {
    const PageLayout *layout = &step->layout;
    const float *parts[KV_PARTS] = {[KEYS] = keys, [VALUES] = values};
    uint8_t vector[MAX_HEAD_DIM * sizeof(float) + sizeof(float)];
    int64_t position = step->positions[row];
    uint8_t *page = page_at(step, row, position);
    for (int h = 0; h < layout->kv_heads; h++)
        for (int part = KEYS; part <= VALUES; part++) {
            encode_vector(layout->format[part], parts[part] + h * layout->head_dim, layout->head_dim, vector);
            store_vector(layout, page_head(layout, page, layer, h), part, (int)(position % layout->page_tokens), vector);
        }
}

/* Bias and rotation of a row's queries and keys; keys and values into the page, if they are to be written. */
static void finish_input_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const OperationJob *job = argument;
    const Operation *op = job->operation;
    const Step *step = job->run->step;
    Scratch *s = job->run->scratch;
    const ModelShape *shape = &job->run->program->shape;
    int head_dim = shape->head_dim, half = shape->rope_dim / 2, query_dim = shape->num_heads * head_dim;
    int kv_dim = shape->num_kv_heads * head_dim;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const float *cosines = s->cosines + row * half, *sines = s->sines + row * half;
        float *queries = s->projected[0] + row * query_dim, *keys = s->keys + row * kv_dim;
        float *values = s->values + row * kv_dim;
        add_bias(queries, op->bias[QUERY], query_dim);
        add_bias(keys, op->bias[KEY], kv_dim);
        add_bias(values, op->bias[VALUE], kv_dim);
        for (int h = 0; h < shape->num_heads; h++) rotate(shape, cosines, sines, queries + h * head_dim);
        for (int h = 0; h < shape->num_kv_heads; h++) rotate(shape, cosines, sines, keys + h * head_dim);
        if (step->writes[row]) write_row(step, row, op->layer, keys, values);
    }
}

static void attention_input(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 3, 2);
    MatmulJob product = {run, 3, op->weights, &x, {s->projected[0], s->keys, s->values}, NULL, 0};
    run_matmul(&product);
    OperationJob rest = {run, op};
    for_rows(run, run->step->rows, finish_input_rows, &rest);
}

/* stream += weights . source */
static void project_to_stream(Run *run, const Matrix *weights, const float *source) {
    Activations x = prepare(run, source, NULL, run->step->rows, NULL, weights, 1, 1);
    MatmulJob product = {run, 1, weights, &x, {run->scratch->projected[1]}, run->scratch->stream, 0};
    run_matmul(&product);
}

static void feed_forward(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 2, 1);
    MatmulJob product = {run, 2, op->weights, &x, {s->projected[0], s->projected[1]}, NULL, 1};
    run_matmul(&product);
    project_to_stream(run, op->weights + DOWN, s->projected[0]);
}

static void logits(Run *run, const Operation *op) {
    if (run->step->num_logit_rows == 0) return;
    Activations x = prepare(run, run->scratch->stream, run->step->logit_rows, run->step->num_logit_rows, op,
                            op->weights, 1, 2);
    MatmulJob product = {run, 1, op->weights, &x, {run->step->logits}, NULL, 0};
    run_matmul(&product);
}

static void run_operation(Run *run, const Operation *op) {
    OperationJob rows = {run, op};
    Scratch *s = run->scratch;
    switch (op->kind) {
    case EMBED: for_rows(run, run->step->rows, embed_rows, &rows); break;
    case ATTENTION_INPUT: attention_input(run, op); break;
    case ATTENTION:
        attend_step(run->program, run->pool, run->step, &s->plan, op->layer, s->projected[0], s->partials, s->workspace,
                    s->attended);
        break;
    case ATTENTION_OUTPUT: project_to_stream(run, op->weights, s->attended); break;
    case FEED_FORWARD: feed_forward(run, op); break;
    case LOGITS: logits(run, op); break;
    }
}

StepResult program_run(Program *program, Pool *pool, const Step *step) {
    if (scratch_grow(program, step->rows, pool_threads(pool))) return STEP_NO_MEMORY;
    Run run = {program, pool, step, program->scratch};
    if (scratch_plan(&run)) return STEP_NO_MEMORY;
    StepResult result = STEP_DONE;
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    for_rows(&run, step->rows, rope_rows, &run);
    for (int i = 0; i < program->num_operations; i++) {
        if (step->control[0]) {
            result = STEP_CANCELLED;
            break;
        }
        run_operation(&run, program->operations + i);
        step->control[1] = i + 1;
    }
    fesetenv(&callers);
    return result;
}

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
    for (int rope = 0; rope < shape->num_ropes; rope++)
        for (int64_t row = begin; row < end; row++)
            for (int i = 0; i < half; i++) {
                double sine, cosine, magnitude = shape->rope_magnitude[rope];
                int64_t at = (rope * run->step->rows + row) * half + i;
                fixed_sincos(run->step->positions[row] * shape->rope_inverse[rope * half + i], &sine, &cosine);
                run->scratch->sines[at] = (float)(sine * magnitude);
                run->scratch->cosines[at] = (float)(cosine * magnitude);
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
    int64_t hidden = job->run->program->shape.hidden;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        float *x = job->run->scratch->stream + row * hidden;
        dequantize_row(job->operation->weights, job->run->step->tokens[row], x);
        for (int64_t i = 0; i < hidden; i++) x[i] *= job->operation->scale;
    }
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

/* Norm, if there is one, and rotation of each of a row's heads. */
static void finish_heads(const KernelSet *kernels, const ModelShape *shape, const Operation *op, int part, int heads,
                         const float *cosines, const float *sines, float *head) {
    for (int h = 0; h < heads; h++, head += shape->head_dim) {
        if (op->head_norm[part]) kernels->rms_norm(head, op->head_norm[part], shape->head_dim, op->eps, head);
        rotate(shape, cosines, sines, head);
    }
}

/* Bias, norm and rotation of a row's queries and keys; keys and values into the page, if they are to be written. */
static void finish_input_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const OperationJob *job = argument;
    const Operation *op = job->operation;
    const Step *step = job->run->step;
    Scratch *s = job->run->scratch;
    const ModelShape *shape = &job->run->program->shape;
    int head_dim = shape->head_dim, half = shape->rope_dim / 2, query_dim = shape->num_heads * head_dim;
    int kv_dim = shape->num_kv_heads * head_dim;
    const KernelSet *kernels = job->run->program->kernels;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        int64_t turns = (op->rope * step->rows + row) * half;
        const float *cosines = s->cosines + turns, *sines = s->sines + turns;
        float *queries = s->projected[0] + row * query_dim, *keys = s->keys + row * kv_dim;
        float *values = s->values + row * kv_dim;
        add_bias(queries, op->bias[QUERY], query_dim);
        add_bias(keys, op->bias[KEY], kv_dim);
        add_bias(values, op->bias[VALUE], kv_dim);
        finish_heads(kernels, shape, op, QUERY, shape->num_heads, cosines, sines, queries);
        finish_heads(kernels, shape, op, KEY, shape->num_kv_heads, cosines, sines, keys);
        if (step->writes[row]) write_row(step, row, op->layer, keys, values);
    }
}

static void attention_input(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 3, 2);
    MatmulJob product = {run, 3, op->weights, &x, {s->projected[0], s->keys, s->values}, NULL, NULL};
    run_matmul(&product);
    OperationJob rest = {run, op};
    for_rows(run, run->step->rows, finish_input_rows, &rest);
}

static void add_normed_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const OperationJob *job = argument;
    const Program *program = job->run->program;
    int64_t hidden = program->shape.hidden;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        float *y = job->run->scratch->projected[1] + row * hidden, *stream = job->run->scratch->stream + row * hidden;
        program->kernels->rms_norm(y, job->operation->post_norm, hidden, job->operation->post_eps, y);
        for (int64_t i = 0; i < hidden; i++) stream[i] += y[i];
    }
}

/* stream += weights . source, normed if the operation has a norm for it */
static void project_to_stream(Run *run, const Operation *op, const Matrix *weights, const float *source) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, source, NULL, run->step->rows, NULL, weights, 1, 1);
    MatmulJob product = {run, 1, weights, &x, {s->projected[1]}, op->post_norm ? NULL : s->stream, NULL};
    run_matmul(&product);
    OperationJob rest = {run, op};
    if (op->post_norm) for_rows(run, run->step->rows, add_normed_rows, &rest);
}

static void feed_forward(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 2, 1);
    MatmulJob product = {run, 2, op->weights, &x, {s->projected[0], s->projected[1]}, NULL, op->gate};
    run_matmul(&product);
    project_to_stream(run, op, op->weights + DOWN, s->projected[0]);
}

static void cap_logit_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const OperationJob *job = argument;
    const Program *program = job->run->program;
    int64_t vocab = program->shape.vocab;
    (void)worker;
    for (int64_t row = begin; row < end; row++)
        program->kernels->soft_cap(job->run->step->logits + row * vocab, vocab, job->operation->soft_cap);
}

static void logits(Run *run, const Operation *op) {
    if (run->step->num_logit_rows == 0) return;
    Activations x = prepare(run, run->scratch->stream, run->step->logit_rows, run->step->num_logit_rows, op,
                            op->weights, 1, 2);
    MatmulJob product = {run, 1, op->weights, &x, {run->step->logits}, NULL, NULL};
    run_matmul(&product);
    OperationJob rest = {run, op};
    if (op->soft_cap > 0.0f) for_rows(run, run->step->num_logit_rows, cap_logit_rows, &rest);
}

static void run_operation(Run *run, const Operation *op) {
    OperationJob rows = {run, op};
    Scratch *s = run->scratch;
    switch (op->kind) {
    case EMBED: for_rows(run, run->step->rows, embed_rows, &rows); break;
    case ATTENTION_INPUT: attention_input(run, op); break;
    case ATTENTION:
        attend_step(run->program, run->pool, run->step, &s->plan, op, s->projected[0], s->partials, s->workspace,
                    s->attended);
        break;
    case ATTENTION_OUTPUT: project_to_stream(run, op, op->weights, s->attended); break;
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

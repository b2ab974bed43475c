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

/* Stores a head's keys or values of a row in its page. */
static void write_vector(const Step *step, int64_t row, int layer, int part, int head, const float *x) {
    const PageLayout *layout = &step->layout;
    uint8_t vector[MAX_HEAD_DIM * sizeof(float) + sizeof(float)];
    int64_t position = step->positions[row];
    encode_vector(layout->format[part], x, layout->head_dim, vector);
    store_vector(layout, page_head(layout, page_at(step, row, position), layer, head), part,
                 (int)(position % layout->page_tokens), vector);
}

/* Bias, norm and rotation of a row's head of queries, keys or values. */
static void finish_head(const Run *run, const Operation *op, int part, int64_t row, int64_t first, float *x) {
    const ModelShape *shape = &run->program->shape;
    int64_t turns = (op->rope * run->step->rows + row) * (shape->rope_dim / 2);
    for (int i = 0; op->bias[part] && i < shape->head_dim; i++) x[i] += op->bias[part][first + i];
    if (part == VALUE) return;
    if (op->head_norm[part]) run->program->kernels->rms_norm(x, op->head_norm[part], shape->head_dim, op->eps, x);
    rotate(shape, run->scratch->cosines + turns, run->scratch->sines + turns, x);
}

/* Finishes heads; keys and values go into the page, if they are to be written. */
static void finish_heads(const MatmulJob *job, int part, int64_t first, int64_t count) {
    const Step *step = job->run->step;
    int head_dim = job->run->program->shape.head_dim;
    for (int64_t row = 0; row < step->rows; row++)
        for (int64_t at = first; at < first + count; at += head_dim) {
            float *x = job->out[part] + row * job->weights[part].rows + at;
            finish_head(job->run, job->op, part, row, at, x);
            if (part != QUERY && step->writes[row])
                write_vector(step, row, job->op->layer, part == KEY ? KEYS : VALUES, (int)(at / head_dim), x);
        }
}

static void attention_input(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 3, 2);
    run_matmul(&(MatmulJob){.run = run, .op = op, .x = &x, .parts = 3, .weights = op->weights,
                            .out = {s->projected[0], s->keys, s->values}, .finish = finish_heads,
                            .unit = run->program->shape.head_dim / LANES});
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

static void add_to_stream(const MatmulJob *job, int part, int64_t first, int64_t count) {
    int64_t hidden = job->weights[part].rows;
    for (int64_t row = 0; row < job->x->rows; row++)
        for (int64_t i = row * hidden + first; i < row * hidden + first + count; i++)
            job->run->scratch->stream[i] += job->out[part][i];
}

/* stream += weights . source, normed if the operation has a norm for it */
static void project_to_stream(Run *run, const Operation *op, const Matrix *weights, const float *source) {
    Activations x = prepare(run, source, NULL, run->step->rows, NULL, weights, 1, 1);
    run_matmul(&(MatmulJob){.run = run, .op = op, .x = &x, .parts = 1, .weights = weights,
                            .out = {run->scratch->projected[1]}, .finish = op->post_norm ? NULL : add_to_stream,
                            .unit = 1});
    OperationJob rest = {run, op};
    if (op->post_norm) for_rows(run, run->step->rows, add_normed_rows, &rest);
}

/* Multiplies the same outputs of UP, and gates. */
static void gate_outputs(const MatmulJob *job, int part, int64_t first, int64_t count) {
    const Matrix *up = job->weights + UP;
    float *gates = job->out[part], *ups = job->out[UP];
    job->run->program->kernels->matmul(up, job->x, ups, up->rows, first / LANES, (first + count + LANES - 1) / LANES);
    for (int64_t at = first; at < job->x->rows * up->rows; at += up->rows) job->op->gate(gates + at, ups + at, count);
}

static void feed_forward(Run *run, const Operation *op) {
    Scratch *s = run->scratch;
    Activations x = prepare(run, s->stream, NULL, run->step->rows, op, op->weights, 2, 1);
    run_matmul(&(MatmulJob){.run = run, .op = op, .x = &x, .parts = 1, .weights = op->weights,
                            .out = {s->projected[0], s->projected[1]}, .finish = gate_outputs, .unit = 1});
    project_to_stream(run, op, op->weights + DOWN, s->projected[0]);
}

static void cap_logits(const MatmulJob *job, int part, int64_t first, int64_t count) {
    int64_t vocab = job->weights[part].rows;
    for (int64_t at = first; at < job->x->rows * vocab; at += vocab)
        job->run->program->kernels->soft_cap(job->out[part] + at, count, job->op->soft_cap);
}

static void logits(Run *run, const Operation *op) {
    if (run->step->num_logit_rows == 0) return;
    Activations x = prepare(run, run->scratch->stream, run->step->logit_rows, run->step->num_logit_rows, op,
                            op->weights, 1, 2);
    run_matmul(&(MatmulJob){.run = run, .op = op, .x = &x, .parts = 1, .weights = op->weights,
                            .out = {run->step->logits}, .finish = op->soft_cap > 0.0f ? cap_logits : NULL, .unit = 1});
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

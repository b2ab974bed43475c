/* Runs a program: every operation is a few jobs for the thread pool, split by output rows or by step rows. */
#include "program.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "fixed_math.h"

enum { ROW_PADDING = 16, ALIGNMENT = 64, SERIAL_ROWS = 4 };

/* Buffers of one run, kept between runs and grown when a step has more rows. */
struct Scratch {
    int64_t rows; /* capacity */
    int threads;
    int64_t partial_capacity;
    float *stream;            /* residual stream, [rows][hidden] */
    float *inputs;            /* normed rows, [rows][widest] */
    float *projected[2];      /* [rows][widest]: queries or gate; up or a product before the residual */
    float *keys, *values;     /* [rows][num_kv_heads][head_dim] */
    float *attended;          /* [rows][num_heads * head_dim] */
    float *cosines, *sines;   /* [rows][rope_dim / 2] */
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

static void *allocate(size_t bytes) {
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

/* Whether a quantised matrix reads activations of that kind. */
static int needs_span(const Matrix *weights, int parts, int span) {
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

static int grow_scratch(Program *program, int64_t rows, int threads) {
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
    size_t rope = padded * (size_t)(shape->rope_dim / 2 + 1) * sizeof(float);
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

static int plan_step(Run *run) {
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

/* Jobs over step rows: a few rows cost less than waking the other threads. */
static void for_rows(Run *run, int64_t rows, PoolTask task, void *argument) {
    if (rows <= SERIAL_ROWS) task(argument, 0, rows, 0);
    else pool_run(run->pool, rows, (rows + 8 * pool_threads(run->pool) - 1) / (8 * pool_threads(run->pool)), task, argument);
}

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

/* --- matrix products ----------------------------------------------------------------------------------- */

/* Quantises one row into its place in the tiles. */
static void quantize_row(const KernelSet *kernels, const Activations *x, int span, const float *values, int64_t row) {
    int64_t tile = kernels->tile_columns, first = row / tile * tile, slices = x->columns / BLOCK * x->planes;
    int width = kernels->tile_width(x->rows - first < tile ? x->rows - first : tile);
    kernels->quantize(values, x->columns, x->planes, span ? SUPERBLOCK : BLOCK,
                      x->blocks[span] + first * slices + (row - first), width);
}

/* Zeroes the rows that fill up the last tile. */
static void clear_padding(const KernelSet *kernels, const Activations *x, int span) {
    int64_t tile = kernels->tile_columns, first = (x->rows - 1) / tile * tile;
    int64_t width = kernels->tile_width(x->rows - first), slices = x->columns / BLOCK * x->planes;
    for (int64_t slice = 0; slice < slices; slice++)
        for (int64_t pad = x->rows - first; pad < width; pad++)
            memset(x->blocks[span] + first * slices + slice * width + pad, 0, sizeof(ActivationBlock));
}

typedef struct {
    Run *run;
    const float *source; /* [rows][columns] */
    const int32_t *pick; /* which rows of source, or NULL for all */
    const Operation *norm; /* its norm and eps, or NULL */
    int quantize[SPANS];
    const Activations *out;
} PrepareJob;

static void prepare_rows(void *argument, int64_t begin, int64_t end, int worker) {
    const PrepareJob *job = argument;
    const KernelSet *kernels = job->run->program->kernels;
    int64_t columns = job->out->columns;
    (void)worker;
    for (int64_t row = begin; row < end; row++) {
        const float *x = job->source + (job->pick ? job->pick[row] : row) * columns;
        if (job->norm) {
            float *normed = job->run->scratch->inputs + row * columns;
            kernels->rms_norm(x, job->norm->norm, columns, job->norm->eps, normed);
            x = normed;
        }
        for (int span = 0; span < SPANS; span++)
            if (job->quantize[span]) quantize_row(kernels, job->out, span, x, row);
    }
}

/* Rows ready for a matrix product: normed if asked, quantised as the matrices need it. */
static Activations prepare(Run *run, const float *source, const int32_t *pick, int64_t rows, const Operation *norm,
                           const Matrix *weights, int parts, int planes) {
    Scratch *s = run->scratch;
    Activations x = {.rows = rows, .columns = weights->columns, .planes = planes,
                     .blocks = {s->blocks[0], s->blocks[1]}, .values = norm ? s->inputs : source};
    PrepareJob job = {run, source, pick, norm, {0}, &x};
    for (int span = 0; span < SPANS; span++) {
        job.quantize[span] = needs_span(weights, parts, span);
        if (job.quantize[span]) clear_padding(run->program->kernels, &x, span);
    }
    for_rows(run, rows, prepare_rows, &job);
    return x;
}

int multiply(const KernelSet *kernels, const Matrix *weights, int planes, const float *x, int64_t n, float *out) {
    int64_t padded = n + ROW_PADDING, columns = weights->columns;
    float *values = allocate((size_t)(padded * columns) * sizeof *values);
    ActivationBlock *blocks = allocate((size_t)(padded * (columns / BLOCK + 1) * planes) * sizeof *blocks);
    if (values && blocks) {
        Activations activations = {n, columns, planes, values, {blocks, blocks}};
        int span = span_index(weights->format);
        memcpy(values, x, (size_t)(n * columns) * sizeof *values);
        if (is_quantized(weights->format)) {
            clear_padding(kernels, &activations, span);
            for (int64_t row = 0; row < n; row++)
                quantize_row(kernels, &activations, span, values + row * columns, row);
        }
        kernels->matmul(weights, &activations, out, weights->rows, 0, (weights->rows + LANES - 1) / LANES);
    }
    int result = values && blocks ? 0 : -1;
    free(values);
    free(blocks);
    return result;
}

typedef struct {
    Run *run;
    int parts;
    const Matrix *weights;
    const Activations *x;
    float *out[MAX_PARTS]; /* each [rows][rows of its matrix] */
    float *residual;       /* added to by part 0, or NULL */
    int gated;             /* parts are gate and up: out[0] = silu(gate) * up */
} MatmulJob;

enum { ITEM_GROUPS = 2 }; /* groups of 16 output rows in one item */

static int64_t matmul_items(const Matrix *w) {
    return (w->rows + ITEM_GROUPS * LANES - 1) / (ITEM_GROUPS * LANES);
}

static void matmul_item(const MatmulJob *job, int part, int64_t item) {
    const KernelSet *kernels = job->run->program->kernels;
    const Matrix *w = job->weights + part;
    int64_t groups = (w->rows + LANES - 1) / LANES, first = item * ITEM_GROUPS;
    int64_t end = first + ITEM_GROUPS < groups ? first + ITEM_GROUPS : groups;
    kernels->matmul(w, job->x, job->out[part], w->rows, first, end);
    int64_t row = first * LANES, count = (end * LANES < w->rows ? end * LANES : w->rows) - row;
    if (job->gated) {
        kernels->matmul(w + 1, job->x, job->out[1], w->rows, first, end);
        for (int64_t a = 0; a < job->x->rows; a++)
            kernels->silu_mul(job->out[0] + a * w->rows + row, job->out[1] + a * w->rows + row, count);
    }
    if (job->residual)
        for (int64_t a = 0; a < job->x->rows; a++)
            for (int64_t i = a * w->rows + row; i < a * w->rows + row + count; i++) job->residual[i] += job->out[0][i];
}

static void matmul_items_task(void *argument, int64_t begin, int64_t end, int worker) {
    const MatmulJob *job = argument;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        int64_t local = item;
        int part = 0;
        while (local >= matmul_items(job->weights + part)) local -= matmul_items(job->weights + part++);
        matmul_item(job, part, local);
    }
}

static void run_matmul(MatmulJob *job) {
    int64_t items = 0, claims = 8 * pool_threads(job->run->pool);
    for (int part = 0; part < (job->gated ? 1 : job->parts); part++) items += matmul_items(job->weights + part);
    pool_run(job->run->pool, items, items / claims + 1, matmul_items_task, job);
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
    if (grow_scratch(program, step->rows, pool_threads(pool))) return STEP_NO_MEMORY;
    Run run = {program, pool, step, program->scratch};
    if (plan_step(&run)) return STEP_NO_MEMORY;
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

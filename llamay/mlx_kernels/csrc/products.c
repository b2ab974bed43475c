/* Rows are quantised once for all matrices that read them; groups of output rows are shared out among threads. */
#include "products.h"

#include <stdlib.h>
#include <string.h>

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

Activations prepare(Run *run, const float *source, const int32_t *pick, int64_t rows, const Operation *norm,
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
    if (job->gate) {
        kernels->matmul(w + 1, job->x, job->out[1], w->rows, first, end);
        for (int64_t a = 0; a < job->x->rows; a++)
            job->gate(job->out[0] + a * w->rows + row, job->out[1] + a * w->rows + row, count);
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

void run_matmul(MatmulJob *job) {
    int64_t items = 0, claims = 8 * pool_threads(job->run->pool);
    for (int part = 0; part < (job->gate ? 1 : job->parts); part++) items += matmul_items(job->weights + part);
    pool_run(job->run->pool, items, items / claims + 1, matmul_items_task, job);
}

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

enum { CLAIM_PRODUCTS = 1 << 17 }; /* what one claim has at least, if that leaves every thread two claims */

static int64_t groups_of(const Matrix *w) { return (w->rows + LANES - 1) / LANES; }

static int64_t units_of(const MatmulJob *job, int part) {
    return (groups_of(job->weights + part) + job->unit - 1) / job->unit;
}

/* Units [begin, end) of a part. */
static void multiply_units(const MatmulJob *job, int part, int64_t begin, int64_t end) {
    const Matrix *w = job->weights + part;
    int64_t first = begin * job->unit, last = end * job->unit;
    if (last > groups_of(w)) last = groups_of(w);
    job->run->program->kernels->matmul(w, job->x, job->out[part], w->rows, first, last);
    if (!job->finish) return;
    int64_t row = first * LANES, row_end = last * LANES < w->rows ? last * LANES : w->rows;
    job->finish(job, part, row, row_end - row);
}

/* Units [begin, end), counted through all parts. */
static void matmul_task(void *argument, int64_t begin, int64_t end, int worker) {
    const MatmulJob *job = argument;
    (void)worker;
    for (int part = 0; begin < end; part++) {
        int64_t units = units_of(job, part);
        if (begin < units) multiply_units(job, part, begin, end < units ? end : units);
        begin = begin < units ? 0 : begin - units;
        end -= units;
    }
}

void run_matmul(MatmulJob *job) {
    int64_t units = 0, unit_products = job->unit * LANES * job->x->columns * job->x->rows;
    for (int part = 0; part < job->parts; part++) units += units_of(job, part);
    int64_t grain = CLAIM_PRODUCTS / unit_products + 1, most = units / (2 * pool_threads(job->run->pool));
    pool_run(job->run->pool, units, grain < most ? grain : most > 1 ? most : 1, matmul_task, job);
}

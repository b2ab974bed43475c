/* Matrix products of a step's rows. */
#ifndef LLAMAY_PRODUCTS_H
#define LLAMAY_PRODUCTS_H

#include "scratch.h"

/* Rows ready for a matrix product: normed if asked, quantised as the matrices need it. */
Activations prepare(Run *run, const float *source, const int32_t *pick, int64_t rows, const Operation *norm,
                    const Matrix *weights, int parts, int planes);

/* A product of rows with one matrix or several. */
typedef struct MatmulJob {
    Run *run;
    const Operation *op;
    const Activations *x;
    int parts; /* that are claimed; `finish` may multiply others */
    const Matrix *weights;
    float *out[MAX_PARTS]; /* each [rows][rows of its matrix] */

    /* If set, what is done to outputs [first, first + count) of a part, of all rows, while they are near: a multiple of
     * `unit` groups of 16, or what is left of the part.
     */
    void (*finish)(const struct MatmulJob *job, int part, int64_t first, int64_t count);
    int unit;
} MatmulJob;

/* out[part] = x . weights[part], finished, on all threads. */
void run_matmul(MatmulJob *job);

/* out[n][rows] = x[n][columns] . weights; one thread. 0, or -1 without memory. */
int multiply(const KernelSet *kernels, const Matrix *weights, int planes, const float *x, int64_t n, float *out);

#endif

/* Matrix products of a step's rows. */
#ifndef LLAMAY_PRODUCTS_H
#define LLAMAY_PRODUCTS_H

#include "scratch.h"

/* Rows ready for a matrix product: normed if asked, quantised as the matrices need it. */
Activations prepare(Run *run, const float *source, const int32_t *pick, int64_t rows, const Operation *norm,
                    const Matrix *weights, int parts, int planes);

typedef struct {
    Run *run;
    int parts;
    const Matrix *weights;
    const Activations *x;
    float *out[MAX_PARTS]; /* each [rows][rows of its matrix] */
    float *residual;       /* added to by part 0, or NULL */
    GateKernel gate;       /* if set, parts are gate and up, and out[0] what it makes of them */
} MatmulJob;

/* out[part] = x . weights[part], on all threads. */
void run_matmul(MatmulJob *job);

/* out[n][rows] = x[n][columns] . weights; one thread. 0, or -1 without memory. */
int multiply(const KernelSet *kernels, const Matrix *weights, int planes, const float *x, int64_t n, float *out);

#endif

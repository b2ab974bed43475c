/* Choosing a token from logits; every sum in a fixed order, so the same logits give the same token anywhere. */
#ifndef LLAMAY_SAMPLE_H
#define LLAMAY_SAMPLE_H

#include <stdint.h>

#include "kernels.h"

typedef struct {
    double temperature; /* > 0 */
    int64_t top_k;      /* 0 keeps all */
    double top_p;       /* 1 keeps all */
    double min_p;       /* 0 keeps all */
    double uniform;     /* in [0, 1) */
} SampleOptions;

/* log(sum(exp(logits))). weights: scratch, [count]. */
double log_sum_exp(const KernelSet *kernels, const float *logits, int64_t count, float *weights);

/* Index of the token chosen: of the logits ordered by value, ties to the lower id, top_k keeps a prefix, then top_p
 * the shortest prefix whose share of what is left reaches it, then min_p those at least that share of the largest;
 * from these one is drawn with weights exp(logit / temperature). weights and order: scratch, [count].
 */
int64_t sample_token(const KernelSet *kernels, const float *logits, int64_t count, const SampleOptions *options,
                     float *weights, int32_t *order);

#endif

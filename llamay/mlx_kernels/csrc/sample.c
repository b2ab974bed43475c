/* Candidates come off a heap in order, so only as many are sorted as the filters keep; a small top_k needs no heap. */
#include "sample.h"

#include <stdlib.h>

#include "fixed_math.h"

#define FEW 256 /* largest top_k that is found in one pass */

static int comes_before(const float *logits, int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
}

static void sift_down(const float *logits, int32_t *heap, int64_t size, int64_t at) {
    int32_t moving = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && comes_before(logits, heap[child + 1], heap[child])) child++;
        if (!comes_before(logits, heap[child], moving)) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

/* Moves the first of the heap's candidates to its end, so that popped ones stand at the back in reverse order. */
static int32_t pop(const float *logits, int32_t *heap, int64_t *size) {
    int32_t first = heap[0];
    heap[0] = heap[--*size];
    heap[*size] = first;
    sift_down(logits, heap, *size, 0);
    return first;
}

static double sum_weights(const float *weights, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += weights[i];
    return sum;
}

double log_sum_exp(const KernelSet *kernels, const float *logits, int64_t count, float *weights) {
    float max = kernels->exp_shifted(logits, count, weights);
    return max + fixed_log(sum_weights(weights, count));
}

static double tempered(const float *logits, int32_t id, float max, double temperature) {
    double x = ((double)logits[id] - max) / temperature;
    return x < -700 ? 0 : fixed_exp(x);
}

/* Candidate i of the sorted order; popped ones fill the array from the back. */
static int32_t candidate(const float *logits, int32_t *order, int64_t count, int64_t i, int64_t *heap) {
    while (*heap > count - 1 - i) pop(logits, order, heap);
    return order[count - 1 - i];
}

/* How many candidates pass the filters, `limit` of them at most; at least one. */
static int64_t count_kept(const float *logits, int64_t count, int64_t limit, const SampleOptions *options,
                          const float *weights, int32_t *order, int64_t *heap) {
    int64_t kept;
    if (options->top_p >= 1 && options->min_p <= 0) return limit;
    double all = 0, seen = 0;
    if (limit == count) all = sum_weights(weights, count);
    for (int64_t i = 0; limit < count && i < limit; i++) all += weights[candidate(logits, order, count, i, heap)];
    for (kept = 0; kept < limit; kept++) {
        float weight = weights[candidate(logits, order, count, kept, heap)];
        if (kept > 0 && (seen >= options->top_p * all || weight < options->min_p)) break;
        seen += weight;
    }
    return kept;
}

typedef struct {
    float logit;
    int32_t id;
} Candidate;

static int by_order(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The few logits that come first, found in one pass: put where `candidate` finds them, with their weights. */
static float first_few(const KernelSet *kernels, const float *logits, int64_t count, int64_t few, float *weights,
                       int32_t *order) {
    Candidate found[2 * FEW];
    float values[FEW], few_weights[FEW], last = 0;
    int64_t size = 0;
    int full = 0; /* then what is not above `last` is not among the few: an equal one found later has a higher id */
    for (int64_t i = 0; i < count; i++) {
        if (full && !(logits[i] > last)) continue;
        found[size++] = (Candidate){logits[i], (int32_t)i};
        if (size < 2 * few) continue;
        qsort(found, size, sizeof found[0], by_order);
        size = few;
        last = found[few - 1].logit;
        full = 1;
    }
    qsort(found, size, sizeof found[0], by_order);
    for (int64_t i = 0; i < few; i++) values[i] = found[i].logit;
    float max = kernels->exp_shifted(values, few, few_weights);
    for (int64_t i = 0; i < few; i++) {
        order[count - 1 - i] = found[i].id;
        weights[found[i].id] = few_weights[i];
    }
    return max;
}

/* All logits, ordered as far as anybody asks. */
static float all_in_heap(const KernelSet *kernels, const float *logits, int64_t count, float *weights, int32_t *order) {
    for (int64_t i = 0; i < count; i++) order[i] = (int32_t)i;
    for (int64_t i = count / 2 - 1; i >= 0; i--) sift_down(logits, order, count, i);
    return kernels->exp_shifted(logits, count, weights);
}

int64_t sample_token(const KernelSet *kernels, const float *logits, int64_t count, const SampleOptions *options,
                     float *weights, int32_t *order) {
    int64_t limit = options->top_k > 0 && options->top_k < count ? options->top_k : count;
    int64_t heap = limit <= FEW && limit < count ? count - limit : count;
    float max = heap < count ? first_few(kernels, logits, count, limit, weights, order)
                             : all_in_heap(kernels, logits, count, weights, order);
    int64_t kept = count_kept(logits, count, limit, options, weights, order, &heap);

    double total = 0, passed = 0;
    for (int64_t i = 0; i < kept; i++) {
        int32_t id = kept == count ? (int32_t)i : candidate(logits, order, count, i, &heap);
        total += tempered(logits, id, max, options->temperature);
    }
    int32_t id = 0;
    for (int64_t i = 0; i < kept && passed <= options->uniform * total; i++) {
        int32_t next = candidate(logits, order, count, i, &heap);
        double weight = tempered(logits, next, max, options->temperature);
        if (weight == 0) break; /* total, summed in another order, may be a rounding error more than all there is */
        passed += weight;
        id = next;
    }
    return id;
}

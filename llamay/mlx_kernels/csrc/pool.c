/* Items are claimed dynamically, so a thread that lost its core delays only what it has claimed. A thread
 * with nothing to do spins for about the length of a decode step's serial parts, and then blocks.
 *
 * `ticket` is (job number << 32 | next unclaimed item). A claim is a compare-and-swap on the whole ticket. The
 * ticket of a finished job is closed before the next job's fields are written, and opened under the next number
 * after; so a claim that succeeds was made with the fields of its own job.
 */
#include "pool.h"

#include <fenv.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

static const uint64_t CLOSED = UINT32_MAX;

enum { SPIN_NS = 20 * 1000, POLLS_PER_CLOCK = 64 };

typedef struct {
    Pool *pool;
    int worker;
} Worker;

struct Pool {
    int threads;
    _Atomic uint64_t ticket;
    _Atomic int64_t items, grain, done;
    _Atomic(PoolTask) task;
    _Atomic(void *) argument;
    _Atomic int sleepers, caller_sleeps, quit;
    pthread_mutex_t mutex, turn; /* turn: of whoever is in pool_run */
    pthread_cond_t work, finished;
    pthread_t *handles;
    Worker *workers;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int job_waits(Pool *pool, uint64_t seen) {
    return atomic_load(&pool->ticket) >> 32 != seen || atomic_load(&pool->quit);
}

static int job_done(Pool *pool) {
    return atomic_load(&pool->done) == atomic_load(&pool->items);
}

/* First item claimed of job `job`, or -1 if it has none left; *count receives how many are claimed: fewer towards the
 * end of the job, so that threads end together.
 */
static int64_t claim(Pool *pool, uint64_t job, int64_t items, int64_t grain, int64_t *count) {
    uint64_t ticket = atomic_load(&pool->ticket);
    for (;;) {
        int64_t next = (int64_t)(ticket & UINT32_MAX);
        if (ticket >> 32 != job || next >= items) return -1;
        int64_t left = items - next, share = left / (2 * pool->threads); /* half of an equal part */
        *count = share > grain ? share : grain < left ? grain : left;
        if (atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + (uint64_t)*count)) return next;
    }
}

static void work_on(Pool *pool, uint64_t job, int worker) {
    PoolTask task = atomic_load(&pool->task);
    void *argument = atomic_load(&pool->argument);
    int64_t items = atomic_load(&pool->items), grain = atomic_load(&pool->grain);
    int64_t count, begin;
    while ((begin = claim(pool, job, items, grain, &count)) >= 0) {
        task(argument, begin, begin + count, worker);
        if (atomic_fetch_add(&pool->done, count) + count == items && atomic_load(&pool->caller_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void wait_for_job(Pool *pool, uint64_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < POLLS_PER_CLOCK; i++) {
            if (job_waits(pool, seen)) return;
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!job_waits(pool, seen)) pthread_cond_wait(&pool->work, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void wait_until_done(Pool *pool) {
    int64_t until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < POLLS_PER_CLOCK; i++) {
            if (job_done(pool)) return;
            relax();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->caller_sleeps, 1);
    while (!job_done(pool)) pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_store(&pool->caller_sleeps, 0);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument) {
    Worker *self = argument;
    Pool *pool = self->pool;
    uint64_t seen = 0;
    fesetenv(FE_DFL_ENV); /* round to nearest, subnormals kept: part of the numerics contract */
    for (;;) {
        wait_for_job(pool, seen);
        if (atomic_load(&pool->quit)) return NULL;
        seen = atomic_load(&pool->ticket) >> 32;
        work_on(pool, seen, self->worker);
    }
}

Pool *pool_new(int threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->handles = calloc((size_t)threads, sizeof *pool->handles);
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_mutex_init(&pool->turn, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->threads = 1;
    for (int i = 1; pool->handles && pool->workers && i < threads; i++) {
        pool->workers[i] = (Worker){pool, i};
        if (pthread_create(&pool->handles[i], NULL, worker_main, &pool->workers[i]) != 0) break;
        pool->threads = i + 1;
    }
    if (pool->threads == threads && pool->handles && pool->workers) return pool;
    pool_free(pool);
    return NULL;
}

void pool_free(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->quit, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 1; i < pool->threads; i++) pthread_join(pool->handles[i], NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    pthread_mutex_destroy(&pool->turn);
    free(pool->handles);
    free(pool->workers);
    free(pool);
}

int pool_threads(const Pool *pool) { return pool->threads; }

void pool_run(Pool *pool, int64_t items, int64_t grain, PoolTask task, void *argument) {
    if (items <= 0) return;
    if (pool->threads == 1 || items <= grain) {
        task(argument, 0, items, 0);
        return;
    }
    pthread_mutex_lock(&pool->turn);
    uint64_t job = atomic_load(&pool->ticket) >> 32;
    atomic_store(&pool->ticket, job << 32 | CLOSED);
    atomic_store(&pool->items, items);
    atomic_store(&pool->grain, grain);
    atomic_store(&pool->task, task);
    atomic_store(&pool->argument, argument);
    atomic_store(&pool->done, 0);
    job = (job + 1) & UINT32_MAX;
    atomic_store(&pool->ticket, job << 32);
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->mutex);
    }
    work_on(pool, job, 0);
    wait_until_done(pool);
    pthread_mutex_unlock(&pool->turn);
}

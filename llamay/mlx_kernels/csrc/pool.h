/* Threads that share one job at a time; which thread takes which items never changes a result. */
#ifndef LLAMAY_POOL_H
#define LLAMAY_POOL_H

#include <stdint.h>

typedef struct Pool Pool;

/* Does items [begin, end). `worker` is 0 for the caller of pool_run, and below the pool's thread count. */
typedef void (*PoolTask)(void *argument, int64_t begin, int64_t end, int worker);

/* A pool of `threads` threads, the caller among them; NULL if they cannot be started. */
Pool *pool_new(int threads);
void pool_free(Pool *pool);
int pool_threads(const Pool *pool);

/* Runs the task over [0, items) in claims of `grain` items or more, and returns when all are done. Callers take
 * turns.
 */
void pool_run(Pool *pool, int64_t items, int64_t grain, PoolTask task, void *argument);

#endif

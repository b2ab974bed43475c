/* Moves positions between pages and rows; both formats are in kv_page.h. */
#ifndef LLAMAY_KV_ROWS_H
#define LLAMAY_KV_ROWS_H

#include "kv_page.h"
#include "pool.h"

/* Positions [start, end) of a context whose pages are pages[0..]; rows: [end - start][row_bytes]. */
void export_rows(Pool *pool, const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end,
                 uint8_t *rows);
void import_rows(Pool *pool, const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end,
                 const uint8_t *rows);

/* Rows of one layout as rows of another that differs in precision only, by way of float32. One thread. */
void convert_rows(const PageLayout *from, const PageLayout *to, const uint8_t *source, int64_t count, uint8_t *target);

#endif

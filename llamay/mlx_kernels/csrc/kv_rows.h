/* Moves positions between pages and rows; both formats are in kv_page.h. */
#ifndef LLAMAY_KV_ROWS_H
#define LLAMAY_KV_ROWS_H

#include "kv_page.h"

/* Positions [start, end) of a context whose pages are pages[0..]; rows: [end - start][row_bytes]. On the caller's
 * thread: several may move other rows at once.
 */
void export_rows(const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end, uint8_t *rows);
void import_rows(const PageLayout *layout, uint8_t *const *pages, int64_t start, int64_t end, const uint8_t *rows);

/* Rows of one layout as rows of another that differs in precision only, by way of float32. */
void convert_rows(const PageLayout *from, const PageLayout *to, const uint8_t *source, int64_t count, uint8_t *target);

#endif

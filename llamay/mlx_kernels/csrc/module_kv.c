/* Python bindings of pages and rows. */
#include "module.h"

#include <stdlib.h>

#include "kv_rows.h"

int read_layout(PyObject *tuple, PageLayout *layout) {
    int layers, kv_heads, head_dim, page_tokens;
    const char *precision;
    if (!PyTuple_Check(tuple)) return fail(PyExc_TypeError, "a layout is a tuple") != NULL;
    if (!PyArg_ParseTuple(tuple, "iiiis", &layers, &kv_heads, &head_dim, &page_tokens, &precision)) return 0;
    if (page_layout(layout, layers, kv_heads, head_dim, page_tokens, precision) == 0) return 1;
    PyErr_Format(PyExc_ValueError,
                 "no page holds %d layers of %d heads of %d elements for %d positions in precision '%s'", layers,
                 kv_heads, head_dim, page_tokens, precision);
    return 0;
}

int slab_pages_hold(SlabPages *pages, PyObject *slabs, int64_t pages_per_slab, int64_t page_bytes, const int32_t *ids,
                    int64_t count) {
    pages->num_slabs = PySequence_Size(slabs);
    if (pages->num_slabs < 0) return 0;
    pages->slabs = calloc((size_t)pages->num_slabs + 1, sizeof *pages->slabs);
    pages->pages = calloc((size_t)count + 1, sizeof *pages->pages);
    if (!pages->slabs || !pages->pages) return PyErr_NoMemory() != NULL;
    for (; pages->held < pages->num_slabs; pages->held++) {
        PyObject *slab = PySequence_GetItem(slabs, pages->held);
        int ok = slab && PyObject_GetBuffer(slab, pages->slabs + pages->held, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) == 0;
        Py_XDECREF(slab);
        if (!ok) return 0;
    }
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0) continue;
        int64_t slab = ids[i] / pages_per_slab, index = ids[i] % pages_per_slab;
        if (slab >= pages->num_slabs || index >= pages->slabs[slab].len / page_bytes) {
            PyErr_Format(PyExc_ValueError, "page %d lies outside the slabs", (int)ids[i]);
            return 0;
        }
        pages->pages[i] = (uint8_t *)pages->slabs[slab].buf + index * page_bytes;
    }
    return 1;
}

void slab_pages_release(SlabPages *pages) {
    for (Py_ssize_t i = 0; i < pages->held; i++) PyBuffer_Release(pages->slabs + i);
    free(pages->slabs);
    free(pages->pages);
}

PyObject *page_bytes_function(PyObject *self, PyObject *args) {
    PyObject *tuple;
    PageLayout layout;
    (void)self;
    if (!PyArg_ParseTuple(args, "O", &tuple) || !read_layout(tuple, &layout)) return NULL;
    return PyLong_FromLongLong(layout.page_bytes);
}

/* Whether positions [start, start + count) all lie in pages that are there. */
static int positions_ok(const PageLayout *layout, const SlabPages *pages, int64_t num_pages, int64_t start,
                        int64_t count) {
    int64_t first = start / layout->page_tokens, end = (start + count + layout->page_tokens - 1) / layout->page_tokens;
    if (count && end > num_pages) return 0;
    for (int64_t i = first; count && i < end; i++)
        if (!pages->pages[i]) return 0;
    return 1;
}

static PyObject *move_rows(PyObject *args, int exporting) {
    PyObject *tuple, *slabs;
    PageLayout layout;
    long long pages_per_slab, start;
    Py_buffer ids, rows;
    SlabPages pages = {0};
    if (!PyArg_ParseTuple(args, exporting ? "OOLy*Lw*" : "OOLy*Ly*", &tuple, &slabs, &pages_per_slab, &ids, &start,
                          &rows))
        return NULL;
    int ok = read_layout(tuple, &layout);
    int64_t num_pages = ids.len / 4, count = ok ? rows.len / layout.row_bytes : 0;
    if (ok && (pages_per_slab < 1 || start < 0 || rows.len % layout.row_bytes)) {
        PyErr_SetString(PyExc_ValueError, "the start or the size of the rows is out of range");
        ok = 0;
    }
    ok = ok && slab_pages_hold(&pages, slabs, pages_per_slab, layout.page_bytes, ids.buf, num_pages);
    if (ok && (start > INT32_MAX || !positions_ok(&layout, &pages, num_pages, start, count))) {
        PyErr_SetString(PyExc_ValueError, "a position lies outside the pages");
        ok = 0;
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        if (exporting) export_rows(&layout, pages.pages, start, start + count, rows.buf);
        else import_rows(&layout, pages.pages, start, start + count, rows.buf);
        Py_END_ALLOW_THREADS
    }
    slab_pages_release(&pages);
    PyBuffer_Release(&ids);
    PyBuffer_Release(&rows);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

PyObject *export_rows_function(PyObject *self, PyObject *args) {
    (void)self;
    return move_rows(args, 1);
}

PyObject *import_rows_function(PyObject *self, PyObject *args) {
    (void)self;
    return move_rows(args, 0);
}

PyObject *convert_rows_function(PyObject *self, PyObject *args) {
    PyObject *from_tuple, *to_tuple;
    PageLayout from, to;
    Py_buffer source, target;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOy*w*", &from_tuple, &to_tuple, &source, &target)) return NULL;
    int ok = read_layout(from_tuple, &from) && read_layout(to_tuple, &to);
    int64_t count = ok ? source.len / from.row_bytes : 0;
    if (ok && (from.layers != to.layers || from.kv_heads != to.kv_heads || from.head_dim != to.head_dim ||
               source.len != count * from.row_bytes || target.len != count * to.row_bytes)) {
        PyErr_SetString(PyExc_ValueError, "the layouts or the sizes of the rows do not fit together");
        ok = 0;
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        convert_rows(&from, &to, source.buf, count, target.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

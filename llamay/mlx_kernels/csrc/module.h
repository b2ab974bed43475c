/* What the parts of the Python module share. Functions that return 0 or NULL have set an exception. */
#ifndef LLAMAY_MODULE_H
#define LLAMAY_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>

#include "kernels.h"
#include "kv_page.h"
#include "pool.h"

enum { MAX_ROW = 1 << 24 }; /* far above any model's rows; within it, no count of bytes overflows */

typedef struct {
    PyTypeObject *pool_type;
} ModuleState;

typedef struct {
    PyObject_HEAD
    Pool *pool;
    atomic_flag running; /* set while a program runs on it */
} PoolObject;

extern PyType_Spec program_spec; /* of the type Program (module_program.c) */

/* Sets an exception; returns NULL. */
PyObject *fail(PyObject *type, const char *message);

/* The kernel set of that name, if this processor runs it. */
const KernelSet *find_kernels(const char *name);

/* Checks that a matrix is one the kernels take; data may be NULL. */
int matrix_ok(int format, long long rows, long long columns, const Py_buffer *data);

/* Frees an object of a heap type, its contents already gone. */
void free_object(PyObject *self);

/* The pool of a Pool object. */
Pool *pool_of(const ModuleState *state, PyObject *object);

/* A layout from a tuple (layers, kv_heads, head_dim, page_tokens, precision). */
int read_layout(PyObject *tuple, PageLayout *layout);

/* Pages of a sequence of slabs, by address. Page p is entry p % pages_per_slab of slab p / pages_per_slab. */
typedef struct {
    Py_buffer *slabs;
    Py_ssize_t num_slabs, held;
    uint8_t **pages; /* NULL for an id below 0 */
} SlabPages;

/* Holds the slabs' buffers until released, and resolves `count` page ids. */
int slab_pages_hold(SlabPages *pages, PyObject *slabs, int64_t pages_per_slab, int64_t page_bytes, const int32_t *ids,
                    int64_t count);
void slab_pages_release(SlabPages *pages);

/* Functions of the module (module_pack.c). */
PyObject *packed_bytes_function(PyObject *self, PyObject *args);
PyObject *pack_function(PyObject *self, PyObject *args);
PyObject *pack_all_function(PyObject *self, PyObject *args);
PyObject *dequantize_row_function(PyObject *self, PyObject *args);

/* Functions of the module (module_kv.c). */
PyObject *page_bytes_function(PyObject *self, PyObject *args);
PyObject *export_rows_function(PyObject *self, PyObject *args);
PyObject *import_rows_function(PyObject *self, PyObject *args);
PyObject *convert_rows_function(PyObject *self, PyObject *args);

#endif

/* Python bindings of packing: matrices from the file's rows to groups of 16, and single rows back. */
#include "module.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { STRETCH_ROWS = 1024 }; /* packed by one thread at once: a multiple of LANES */

typedef struct {
    WeightFormat format;
    int64_t rows, columns;
    Py_buffer source, target;
} PackingTask;

static void release_task(PackingTask *task) {
    PyBuffer_Release(&task->source);
    PyBuffer_Release(&task->target);
}

/* Holds the buffers of a tuple (type id, rows, columns, source, target), if all fit together. */
static int hold_task(PyObject *tuple, PackingTask *task) {
    int format;
    long long rows, columns;
    if (!PyTuple_Check(tuple)) return fail(PyExc_TypeError, "a tuple is needed for each matrix") != NULL;
    if (!PyArg_ParseTuple(tuple, "iLLy*w*", &format, &rows, &columns, &task->source, &task->target)) return 0;
    task->format = (WeightFormat)format;
    task->rows = rows;
    task->columns = columns;
    int ok = matrix_ok(format, rows, columns, &task->target);
    if (ok && task->source.len != rows * row_bytes(task->format, columns)) {
        PyErr_Format(PyExc_ValueError, "%lld bytes of weights are needed, %lld given",
                     (long long)(rows * row_bytes(task->format, columns)), (long long)task->source.len);
        ok = 0;
    }
    if (!ok) release_task(task);
    return ok;
}

PyObject *packed_bytes_function(PyObject *self, PyObject *args) {
    int format;
    long long rows, columns;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLL", &format, &rows, &columns) || !matrix_ok(format, rows, columns, NULL)) return NULL;
    return PyLong_FromLongLong(packed_bytes((WeightFormat)format, rows, columns));
}

PyObject *pack_function(PyObject *self, PyObject *args) {
    PackingTask task;
    (void)self;
    if (!hold_task(args, &task)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_rows(task.format, task.rows, task.columns, task.source.buf, task.target.buf);
    Py_END_ALLOW_THREADS
    release_task(&task);
    Py_RETURN_NONE;
}

typedef struct {
    PackingTask *tasks;
    int release;
} PackingJob;

static int64_t stretches_of(const PackingTask *task) { return (task->rows + STRETCH_ROWS - 1) / STRETCH_ROWS; }

/* Lets go of whole pages of a mapped file; they come back if they are read again. */
static void let_go(const uint8_t *source, int64_t bytes) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t begin = ((uintptr_t)source + page - 1) / page * page, end = ((uintptr_t)source + (uintptr_t)bytes) / page * page;
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}

static void pack_stretch(const PackingTask *task, int64_t stretch, int release) {
    int64_t first = stretch * STRETCH_ROWS, left = task->rows - first, rows = left < STRETCH_ROWS ? left : STRETCH_ROWS;
    int64_t stride = row_bytes(task->format, task->columns);
    const uint8_t *source = (const uint8_t *)task->source.buf + first * stride;
    uint8_t *target = task->target.buf;
    pack_rows(task->format, rows, task->columns, source, target + packed_bytes(task->format, first, task->columns));
    if (release) let_go(source, rows * stride);
}

/* Stretches [begin, end), counted through all matrices. */
static void pack_stretches(void *argument, int64_t begin, int64_t end, int worker) {
    const PackingJob *job = argument;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        const PackingTask *task = job->tasks;
        int64_t stretch = item;
        while (stretch >= stretches_of(task)) stretch -= stretches_of(task++);
        pack_stretch(task, stretch, job->release);
    }
}

/* Holds the task of an item of a sequence. */
static int hold_item(PyObject *sequence, Py_ssize_t index, PackingTask *task) {
    PyObject *tuple = PySequence_GetItem(sequence, index);
    int ok = tuple && hold_task(tuple, task);
    Py_XDECREF(tuple);
    return ok;
}

/* Everything in one call: between calls, each thread would wait for the interpreter. */
PyObject *pack_all_function(PyObject *self, PyObject *args) {
    PyObject *pool_object, *matrices;
    PackingJob job;
    if (!PyArg_ParseTuple(args, "OOp", &pool_object, &matrices, &job.release)) return NULL;
    Pool *pool = pool_of(PyModule_GetState(self), pool_object);
    Py_ssize_t count = pool ? PySequence_Size(matrices) : -1, held = 0;
    int64_t stretches = 0;
    if (count < 0) return NULL;
    job.tasks = calloc((size_t)count + 1, sizeof *job.tasks);
    if (!job.tasks) return PyErr_NoMemory();
    while (held < count && hold_item(matrices, held, job.tasks + held)) stretches += stretches_of(job.tasks + held++);
    if (held == count) {
        Py_BEGIN_ALLOW_THREADS
        pool_run(pool, stretches, 1, pack_stretches, &job);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; i < held; i++) release_task(job.tasks + i);
    free(job.tasks);
    if (held < count) return NULL;
    Py_RETURN_NONE;
}

PyObject *dequantize_row_function(PyObject *self, PyObject *args) {
    int format;
    long long rows, columns, row;
    Py_buffer packed, out;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLLy*Lw*", &format, &rows, &columns, &packed, &row, &out)) return NULL;
    int ok = matrix_ok(format, rows, columns, &packed);
    if (ok && (row < 0 || row >= rows || out.len != columns * (Py_ssize_t)sizeof(float))) {
        PyErr_SetString(PyExc_ValueError, "row or output size out of range");
        ok = 0;
    }
    if (ok) {
        Matrix matrix = {(WeightFormat)format, rows, columns, packed.buf};
        dequantize_row(&matrix, row, out.buf);
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* Python bindings of the CPU kernels: functions on logits and single matrices, and the pool of threads.
 *
 * Arguments are checked for shape and range, so that a wrong caller gets an exception; numbers inside weights and
 * activations are not.
 */
#include "module.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "fixed_math.h"
#include "products.h"
#include "sample.h"

PyObject *fail(PyObject *type, const char *message) {
    PyErr_SetString(type, message);
    return NULL;
}

const KernelSet *find_kernels(const char *name) {
    for (int i = 0; kernel_sets[i]; i++)
        if (strcmp(kernel_sets[i]->name, name) == 0 && kernel_set_runs_here(kernel_sets[i])) return kernel_sets[i];
    PyErr_Format(PyExc_ValueError, "kernel set '%s' does not run on this processor", name);
    return NULL;
}

/* Rounding to nearest with subnormals kept, whatever the calling thread uses; returns what it uses. */
static fenv_t enter_contract_environment(void) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    return callers;
}

int matrix_ok(int format, long long rows, long long columns, const Py_buffer *data) {
    if (!format_known(format)) {
        PyErr_Format(PyExc_ValueError, "weight type %d has no CPU kernel", format);
        return 0;
    }
    int span = packing((WeightFormat)format).span;
    if (rows < 1 || columns < 1 || rows > INT32_MAX || columns > MAX_ROW || (span && columns % span)) {
        PyErr_Format(PyExc_ValueError, "a matrix of %lld rows by %lld columns cannot be packed", rows, columns);
        return 0;
    }
    if (data && data->len < packed_bytes((WeightFormat)format, rows, columns)) {
        PyErr_Format(PyExc_ValueError, "a packed matrix of %lld bytes is needed, %lld given",
                     (long long)packed_bytes((WeightFormat)format, rows, columns), (long long)data->len);
        return 0;
    }
    return 1;
}

/* --- functions ------------------------------------------------------------------------------------------ */

static PyObject *kernel_set_names(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *names = PyList_New(0);
    for (int i = 0; names && kernel_sets[i]; i++) {
        if (!kernel_set_runs_here(kernel_sets[i])) continue;
        PyObject *name = PyUnicode_FromString(kernel_sets[i]->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyObject *rope_frequencies(PyObject *self, PyObject *args) {
    int dim;
    double base;
    (void)self;
    if (!PyArg_ParseTuple(args, "id", &dim, &base)) return NULL;
    if (dim < 0 || dim % 2 || !(base >= 1 && base < 1e30)) return fail(PyExc_ValueError, "rope dimension or base out of range");
    PyObject *list = PyList_New(dim / 2);
    fenv_t callers = enter_contract_environment();
    for (int i = 0; list && i < dim / 2; i++) {
        PyObject *value = PyFloat_FromDouble(fixed_exp(-2.0 * i / dim * fixed_log(base)));
        if (!value || PyList_SetItem(list, i, value) < 0) Py_CLEAR(list);
    }
    fesetenv(&callers);
    return list;
}

static PyObject *logarithm(PyObject *self, PyObject *args) {
    double x;
    (void)self;
    if (!PyArg_ParseTuple(args, "d", &x)) return NULL;
    if (!(x > 1e-300 && x < 1e300)) return fail(PyExc_ValueError, "log needs a normal positive number");
    fenv_t callers = enter_contract_environment();
    volatile double result = fixed_log(x); /* volatile: computed before the environment is given back */
    fesetenv(&callers);
    return PyFloat_FromDouble(result);
}

/* Reads a float32 logits buffer and allocates scratch for it; 0 with an exception set if it cannot. */
static int logits_scratch(const Py_buffer *logits, int64_t *count, float **weights, int32_t **order) {
    *count = logits->len / (Py_ssize_t)sizeof(float);
    if (*count < 1 || logits->len % (Py_ssize_t)sizeof(float)) {
        PyErr_SetString(PyExc_ValueError, "logits must be a non-empty float32 buffer");
        return 0;
    }
    *weights = malloc((size_t)*count * sizeof **weights);
    *order = malloc((size_t)*count * sizeof **order);
    if (*weights && *order) return 1;
    PyErr_NoMemory();
    return 0;
}

static PyObject *log_sum_exp_function(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer logits;
    double result = 0;
    int64_t count;
    float *weights = NULL;
    int32_t *order = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "sy*", &name, &logits)) return NULL;
    const KernelSet *kernels = find_kernels(name);
    int ok = kernels && logits_scratch(&logits, &count, &weights, &order);
    if (ok) {
        fenv_t callers = enter_contract_environment();
        result = log_sum_exp(kernels, logits.buf, count, weights);
        fesetenv(&callers);
    }
    free(weights);
    free(order);
    PyBuffer_Release(&logits);
    return ok ? PyFloat_FromDouble(result) : NULL;
}

static PyObject *sample(PyObject *self, PyObject *args) {
    const char *name;
    Py_buffer logits;
    long long top_k;
    SampleOptions options;
    int64_t count, id = 0;
    float *weights = NULL;
    int32_t *order = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "sy*dLddd", &name, &logits, &options.temperature, &top_k, &options.top_p,
                          &options.min_p, &options.uniform))
        return NULL;
    options.top_k = top_k;
    const KernelSet *kernels = find_kernels(name);
    int ok = kernels && logits_scratch(&logits, &count, &weights, &order);
    if (ok && !(options.temperature > 0 && top_k >= 0 && options.uniform >= 0 && options.uniform < 1)) {
        PyErr_SetString(PyExc_ValueError, "temperature, top_k or uniform out of range");
        ok = 0;
    }
    if (ok) {
        fenv_t callers = enter_contract_environment();
        id = sample_token(kernels, logits.buf, count, &options, weights, order);
        fesetenv(&callers);
    }
    free(weights);
    free(order);
    PyBuffer_Release(&logits);
    return ok ? PyLong_FromLongLong(id) : NULL;
}

/* x: [n, columns] float32, out: [n, rows] float32; one thread. For tests and benchmarks of single kernels. */
static PyObject *matmul(PyObject *self, PyObject *args) {
    const char *name;
    int format, planes;
    long long rows, columns;
    Py_buffer packed, x, out;
    (void)self;
    if (!PyArg_ParseTuple(args, "siLLy*iy*w*", &name, &format, &rows, &columns, &packed, &planes, &x, &out)) return NULL;
    const KernelSet *kernels = find_kernels(name);
    int ok = kernels && matrix_ok(format, rows, columns, &packed);
    int64_t row_size = ok ? columns * (int64_t)sizeof(float) : 1, count = x.len / row_size;
    if (ok && (planes < 1 || planes > 2 || count < 1 || x.len % row_size || out.len != count * rows * (int64_t)sizeof(float))) {
        PyErr_SetString(PyExc_ValueError, "planes, activations or output size out of range");
        ok = 0;
    }
    if (ok) {
        Matrix matrix = {(WeightFormat)format, rows, columns, packed.buf};
        Py_BEGIN_ALLOW_THREADS
        fenv_t callers = enter_contract_environment();
        ok = multiply(kernels, &matrix, planes, x.buf, count, out.buf) == 0;
        fesetenv(&callers);
        Py_END_ALLOW_THREADS
        if (!ok) PyErr_NoMemory();
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&x);
    PyBuffer_Release(&out);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* --- Pool ------------------------------------------------------------------------------------------------ */

static PyObject *pool_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int threads;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "i", &threads)) return NULL;
    if (threads < 1 || threads > 1024) return fail(PyExc_ValueError, "threads must be between 1 and 1024");
    PoolObject *self = (PoolObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self) return NULL;
    atomic_flag_clear(&self->running);
    self->pool = pool_new(threads);
    if (self->pool) return (PyObject *)self;
    Py_DECREF(self);
    return fail(PyExc_OSError, "the worker threads cannot be started");
}

Pool *pool_of(const ModuleState *state, PyObject *object) {
    if (state && PyObject_TypeCheck(object, state->pool_type)) return ((PoolObject *)object)->pool;
    PyErr_SetString(PyExc_TypeError, "the first argument must be a Pool");
    return NULL;
}

void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void pool_object_free(PyObject *self) {
    Pool *pool = ((PoolObject *)self)->pool;
    if (pool) pool_free(pool);
    free_object(self);
}

static PyObject *pool_object_threads(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(pool_threads(((PoolObject *)self)->pool));
}

static PyGetSetDef pool_getset[] = {{"threads", pool_object_threads, NULL, "Threads, the caller among them.", NULL},
                                    {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot pool_slots[] = {{Py_tp_new, pool_object_new},
                                   {Py_tp_dealloc, pool_object_free},
                                   {Py_tp_getset, pool_getset},
                                   {Py_tp_doc, "Pool(threads): the threads that pack weights and run programs."},
                                   {0, NULL}};

static PyType_Spec pool_spec = {"llamay.mlx_kernels._cpu.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};

/* --- module ---------------------------------------------------------------------------------------------- */

static int add_types(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    state->pool_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    if (!state->pool_type || PyModule_AddType(module, state->pool_type) < 0) return -1;
    PyObject *program_type = PyType_FromModuleAndSpec(module, &program_spec, NULL);
    if (!program_type) return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)program_type);
    Py_DECREF(program_type);
    return result;
}

static void free_module(void *module) {
    ModuleState *state = PyModule_GetState(module);
    if (state) Py_CLEAR(state->pool_type);
}

static PyMethodDef functions[] = {
    {"kernel_sets", kernel_set_names, METH_NOARGS, "Names of the kernel sets this processor runs, best first."},
    {"packed_bytes", packed_bytes_function, METH_VARARGS,
     "packed_bytes(type_id, rows, columns) -> bytes of a packed matrix"},
    {"pack", pack_function, METH_VARARGS, "pack(type_id, rows, columns, source, target): packs rows into target"},
    {"pack_all", pack_all_function, METH_VARARGS,
     "pack_all(pool, matrices, release): packs (type_id, rows, columns, source, target) each, on all threads; release: "
     "sources are of mapped files, whose memory is let go"},
    {"dequantize_row", dequantize_row_function, METH_VARARGS, "dequantize_row(type_id, rows, columns, packed, row, out)"},
    {"matmul", matmul, METH_VARARGS, "matmul(kernel_set, type_id, rows, columns, packed, planes, x, out)"},
    {"page_bytes", page_bytes_function, METH_VARARGS, "page_bytes(layout) -> bytes of a page"},
    {"export_rows", export_rows_function, METH_VARARGS,
     "export_rows(layout, slabs, pages_per_slab, pages, start, rows): fills rows from pages"},
    {"import_rows", import_rows_function, METH_VARARGS,
     "import_rows(layout, slabs, pages_per_slab, pages, start, rows): writes rows to pages"},
    {"convert_rows", convert_rows_function, METH_VARARGS, "convert_rows(from_layout, to_layout, source, target)"},
    {"rope_frequencies", rope_frequencies, METH_VARARGS, "rope_frequencies(dim, base) -> [base ** (-2 i / dim)]"},
    {"log", logarithm, METH_VARARGS, "log(x): the same bits on every machine"},
    {"log_sum_exp", log_sum_exp_function, METH_VARARGS, "log_sum_exp(kernel_set, logits) -> float"},
    {"sample", sample, METH_VARARGS, "sample(kernel_set, logits, temperature, top_k, top_p, min_p, uniform) -> id"},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_types}, {0, NULL}};

static struct PyModuleDef module_definition = {.m_base = PyModuleDef_HEAD_INIT,
                                               .m_name = "llamay.mlx_kernels._cpu",
                                               .m_doc = "The CPU kernels.",
                                               .m_size = sizeof(ModuleState),
                                               .m_methods = functions,
                                               .m_slots = module_slots,
                                               .m_free = free_module};

PyMODINIT_FUNC PyInit__cpu(void) { return PyModuleDef_Init(&module_definition); }

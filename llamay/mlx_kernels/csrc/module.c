/* Python bindings of the CPU kernels: weights are packed here, programs are built and run here.
 *
 * Arguments are checked for shape and range, so that a wrong caller gets an exception; numbers inside weights and
 * activations are not.
 */
#include "module.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "fixed_math.h"
#include "kernels.h"
#include "program.h"
#include "sample.h"

PyObject *fail(PyObject *type, const char *message) {
    PyErr_SetString(type, message);
    return NULL;
}

static const KernelSet *find_kernels(const char *name) {
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

/* Checks that a matrix is one the kernels take; data may be NULL. */
static int matrix_ok(int format, long long rows, long long columns, const Py_buffer *data) {
    if (!format_known(format)) {
        PyErr_Format(PyExc_ValueError, "weight type %d has no CPU kernel", format);
        return 0;
    }
    int quantized = format != F32 && format != F16;
    if (rows < 1 || columns < 1 || rows > INT32_MAX || columns > INT32_MAX || (quantized && columns % BLOCK)) {
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

static PyObject *packed_size(PyObject *self, PyObject *args) {
    int format;
    long long rows, columns;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLL", &format, &rows, &columns) || !matrix_ok(format, rows, columns, NULL)) return NULL;
    return PyLong_FromLongLong(packed_bytes((WeightFormat)format, rows, columns));
}

static PyObject *pack(PyObject *self, PyObject *args) {
    int format;
    long long rows, columns;
    Py_buffer source, target;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLLy*w*", &format, &rows, &columns, &source, &target)) return NULL;
    int ok = matrix_ok(format, rows, columns, &target);
    if (ok && source.len != rows * row_bytes((WeightFormat)format, columns)) {
        PyErr_Format(PyExc_ValueError, "%lld bytes of weights are needed, %lld given",
                     (long long)(rows * row_bytes((WeightFormat)format, columns)), (long long)source.len);
        ok = 0;
    }
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        pack_rows((WeightFormat)format, rows, columns, source.buf, target.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *dequantize(PyObject *self, PyObject *args) {
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

typedef struct {
    PyObject_HEAD
    Pool *pool;
    atomic_flag running;
} PoolObject;

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

static void free_object(PyObject *self) {
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
                                   {Py_tp_doc, "Pool(threads): the threads that run programs."},
                                   {0, NULL}};

static PyType_Spec pool_spec = {"llamay.mlx_kernels._cpu.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};

/* --- Program --------------------------------------------------------------------------------------------- */

/* Bounds on sizes, far above any model's, within which no count overflows. */
enum { MAX_LAYERS = 1 << 12, MAX_ROW = 1 << 24 };

typedef struct {
    PyObject_HEAD
    Program program;
    int capacity, num_buffers;
    Py_buffer *buffers; /* packed weights, held for the life of the program */
    double *rope_inverse;
    atomic_flag running;
} ProgramObject;

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *name;
    ModelShape shape = {0};
    Py_buffer inverse;
    float scale;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "siiiiipy*df", &name, &shape.hidden, &shape.num_heads, &shape.num_kv_heads,
                          &shape.head_dim, &shape.vocab, &shape.rope_interleaved, &inverse, &shape.rope_magnitude,
                          &scale))
        return NULL;
    shape.rope_dim = (int)(inverse.len / (Py_ssize_t)sizeof(double) * 2);
    shape.attention_scale = scale;
    const KernelSet *kernels = find_kernels(name);
    int ok = kernels != NULL;
    if (ok && (shape.hidden < 1 || shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.vocab < 1 ||
               shape.num_heads % shape.num_kv_heads || shape.head_dim < LANES || shape.head_dim % LANES ||
               shape.head_dim > MAX_HEAD_DIM || (int64_t)shape.num_heads * shape.head_dim > MAX_ROW ||
               shape.rope_dim > shape.head_dim)) {
        PyErr_SetString(PyExc_ValueError, "head counts, head size or rope size out of range");
        ok = 0;
    }
    ProgramObject *self = ok ? (ProgramObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0) : NULL;
    if (self) {
        self->rope_inverse = malloc((size_t)inverse.len + 1);
        if (self->rope_inverse) memcpy(self->rope_inverse, inverse.buf, (size_t)inverse.len);
        else {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&inverse);
    if (!self) return NULL;
    shape.rope_inverse = self->rope_inverse;
    self->program.shape = shape;
    self->program.kernels = kernels;
    atomic_flag_clear(&self->running);
    return (PyObject *)self;
}

static void program_free(PyObject *object) {
    ProgramObject *self = (ProgramObject *)object;
    for (int i = 0; i < self->num_buffers; i++) PyBuffer_Release(self->buffers + i);
    free(self->buffers);
    free(self->program.operations);
    free(self->rope_inverse);
    scratch_free(self->program.scratch);
    free_object(object);
}

/* Makes room for one operation and its buffers; forgets what was sized for the operations before. */
static Operation *next_operation(ProgramObject *self, OperationKind kind) {
    const int buffers_each = 1 + 2 * MAX_PARTS;
    if (atomic_flag_test_and_set(&self->running)) {
        PyErr_SetString(PyExc_RuntimeError, "the program is running");
        return NULL;
    }
    atomic_flag_clear(&self->running); /* the GIL keeps it from being run while it is added to */
    scratch_free(self->program.scratch);
    self->program.scratch = NULL;
    if (self->program.num_operations == self->capacity) {
        int capacity = 2 * self->capacity + 16;
        Operation *operations = realloc(self->program.operations, (size_t)capacity * sizeof *operations);
        if (operations) self->program.operations = operations;
        Py_buffer *buffers = realloc(self->buffers, (size_t)(capacity * buffers_each) * sizeof *buffers);
        if (buffers) self->buffers = buffers;
        if (!operations || !buffers) {
            PyErr_NoMemory();
            return NULL;
        }
        self->capacity = capacity;
    }
    Operation *op = self->program.operations + self->program.num_operations;
    memset(op, 0, sizeof *op);
    op->kind = kind;
    return op;
}

/* Holds a buffer for the life of the program; NULL with an exception set if it cannot. */
static Py_buffer *hold(ProgramObject *self, PyObject *object) {
    Py_buffer *buffer = self->buffers + self->num_buffers;
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) < 0) return NULL;
    self->num_buffers++;
    return buffer;
}

/* A float32 vector of `count`. */
static int read_vector(ProgramObject *self, PyObject *object, int64_t count, const float **out) {
    Py_buffer *buffer = hold(self, object);
    if (!buffer) return 0;
    if (buffer->len != count * (Py_ssize_t)sizeof(float)) {
        PyErr_Format(PyExc_ValueError, "a vector of %lld floats is needed, %lld bytes given", (long long)count,
                     (long long)buffer->len);
        return 0;
    }
    *out = buffer->buf;
    return 1;
}

/* A matrix (type id, rows, columns, packed buffer) that must have this many columns, and rows unless 0. */
static int read_matrix(ProgramObject *self, PyObject *tuple, int64_t rows, int64_t columns, Matrix *out) {
    int format;
    long long given_rows, given_columns;
    PyObject *packed;
    if (!PyTuple_Check(tuple)) return fail(PyExc_TypeError, "a matrix is (type id, rows, columns, packed)") != NULL;
    if (!PyArg_ParseTuple(tuple, "iLLO", &format, &given_rows, &given_columns, &packed)) return 0;
    Py_buffer *buffer = hold(self, packed);
    if (!buffer || !matrix_ok(format, given_rows, given_columns, buffer)) return 0;
    if (given_columns != columns || (rows && given_rows != rows)) {
        PyErr_Format(PyExc_ValueError, "a matrix of %lld rows by %lld columns is needed, %lld by %lld given",
                     (long long)rows, (long long)columns, given_rows, given_columns);
        return 0;
    }
    *out = (Matrix){(WeightFormat)format, given_rows, given_columns, buffer->buf};
    return 1;
}

static int layer_ok(int layer) {
    if (layer >= 0 && layer < MAX_LAYERS) return 1;
    PyErr_Format(PyExc_ValueError, "layer %d is out of range", layer);
    return 0;
}

static PyObject *publish(ProgramObject *self) {
    self->program.num_operations++;
    Py_RETURN_NONE;
}

static PyObject *add_embed(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *table;
    if (!PyArg_ParseTuple(args, "O", &table)) return NULL;
    Operation *op = next_operation(self, EMBED);
    if (!op || !read_matrix(self, table, shape->vocab, shape->hidden, op->weights)) return NULL;
    return publish(self);
}

static PyObject *add_attention_input(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *weights[3], *bias[3];
    int layer;
    float eps;
    if (!PyArg_ParseTuple(args, "iOfOOOOOO", &layer, &norm, &eps, &weights[0], &weights[1], &weights[2], &bias[0],
                          &bias[1], &bias[2]) ||
        !layer_ok(layer))
        return NULL;
    Operation *op = next_operation(self, ATTENTION_INPUT);
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm)) return NULL;
    op->layer = layer;
    op->eps = eps;
    for (int part = QUERY; part <= VALUE; part++) {
        int rows = (part == QUERY ? shape->num_heads : shape->num_kv_heads) * shape->head_dim;
        if (!read_matrix(self, weights[part], rows, shape->hidden, op->weights + part) ||
            (bias[part] != Py_None && !read_vector(self, bias[part], rows, op->bias + part)))
            return NULL;
    }
    return publish(self);
}

static PyObject *add_attention(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    int layer;
    if (!PyArg_ParseTuple(args, "i", &layer) || !layer_ok(layer)) return NULL;
    Operation *op = next_operation(self, ATTENTION);
    if (!op) return NULL;
    op->layer = layer;
    return publish(self);
}

static PyObject *add_attention_output(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *weights;
    if (!PyArg_ParseTuple(args, "O", &weights)) return NULL;
    Operation *op = next_operation(self, ATTENTION_OUTPUT);
    if (!op || !read_matrix(self, weights, shape->hidden, (int64_t)shape->num_heads * shape->head_dim, op->weights))
        return NULL;
    return publish(self);
}

static PyObject *add_feed_forward(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *gate, *up, *down;
    float eps;
    if (!PyArg_ParseTuple(args, "OfOOO", &norm, &eps, &gate, &up, &down)) return NULL;
    Operation *op = next_operation(self, FEED_FORWARD);
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm) ||
        !read_matrix(self, gate, 0, shape->hidden, op->weights + GATE) ||
        !read_matrix(self, up, op->weights[GATE].rows, shape->hidden, op->weights + UP) ||
        !read_matrix(self, down, shape->hidden, op->weights[GATE].rows, op->weights + DOWN))
        return NULL;
    op->eps = eps;
    return publish(self);
}

static PyObject *add_logits(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *head;
    float eps;
    if (!PyArg_ParseTuple(args, "OfO", &norm, &eps, &head)) return NULL;
    Operation *op = next_operation(self, LOGITS);
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm) ||
        !read_matrix(self, head, shape->vocab, shape->hidden, op->weights))
        return NULL;
    op->eps = eps;
    return publish(self);
}

enum { TOKENS, POSITIONS, CONTEXTS, WRITES, PAGE_TABLE, LOGIT_ROWS, LOGIT_BUFFER, CONTROL, STEP_BUFFERS };

typedef struct {
    Py_buffer buffers[STEP_BUFFERS];
    int held;
    SlabPages pages;
} StepBuffers;

static void release_step(StepBuffers *b) {
    for (int i = 0; i < b->held; i++) PyBuffer_Release(b->buffers + i);
    slab_pages_release(&b->pages);
}

static int hold_step(StepBuffers *b, PyObject *const *objects) {
    for (; b->held < STEP_BUFFERS; b->held++) {
        int flags = b->held == LOGIT_BUFFER || b->held == CONTROL ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(objects[b->held], b->buffers + b->held, flags) < 0) return 0;
    }
    return 1;
}

static int rows_ok(const Step *step, const ModelShape *shape) {
    for (int64_t row = 0; row < step->rows; row++) {
        int64_t position = step->positions[row], context = step->contexts[row];
        if (step->tokens[row] < 0 || step->tokens[row] >= shape->vocab || position < 0 || context < 0 ||
            context >= step->num_contexts || position / step->layout.page_tokens >= step->max_pages)
            return 0;
        for (int64_t page = 0; page <= position / step->layout.page_tokens; page++)
            if (!step->pages[context * step->max_pages + page]) return 0;
    }
    for (int64_t i = 0; i < step->num_logit_rows; i++)
        if (step->logit_rows[i] < 0 || step->logit_rows[i] >= step->rows) return 0;
    return step->num_logit_rows <= step->rows;
}

static int32_t layers_of(const Program *program) {
    int32_t layers = 0;
    for (int i = 0; i < program->num_operations; i++)
        if (program->operations[i].layer >= layers) layers = program->operations[i].layer + 1;
    return layers;
}

/* Whether pages of this layout hold what the program's operations read and write. */
static int layout_fits(const Program *program, const PageLayout *layout) {
    return layout->layers >= layers_of(program) && layout->kv_heads == program->shape.num_kv_heads &&
           layout->head_dim == program->shape.head_dim;
}

static int read_step(const Program *program, StepBuffers *b, PyObject *slabs, long long pages_per_slab, Step *step) {
    int64_t rows = b->buffers[TOKENS].len / 4, table = b->buffers[PAGE_TABLE].len / 4;
    step->rows = rows;
    step->tokens = b->buffers[TOKENS].buf;
    step->positions = b->buffers[POSITIONS].buf;
    step->contexts = b->buffers[CONTEXTS].buf;
    step->writes = b->buffers[WRITES].buf;
    step->num_logit_rows = b->buffers[LOGIT_ROWS].len / 4;
    step->logit_rows = b->buffers[LOGIT_ROWS].buf;
    step->logits = b->buffers[LOGIT_BUFFER].buf;
    step->control = b->buffers[CONTROL].buf;
    int sizes_ok = rows > 0 && b->buffers[POSITIONS].len == rows * 4 && b->buffers[CONTEXTS].len == rows * 4 &&
                   b->buffers[WRITES].len == rows && step->max_pages > 0 && table % step->max_pages == 0 &&
                   b->buffers[CONTROL].len == 16 &&
                   b->buffers[LOGIT_BUFFER].len == step->num_logit_rows * program->shape.vocab * 4 &&
                   pages_per_slab > 0 && layout_fits(program, &step->layout);
    if (!sizes_ok) return fail(PyExc_ValueError, "the step's arrays do not fit together") != NULL;
    step->num_contexts = table / step->max_pages;
    if (!slab_pages_hold(&b->pages, slabs, pages_per_slab, step->layout.page_bytes, b->buffers[PAGE_TABLE].buf, table))
        return 0;
    step->pages = b->pages.pages;
    if (!rows_ok(step, &program->shape))
        return fail(PyExc_ValueError, "a row's token, position, context or page is out of range") != NULL;
    return 1;
}

static PyObject *run(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    PyObject *pool_object, *layout, *slabs, *objects[STEP_BUFFERS];
    long long max_pages, pages_per_slab;
    Step step = {0};
    if (!PyArg_ParseTuple(args, "OOOOOOLOOLOOO", &pool_object, &objects[TOKENS], &objects[POSITIONS], &objects[CONTEXTS],
                          &objects[WRITES], &objects[PAGE_TABLE], &max_pages, &layout, &slabs, &pages_per_slab,
                          &objects[LOGIT_ROWS], &objects[LOGIT_BUFFER], &objects[CONTROL]))
        return NULL;
    Pool *pool = pool_of(PyType_GetModuleState(Py_TYPE(object)), pool_object);
    if (!pool || !read_layout(layout, &step.layout)) return NULL;
    step.max_pages = max_pages;
    PoolObject *threads = (PoolObject *)pool_object;
    if (atomic_flag_test_and_set(&self->running)) return fail(PyExc_RuntimeError, "the program is already running");
    if (atomic_flag_test_and_set(&threads->running)) {
        atomic_flag_clear(&self->running);
        return fail(PyExc_RuntimeError, "the pool is already running a program");
    }
    StepBuffers buffers = {0};
    StepResult result = STEP_DONE;
    int ok = hold_step(&buffers, objects) && read_step(&self->program, &buffers, slabs, pages_per_slab, &step);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS
        result = program_run(&self->program, pool, &step);
        Py_END_ALLOW_THREADS
    }
    release_step(&buffers);
    atomic_flag_clear(&threads->running);
    atomic_flag_clear(&self->running);
    if (!ok) return NULL;
    if (result == STEP_NO_MEMORY) return PyErr_NoMemory();
    return PyBool_FromLong(result == STEP_DONE);
}

static PyMethodDef program_methods[] = {
    {"add_embed", add_embed, METH_VARARGS, "add_embed(table)"},
    {"add_attention_input", add_attention_input, METH_VARARGS,
     "add_attention_input(layer, norm, eps, wq, wk, wv, bq, bk, bv)"},
    {"add_attention", add_attention, METH_VARARGS, "add_attention(layer)"},
    {"add_attention_output", add_attention_output, METH_VARARGS, "add_attention_output(weights)"},
    {"add_feed_forward", add_feed_forward, METH_VARARGS, "add_feed_forward(norm, eps, gate, up, down)"},
    {"add_logits", add_logits, METH_VARARGS, "add_logits(norm, eps, head)"},
    {"run", run, METH_VARARGS,
     "run(pool, tokens, positions, contexts, writes, page_table, max_pages, layout, slabs, pages_per_slab, logit_rows, "
     "logits, control) -> False if cancelled"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot program_slots[] = {{Py_tp_new, program_new},
                                      {Py_tp_dealloc, program_free},
                                      {Py_tp_methods, program_methods},
                                      {Py_tp_doc, "Program(kernel_set, hidden, num_heads, num_kv_heads, head_dim, vocab, "
                                                  "rope_interleaved, rope_inverse, rope_magnitude, attention_scale)"},
                                      {0, NULL}};

static PyType_Spec program_spec = {"llamay.mlx_kernels._cpu.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT,
                                   program_slots};

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
    {"packed_bytes", packed_size, METH_VARARGS, "packed_bytes(type_id, rows, columns) -> bytes of a packed matrix"},
    {"pack", pack, METH_VARARGS, "pack(type_id, rows, columns, source, target): packs a matrix's rows into target"},
    {"dequantize_row", dequantize, METH_VARARGS, "dequantize_row(type_id, rows, columns, packed, row, out)"},
    {"matmul", matmul, METH_VARARGS, "matmul(kernel_set, type_id, rows, columns, packed, planes, x, out)"},
    {"page_bytes", page_bytes_function, METH_VARARGS, "page_bytes(layout) -> bytes of a page"},
    {"export_rows", export_rows_function, METH_VARARGS,
     "export_rows(pool, layout, slabs, pages_per_slab, pages, start, rows): fills rows from pages"},
    {"import_rows", import_rows_function, METH_VARARGS,
     "import_rows(pool, layout, slabs, pages_per_slab, pages, start, rows): writes rows to pages"},
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

/* Python bindings of programs: built from packed weights. */
#include "module_program.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LAYERS = 1 << 12 };

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const char *name;
    ModelShape shape = {0};
    Py_buffer inverse, magnitude;
    float scale;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "siiiiipy*y*f", &name, &shape.hidden, &shape.num_heads, &shape.num_kv_heads,
                          &shape.head_dim, &shape.vocab, &shape.rope_interleaved, &inverse, &magnitude, &scale))
        return NULL;
    Py_ssize_t ropes = magnitude.len / (Py_ssize_t)sizeof(double);
    Py_ssize_t half = ropes > 0 ? inverse.len / ropes / (Py_ssize_t)sizeof(double) : 0;
    int ropes_fit = ropes >= 1 && ropes <= MAX_LAYERS && magnitude.len == ropes * (Py_ssize_t)sizeof(double) &&
                    inverse.len == ropes * half * (Py_ssize_t)sizeof(double) && half <= MAX_HEAD_DIM / 2;
    shape.num_ropes = (int)ropes;
    shape.rope_dim = (int)half * 2;
    shape.attention_scale = scale;
    const KernelSet *kernels = find_kernels(name);
    int ok = kernels != NULL;
    if (ok && (shape.hidden < 1 || shape.hidden > MAX_ROW || shape.num_heads < 1 || shape.num_kv_heads < 1 || shape.vocab < 1 ||
               shape.num_heads % shape.num_kv_heads || shape.head_dim < LANES || shape.head_dim % LANES ||
               shape.head_dim > MAX_HEAD_DIM || (int64_t)shape.num_heads * shape.head_dim > MAX_ROW ||
               !ropes_fit || shape.rope_dim > shape.head_dim)) {
        PyErr_SetString(PyExc_ValueError, "row size, head counts, head size or rope size out of range");
        ok = 0;
    }
    ProgramObject *self = ok ? (ProgramObject *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0) : NULL;
    if (self) {
        self->ropes = malloc((size_t)(magnitude.len + inverse.len));
        if (self->ropes) {
            memcpy(self->ropes, magnitude.buf, (size_t)magnitude.len);
            memcpy(self->ropes + ropes, inverse.buf, (size_t)inverse.len);
        } else {
            Py_CLEAR(self);
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&inverse);
    PyBuffer_Release(&magnitude);
    if (!self) return NULL;
    shape.rope_magnitude = self->ropes;
    shape.rope_inverse = self->ropes + ropes;
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
    free(self->ropes);
    scratch_free(self->program.scratch);
    free_object(object);
}

/* Makes room for one operation and its buffers; forgets what was sized for the operations before, and what an
 * operation that was refused has left.
 */
static Operation *next_operation(ProgramObject *self, OperationKind kind) {
    const int buffers_each = 1 + 1 + 2 + 2 * MAX_PARTS; /* norms and post norms, head norms, weights and biases */
    if (atomic_flag_test_and_set(&self->running)) {
        PyErr_SetString(PyExc_RuntimeError, "the program is running");
        return NULL;
    }
    atomic_flag_clear(&self->running); /* the GIL keeps it from being run while it is added to */
    scratch_free(self->program.scratch);
    self->program.scratch = NULL;
    while (self->num_buffers > self->kept_buffers) PyBuffer_Release(self->buffers + --self->num_buffers);
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

/* As read_vector; NULL for None. */
static int read_optional_vector(ProgramObject *self, PyObject *object, int64_t count, const float **out) {
    return object == Py_None || read_vector(self, object, count, out);
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

static int cap_ok(float cap) {
    if (cap >= 0.0f && cap < INFINITY) return 1;
    return fail(PyExc_ValueError, "a soft cap is 0 or a positive number") != NULL;
}

static PyObject *publish(ProgramObject *self) {
    self->program.num_operations++;
    self->kept_buffers = self->num_buffers;
    Py_RETURN_NONE;
}

static PyObject *add_embed(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *table;
    float scale;
    if (!PyArg_ParseTuple(args, "Of", &table, &scale)) return NULL;
    Operation *op = next_operation(self, EMBED);
    if (!op || !read_matrix(self, table, shape->vocab, shape->hidden, op->weights)) return NULL;
    op->scale = scale;
    return publish(self);
}

static PyObject *add_attention_input(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *weights[3], *bias[3], *head_norm[2];
    int layer, rope;
    float eps;
    if (!PyArg_ParseTuple(args, "iOfOOOOOOOOi", &layer, &norm, &eps, &weights[0], &weights[1], &weights[2], &bias[0],
                          &bias[1], &bias[2], &head_norm[0], &head_norm[1], &rope) ||
        !layer_ok(layer))
        return NULL;
    if (rope < 0 || rope >= shape->num_ropes) return fail(PyExc_ValueError, "the program has no such rope");
    Operation *op = next_operation(self, ATTENTION_INPUT);
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm)) return NULL;
    op->layer = layer;
    op->rope = rope;
    op->eps = eps;
    for (int part = QUERY; part <= KEY; part++)
        if (!read_optional_vector(self, head_norm[part], shape->head_dim, op->head_norm + part)) return NULL;
    for (int part = QUERY; part <= VALUE; part++) {
        int rows = (part == QUERY ? shape->num_heads : shape->num_kv_heads) * shape->head_dim;
        if (!read_matrix(self, weights[part], rows, shape->hidden, op->weights + part) ||
            !read_optional_vector(self, bias[part], rows, op->bias + part))
            return NULL;
    }
    return publish(self);
}

static PyObject *add_attention(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    int layer, window;
    float soft_cap;
    if (!PyArg_ParseTuple(args, "iif", &layer, &window, &soft_cap) || !layer_ok(layer) || !cap_ok(soft_cap)) return NULL;
    if (window < 0) return fail(PyExc_ValueError, "a window has 0 positions or more");
    Operation *op = next_operation(self, ATTENTION);
    if (!op) return NULL;
    op->layer = layer;
    op->window = window;
    op->soft_cap = soft_cap;
    return publish(self);
}

static PyObject *add_attention_output(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *weights, *post_norm;
    float post_eps;
    if (!PyArg_ParseTuple(args, "OOf", &weights, &post_norm, &post_eps)) return NULL;
    Operation *op = next_operation(self, ATTENTION_OUTPUT);
    if (!op || !read_optional_vector(self, post_norm, shape->hidden, &op->post_norm) ||
        !read_matrix(self, weights, shape->hidden, (int64_t)shape->num_heads * shape->head_dim, op->weights))
        return NULL;
    op->post_eps = post_eps;
    return publish(self);
}

static GateKernel gate_kernel(const KernelSet *kernels, const char *activation) {
    if (!strcmp(activation, "silu")) return kernels->silu_mul;
    if (!strcmp(activation, "gelu")) return kernels->gelu_mul;
    PyErr_Format(PyExc_ValueError, "there is no activation '%s'", activation);
    return NULL;
}

static PyObject *add_feed_forward(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *gate, *up, *down, *post_norm;
    const char *activation;
    float eps, post_eps;
    if (!PyArg_ParseTuple(args, "OfOOOsOf", &norm, &eps, &gate, &up, &down, &activation, &post_norm, &post_eps))
        return NULL;
    GateKernel kernel = gate_kernel(self->program.kernels, activation);
    Operation *op = kernel ? next_operation(self, FEED_FORWARD) : NULL;
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm) ||
        !read_optional_vector(self, post_norm, shape->hidden, &op->post_norm) ||
        !read_matrix(self, gate, 0, shape->hidden, op->weights + GATE) ||
        !read_matrix(self, up, op->weights[GATE].rows, shape->hidden, op->weights + UP) ||
        !read_matrix(self, down, shape->hidden, op->weights[GATE].rows, op->weights + DOWN))
        return NULL;
    op->gate = kernel;
    op->eps = eps;
    op->post_eps = post_eps;
    return publish(self);
}

static PyObject *add_logits(PyObject *object, PyObject *args) {
    ProgramObject *self = (ProgramObject *)object;
    const ModelShape *shape = &self->program.shape;
    PyObject *norm, *head;
    float eps, soft_cap;
    if (!PyArg_ParseTuple(args, "OfOf", &norm, &eps, &head, &soft_cap) || !cap_ok(soft_cap)) return NULL;
    Operation *op = next_operation(self, LOGITS);
    if (!op || !read_vector(self, norm, shape->hidden, &op->norm) ||
        !read_matrix(self, head, shape->vocab, shape->hidden, op->weights))
        return NULL;
    op->eps = eps;
    op->soft_cap = soft_cap;
    return publish(self);
}

static PyMethodDef program_methods[] = {
    {"add_embed", add_embed, METH_VARARGS, "add_embed(table, scale)"},
    {"add_attention_input", add_attention_input, METH_VARARGS,
     "add_attention_input(layer, norm, eps, wq, wk, wv, bq, bk, bv, query_norm, key_norm, rope)"},
    {"add_attention", add_attention, METH_VARARGS, "add_attention(layer, window, soft_cap)"},
    {"add_attention_output", add_attention_output, METH_VARARGS, "add_attention_output(weights, post_norm, post_eps)"},
    {"add_feed_forward", add_feed_forward, METH_VARARGS,
     "add_feed_forward(norm, eps, gate, up, down, activation, post_norm, post_eps)"},
    {"add_logits", add_logits, METH_VARARGS, "add_logits(norm, eps, head, soft_cap)"},
    {"run", program_run_step, METH_VARARGS,
     "run(pool, tokens, positions, contexts, writes, page_table, max_pages, layout, slabs, pages_per_slab, logit_rows, "
     "logits, control) -> False if cancelled"},
    {NULL, NULL, 0, NULL}};

static PyType_Slot program_slots[] = {{Py_tp_new, program_new},
                                      {Py_tp_dealloc, program_free},
                                      {Py_tp_methods, program_methods},
                                      {Py_tp_doc, "Program(kernel_set, hidden, num_heads, num_kv_heads, head_dim, vocab, "
                                                  "rope_interleaved, rope_inverse, rope_magnitudes, attention_scale)"},
                                      {0, NULL}};

PyType_Spec program_spec = {"llamay.mlx_kernels._cpu.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT,
                                   program_slots};

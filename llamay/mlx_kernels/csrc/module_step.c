/* Runs a program on a step that Python describes: arrays are held and checked, then the GIL is released. */
#include "module_program.h"

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

PyObject *program_run_step(PyObject *object, PyObject *args) {
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

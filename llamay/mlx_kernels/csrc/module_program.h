/* The type Program (module_program.c), and how it runs a step (module_step.c). */
#ifndef LLAMAY_MODULE_PROGRAM_H
#define LLAMAY_MODULE_PROGRAM_H

#include "module.h"
#include "program.h"

typedef struct {
    PyObject_HEAD
    Program program;
    int capacity, num_buffers, kept_buffers; /* kept: of complete operations */
    Py_buffer *buffers; /* packed weights, held for the life of the program */
    double *ropes; /* magnitudes, then what each turns by */
    atomic_flag running;
} ProgramObject;

/* The method `run`. */
PyObject *program_run_step(PyObject *object, PyObject *args);

#endif

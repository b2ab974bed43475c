"""The text that MLX compiles for a custom kernel: its parameters, around the body given.

MLX looks for attributes and for an input's `_shape`, `_strides` and `_ndim` by substring, comments
included; inputs of fewer than 8 elements are `constant`, larger ones `device`; those without
dimensions are references. test_signature.py compares with what MLX itself writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import mlx.core as mx

Template: TypeAlias = Sequence[tuple[str, bool | int | mx.Dtype]]

CONSTANT_BELOW = 8  # elements

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
}

ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}


@dataclass(frozen=True)
class Kernel:
    """What `mx.fast.metal_kernel` is given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class Operand:
    """What a variant depends on of an input."""

    dtype: mx.Dtype
    ndim: int
    constant: bool

    @classmethod
    def of(cls, array: mx.array) -> "Operand":
        return cls(array.dtype, array.ndim, array.size < CONSTANT_BELOW)


@dataclass(frozen=True)
class Parameter:
    """A buffer of the kernel's function: `kind` of the input or output `name`, of this C type."""

    kind: str  # input, output, shape, strides, ndim
    name: str
    type_name: str
    reference: bool


@dataclass(frozen=True)
class Variant:
    """One instance of a kernel: the whole text, and how its function is called."""

    text: str
    function: str  # template arguments included
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]


def template_arguments(template: Template) -> str:
    values = (TYPE_NAMES[v] if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template)
    return ", ".join(values)


def template_parameters(template: Template) -> str:
    def kind(value: bool | int | mx.Dtype) -> str:
        if isinstance(value, mx.Dtype):
            return "typename"
        return "bool" if isinstance(value, bool) else "int"

    return ", ".join(f"{kind(value)} {name}" for name, value in template)


def function_name(
    kernel: Kernel, operands: Sequence[Operand], outputs: Sequence[mx.Dtype], template: Template
) -> str:
    name = f"custom_kernel_{kernel.name}"
    if template:
        name += "__" + template_arguments(template).replace(", ", "_").replace("-", "_")
    for operand in operands:
        suffix = "s" if operand.ndim == 0 else "c" if operand.constant else ""
        name += f"_{TYPE_NAMES[operand.dtype]}{suffix}"
    for dtype in outputs:
        name += f"_{TYPE_NAMES[dtype]}"
    return name


def input_parameters(kernel: Kernel, operands: Sequence[Operand]) -> list[Parameter]:
    """Each input, followed by what the source names of its form."""
    parameters = []
    for name, operand in zip(kernel.input_names, operands, strict=True):
        scalar = operand.ndim == 0
        parameters.append(Parameter("input", name, TYPE_NAMES[operand.dtype], scalar))
        for kind, type_name in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
            if not scalar and f"{name}_{kind}" in kernel.source:
                parameters.append(Parameter(kind, name, type_name, kind == "ndim"))
    return parameters


def output_parameters(kernel: Kernel, outputs: Sequence[mx.Dtype]) -> list[Parameter]:
    parameters = []
    for name, dtype in zip(kernel.output_names, outputs, strict=True):
        type_name = TYPE_NAMES[dtype]
        if kernel.atomic_outputs:
            type_name = f"atomic<{type_name}>"
        parameters.append(Parameter("output", name, type_name, False))
    return parameters


def declarations(parameters: Sequence[Parameter], constant_inputs: set[str]) -> list[str]:
    lines = []
    for index, parameter in enumerate(parameters):
        sign = "&" if parameter.reference else "*"
        name = parameter.name
        if parameter.kind == "output":
            start = "device"
        elif parameter.kind == "input":
            start = "const constant" if name in constant_inputs else "const device"
        else:
            start = "const constant"
            name += f"_{parameter.kind}"
        lines.append(f"  {start} {parameter.type_name}{sign} {name} [[buffer({index})]]")
    return lines


def variant_of(
    kernel: Kernel, operands: Sequence[Operand], outputs: Sequence[mx.Dtype], template: Template
) -> Variant:
    """The variant for inputs like `operands`.

    outputs: dtypes; template: names and values in the order given to MLX
    """
    parameters = input_parameters(kernel, operands) + output_parameters(kernel, outputs)
    constants = {n for n, o in zip(kernel.input_names, operands, strict=True) if o.constant}
    attributes = [name for name in ATTRIBUTES if name in kernel.source]
    lines = declarations(parameters, constants)
    lines += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in attributes]
    name = function_name(kernel, operands, outputs, template)
    text = kernel.header
    if template:
        text += f"template <{template_parameters(template)}>\n"
    text += f"[[kernel]] void {name}(\n" + ",\n".join(lines) + ") {\n" + kernel.source + "\n}\n"
    function = name
    if template:
        function += f"<{template_arguments(template)}>"
        text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({function}) {function};\n'
    return Variant(text, function, tuple(parameters), tuple(attributes))

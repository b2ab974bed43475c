"""Compiles a kernel's text to a library for this machine, with g++ and the headers in shim/.

$CXX names another g++; on arm64 it must be version 13 or newer, which has 16-bit floats.

Libraries are kept in $LLAMAY_METAL_CACHE, by default build/metal, under the digest of all that they
are made from. $LLAMAY_METAL_OPTIMIZATION is another flag than -O3.
"""

import functools
import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path

import mlx.core as mx

from tests.metal.signature import Parameter, Variant

HERE = Path(__file__).resolve().parent
SHIM = HERE / "shim"
CACHE = Path(os.environ.get("LLAMAY_METAL_CACHE") or HERE.parents[1] / "build" / "metal")
MLX_HEADERS = Path(mx.__file__).parent / "include"

COMPILER = [
    os.environ.get("CXX", "g++"),
    "-std=c++20",
    os.environ.get("LLAMAY_METAL_OPTIMIZATION", "-O3"),
    "-g1",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wextra",
]
COMPILER += ["-fexcess-precision=16", "-fno-strict-aliasing", "-fsigned-char"]
COMPILER += ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
KERNEL_FLAGS = ["-ffp-contract=off"]
KERNEL_FLAGS += ["-fsanitize=bounds,alignment,integer-divide-by-zero,float-cast-overflow"]
KERNEL_FLAGS += [
    "-fno-sanitize-recover=all",
    "-fno-exceptions",
    "-nodefaultlibs",
    "-lm",
    "-lc",
    "-lgcc",
]
KERNEL_FLAGS += ["-ftrivial-auto-var-init=pattern", "-Wno-literal-suffix", "-Wno-attributes"]
KERNEL_FLAGS += ["-Wno-unknown-pragmas"]

if os.environ.get("LLAMAY_METAL_RACES"):
    KERNEL_FLAGS += ["-fsanitize=thread"]  # see shim/races.h

# `threadgroup T a[N], b;`: the type, then its declarators. Pointers are none of these.
DECLARATION = re.compile(
    r"\bthreadgroup\s+"
    r"((?:alignas\s*\([^;]*?\)\s*)?[A-Za-z_][\w:]*(?:\s*<[^;{}()]*?>)?)\s+"
    r"([A-Za-z_]\w*\s*(?:\[[^\];]*\]\s*)*(?:,\s*[A-Za-z_]\w*\s*(?:\[[^\];]*\]\s*)*)*);"
)


class MetalError(AssertionError):
    """A kernel that does not compile, or did what no kernel may."""


def split_outside_brackets(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<[({") - (character in ">])}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def bind_threadgroup_arrays(text: str) -> str:
    """`threadgroup T a[N];` -> `T (&a)[N] = host::ThreadgroupMemory<0>();`, the lines kept."""
    count = 0

    def bound(match: re.Match[str]) -> str:
        nonlocal count
        references = []
        for declarator in split_outside_brackets(match[2]):
            name, extents = re.fullmatch(r"\s*(\w+)(.*)", declarator, re.DOTALL).groups()
            memory = f"host::ThreadgroupMemory<{count}>()"
            references.append(f"{match[1]} (&{name}){extents} = {memory};")
            count += 1
        return " ".join(references)

    return DECLARATION.sub(bound, text)


def argument(index: int, parameter: Parameter) -> str:
    constant = "" if parameter.kind == "output" else "const "
    pointer = f"static_cast<{constant}{parameter.type_name}*>(buffers[{index}])"
    return f"*{pointer}" if parameter.reference else pointer


def program(variant: Variant) -> str:
    """The variant as C++: the shim, what MLX puts before every kernel, its text, an entry point."""
    arguments = [argument(i, parameter) for i, parameter in enumerate(variant.parameters)]
    arguments += [f"host::{name}()" for name in variant.attributes]
    return (
        '#include "metal.h"\n#include "mlx/backend/metal/kernels/utils.h"\n#line 1 "kernel"\n'
        + bind_threadgroup_arrays(variant.text)
        + '\n#line 1 "entry point"\n#pragma GCC diagnostic ignored "-Wcast-qual"\n'
        + 'extern "C" void run(void* const* buffers) {\n'
        + f"    (void)buffers;\n    ::{variant.function}({', '.join(arguments)});\n}}\n"
    )


def digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]


@functools.cache
def fixed_ingredients() -> str:
    """What all libraries are made from."""
    headers = [path.read_text() for path in sorted(SHIM.rglob("*")) if path.is_file()]
    version = subprocess.check_output([COMPILER[0], "--version"], text=True)
    return digest(*headers, version, mx.__version__, platform.machine())


def library(source: str, flags: list[str]) -> Path:
    """The library made from C++ source, compiled unless it is there. Raises MetalError."""
    name = digest(fixed_ingredients(), source, *COMPILER, *flags)
    path = CACHE / f"{name}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        source_path = CACHE / f"{name}.cpp"
        source_path.write_text(source)
        part = path.with_suffix(f".{os.getpid()}")
        command = [*COMPILER, *flags, f"-I{SHIM}", f"-I{SHIM / 'preamble'}", f"-I{MLX_HEADERS}"]
        command += ["-o", str(part), str(source_path)]
        result = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if result.returncode:
            raise MetalError(f"{source_path} does not compile:\n{result.stdout[:8000]}")
        part.replace(path)
    return path


def runtime_library() -> Path:
    return library((SHIM / "runtime.cpp").read_text(), [])


def kernel_library(variant: Variant) -> Path:
    return library(program(variant), KERNEL_FLAGS)


def source_line(kernel: Path, program_counter: int) -> int:
    """The line of the kernel's text, or 0 if it cannot be known."""
    command = ["addr2line", "-i", "-e", str(kernel), hex(program_counter)]
    places = subprocess.run(command, text=True, stdout=subprocess.PIPE).stdout
    lines = re.findall(r"(?:^|/)kernel:(\d+)", places, re.MULTILINE)
    return int(lines[0]) if lines else 0

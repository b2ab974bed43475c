"""Checks a kernel's text with clang, which knows address spaces; g++ does not.

It runs if $LLAMAY_METAL_CLANG names a clang of version 16 or newer (scripts/check_metal does), on
every variant that is compiled.
"""

import os
import re
import shlex
import subprocess

from tests.metal.compiler import CACHE, DECLARATION, HERE, MetalError, digest
from tests.metal.signature import Variant

SHIM = HERE / "shim_clang"
FLAGS = ["-x", "c++", "-std=c++14", "-fsyntax-only", "-Werror", f"-I{SHIM}"]
FLAGS += [
    "-Wno-unknown-attributes",
    "-Wno-ignored-attributes",
    "-Wno-reserved-user-defined-literal",
]

# What a template's instantiation has in Metal only.
HOST_NAME = re.compile(r"template \[\[host_name\([^\n]*\)\]\] \[\[kernel\]\]")


def program(text: str) -> str:
    """The text with what clang does not take: arrays with an address space are static there."""
    text = DECLARATION.sub(lambda match: f"static {match[0]}", HOST_NAME.sub("template", text))
    return '#include "metal.h"\n#line 1 "kernel"\n' + re.sub(r"#include <metal_\w+>", "", text)


def check_address_spaces(variant: Variant) -> None:
    """Raises MetalError if clang refuses the text. Texts that passed are remembered."""
    command = os.environ.get("LLAMAY_METAL_CLANG")
    if not command:
        return
    source = program(variant.text)
    passed = CACHE / f"{digest(source, command, (SHIM / 'metal.h').read_text())}.passed"
    if passed.exists():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        [*shlex.split(command), *FLAGS, "-"],
        input=source,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if result.returncode:
        raise MetalError(f"clang refuses {variant.function}:\n{result.stdout[:8000]}")
    passed.touch()

"""Compiles the C extension that pyproject.toml declares, with any compiler.

    build_extension.py OUTPUT [--add=FLAG]... [--linker=PROGRAM] -- COMPILER [ARGUMENT]...

Sources, macros and flags are those of the `ext-modules` table; --add's flags follow them, when
compiling and when linking. Objects are kept in OUTPUT.objects, and made again if their command,
source or a header changed.
"""

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def extension_table() -> dict[str, list[str]]:
    """The one entry of `ext-modules`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (table,) = project["tool"]["setuptools"]["ext-modules"]
    macros = [f"-D{name}={value}" for name, value in table["define-macros"]]
    return {**table, "extra-compile-args": [*macros, *table["extra-compile-args"]]}


def run(command: list[str]) -> None:
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"failed: {shlex.join(command)}")


def compile_object(command: list[str], source: str, headers: list[str], target: Path) -> None:
    """Compiles `source` to `target`, unless target's stamp says that nothing changed."""
    key = hashlib.sha256(repr(command).encode())
    for name in [source, *headers]:
        key.update((ROOT / name).read_bytes())
    stamp = target.with_suffix(".stamp")
    if target.exists() and stamp.exists() and stamp.read_text() == key.hexdigest():
        return
    run([*command, "-c", source, "-o", str(target)])
    stamp.write_text(key.hexdigest())


def build(output: Path, compiler: list[str], linker: list[str], added: list[str]) -> None:
    """Writes the shared library `output`."""
    table = extension_table()
    folder = output.with_name(output.name + ".objects")
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{Path(source).stem}.o" for source in table["sources"]]
    command = [*compiler, *table["extra-compile-args"], "-fPIC", *added]
    with ThreadPoolExecutor(os.cpu_count()) as executor:
        jobs = [
            executor.submit(compile_object, command, source, table["depends"], target)
            for source, target in zip(table["sources"], objects, strict=True)
        ]
        for job in jobs:
            job.result()
    inputs = [str(path) for path in objects]
    run([*linker, "-shared", *added, *inputs, *table["extra-link-args"], "-o", str(output)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--add", action="append", default=[], metavar="FLAG")
    parser.add_argument("--linker", help="default: the compiler")
    parser.add_argument("compiler", nargs="+")
    arguments = parser.parse_args()
    linker = [arguments.linker] if arguments.linker else arguments.compiler
    build(arguments.output.absolute(), arguments.compiler, linker, arguments.add)


if __name__ == "__main__":
    main()

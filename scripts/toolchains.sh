# shellcheck shell=bash
# Other compilers and sanitizers than the machine's own build; sourced after env.sh.
# What is downloaded is kept in $TOOLCHAINS, shared by all clones; what is built, in build/.

TOOLCHAINS=${XDG_CACHE_HOME:-$HOME/.cache}/llamay-toolchains
ZIG_VERSION=0.17.1

# skip_or_die WHAT: ends the script; in success if $SKIP_MISSING is set.
skip_or_die() {
    [ -n "${SKIP_MISSING:-}" ] || die "$*"
    say "skipped: $*"
    exit 0
}

# read_flags ARGUMENT...: the scripts' one flag.
read_flags() {
    local flag
    for flag in "$@"; do
        case $flag in
        --skip-missing) SKIP_MISSING=1 ;;
        *) die "unknown argument $flag; --skip-missing skips what this machine lacks the tools for" ;;
        esac
    done
}

# need_programs "PROGRAM PACKAGE"...: programs, and the Debian packages that have them.
need_programs() {
    local pair missing=()
    for pair in "$@"; do
        command -v "${pair% *}" >/dev/null || missing+=("${pair#* }")
    done
    [ ${#missing[@]} = 0 ] || install_debian "${missing[@]}" ||
        skip_or_die "install the Debian packages ${missing[*]}"
}

# need_zig: a clang that compiles for every system, as a Python wheel; leaves it in ${ZIG[@]}.
need_zig() {
    local folder=$TOOLCHAINS/zig-$ZIG_VERSION
    if [ ! -d "$folder" ]; then
        say "installing zig $ZIG_VERSION (about 100 MB)"
        rm -rf "$folder.part"
        pip_install --target "$folder.part" "ziglang==$ZIG_VERSION"
        mv "$folder.part" "$folder"
    fi
    export ZIG_GLOBAL_CACHE_DIR=$TOOLCHAINS/zig-cache
    ZIG=("$folder/ziglang/zig" cc)
}

# python_headers: prints a folder with the headers of this Python, fit for other systems too.
# Debian's pyconfig.h looks for the machine's own in another folder and knows Linux only.
python_headers() {
    local folder=$ROOT/build/python-headers
    "$PYTHON" - "$folder" <<'END' || die "Python's headers could not be copied to $folder"
import pathlib, shutil, sys, sysconfig

source, target = pathlib.Path(sysconfig.get_path("include")), pathlib.Path(sys.argv[1])
shutil.copytree(source, target, dirs_exist_ok=True)
elsewhere = source.parent / str(sysconfig.get_config_var("MULTIARCH")) / source.name / "pyconfig.h"
if elsewhere.exists():
    shutil.copy(elsewhere, target)
END
    echo "$folder"
}

# build_extension OUTPUT FLAG... -- COMPILER...: see build_extension.py.
build_extension() {
    local output=$1
    shift
    "$PYTHON" "$ROOT/scripts/build_extension.py" "$output" --add="-I$(python_headers)" "$@" ||
        die "$(basename "$output") could not be built"
}

# copy_tree FOLDER EXTENSION: the package and its tests, with EXTENSION in place of this machine's.
copy_tree() {
    rm -rf "$1"
    mkdir -p "$1"
    cp -R "$ROOT/pyproject.toml" "$ROOT/llamay" "$ROOT/tests" "$ROOT/testdata" "$1/"
    rm -f "$1"/llamay/mlx_kernels/_cpu.*.so
    cp "$2" "$1/llamay/mlx_kernels/_cpu.abi3.so"
}

# native_digests FILE: of the extension that is installed.
native_digests() { (cd "$ROOT" && "$PYTHON" -m tests.mlx_kernels.digests) >"$1"; }

# compare_digests FILE...: fails unless they agree.
compare_digests() { (cd "$ROOT" && "$PYTHON" -m tests.mlx_kernels.digests compare "$@"); }

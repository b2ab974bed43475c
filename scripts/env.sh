# shellcheck shell=bash
# Set-up shared by the scripts; sourced, not run. Leaves the environment's Python in $PYTHON.
# Everything it prints goes to stderr. It works with bash 3.2, which macOS has.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PYTHON=$VENV/bin/python

say() { echo "llamay: $*" >&2; }

die() {
    say "$*"
    exit 1
}

# may_apt: whether Debian packages can be installed here.
may_apt() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# alone COMMAND...: runs it when no other script installs something.
alone() {
    if [ -n "${LLAMAY_ALONE:-}" ] || ! command -v flock >/dev/null; then
        "$@"
        return
    fi
    mkdir -p "$ROOT/build"
    (
        flock 8
        LLAMAY_ALONE=1 "$@"
    ) 8>"$ROOT/build/.installing"
}

# install_debian PACKAGE...: installs them where it may; fails if it may not or cannot.
install_debian() {
    may_apt || return 1
    say "installing Debian packages: $*"
    alone apt_install "$@" >&2
}

apt_install() {
    apt-get update -qq || true # an old list of packages may do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# find_python: prints the first Python that is new enough.
find_python() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed and none of python3, python3.14 ... python3.11 is; install one"
}

make_venv() {
    local python
    python=$(find_python)
    say "making a virtual environment in .venv with $python"
    rm -rf "$VENV"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        install_debian python3-venv ||
            die "$python cannot make virtual environments; install its venv module (Debian: python3-venv)"
    fi
    "$python" -m venv "$VENV" >&2 || die "$python could not make a virtual environment in .venv"
}

# need_compiler: the C extension is built on the machine, with $CC, else the compiler that Python was
# built with, else any other.
need_compiler() {
    local compiler
    compiler=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("CC").split()[0])')
    if [ -z "${CC:-}" ] && ! command -v "$compiler" >/dev/null; then
        for compiler in cc gcc clang; do
            command -v "$compiler" >/dev/null && export CC=$compiler && break
        done
        [ -n "${CC:-}" ] || install_debian gcc libc6-dev ||
            die "a C compiler is needed; install one (Debian: gcc and libc6-dev, macOS: xcode-select --install)"
    fi
    local include
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] || install_debian python3-dev ||
        die "$include/Python.h is missing; install Python's headers (Debian: python3-dev)"
}

# fingerprint: changes when what is installed is no longer what the project asks for.
fingerprint() {
    cd "$ROOT" || return
    echo "$ROOT" # an editable install holds the path
    cksum pyproject.toml llamay/mlx_kernels/csrc/*
}

# setup [GROUP]: makes the environment and installs llamay, and the dependency group GROUP,
# unless that was done before and nothing has changed since.
setup() { alone install_llamay "$@"; }

install_llamay() {
    local stamp=$VENV/.llamay wanted
    wanted=$(fingerprint)
    "$PYTHON" -c '' 2>/dev/null || make_venv
    if ! up_to_date "$stamp" "$wanted"; then
        need_compiler
        say "installing into .venv (some minutes the first time)"
        # pip learnt dependency groups in 25.1.
        pip_install --upgrade "pip>=25.1"
        pip_install --editable .
        # pip compiles what it copies only, and where bytecode is not written every start would compile.
        "$PYTHON" -m compileall -q "$ROOT/llamay"
        echo "$wanted" >"$stamp"
    fi
    if [ -n "${1:-}" ] && ! up_to_date "$stamp-$1" "$wanted"; then
        pip_install --group "$1"
        echo "$wanted" >"$stamp-$1"
    fi
}

up_to_date() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

# pip_install ARGUMENT...: shows what pip says only if it fails; then the script ends.
pip_install() {
    local log=$VENV/.llamay-install.log
    if ! (cd "$ROOT" && "$PYTHON" -m pip install --progress-bar off "$@") >"$log" 2>&1; then
        cat "$log" >&2
        die "the installation failed; pip says above why"
    fi
}

# pull_default_model: fetches the default model if it is not here; fails if it cannot.
pull_default_model() { "$PYTHON" -m llamay pull smollm2:135m >&2; }

# Sourced by other scripts: creates and updates the virtual environment in .venv.
#
# prepare_environment EXTRAS [pip arguments]
#   EXTRAS is "" or e.g. "[dev]". Installs only if its inputs have changed: edits of Python files take effect
#   at once, new and moved files need an install.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # images of containers set it; every process would compile all modules again

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed (Debian, Ubuntu: apt install python3 python3-venv python3-dev)"
}

# A checksum of the install's inputs.
installed_from() {
    {
        echo "$*"
        cat pyproject.toml
        find app engine models ui -name '*.py' | sort
        find native -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat
    } | sha256sum
}

prepare_environment() {
    local extras="$1" python wanted
    shift
    command -v c++ >/dev/null || fail "a C++ compiler is needed (Debian, Ubuntu: apt install g++)"
    if [ ! -x .venv/bin/pip ]; then
        python=$(find_python)
        echo "Making a virtual environment in .venv …"
        "$python" -m venv .venv ||
            fail "the virtual environment could not be made (Debian, Ubuntu: apt install python3-venv)"
    fi
    wanted=$(installed_from "$@")
    if [ "$(cat ".venv/installed$extras" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing neo-desktop$extras; the first time, this takes some minutes …"
        .venv/bin/pip install --quiet --disable-pip-version-check "$@" -e ".$extras" ||
            fail "the installation failed, see above"
        echo "$wanted" | tee ".venv/installed$extras" > .venv/installed
    fi
}

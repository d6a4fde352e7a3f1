# Shared set-up of scripts/demo and scripts/test; sourced, never run. Makes .venv if there is none and installs the project editable.
# PYTHON (default python3) makes the environment; it is not used once .venv exists.

project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$project/.venv"
python="$venv/bin/python"
# The version that is tested, on CPU and GPU machines alike: kernels are compiled by the NVRTC that a torch release brings, so one pin means
# the same cubins everywhere. On Linux x86_64 it is the CUDA 13 build; an index of CPU builds (PIP_INDEX_URL, PIP_FIND_LINKS) saves 2 GB.
torch_requirement="torch==2.13.0"
# Of its dependencies the tests need few (pyproject.toml, extra `test`); the rest brings 40 packages. Python >= 3.11.
torchtitan_requirement="torchtitan==0.3.0"

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# Checks everything that pip cannot install, and names all of it at once.
require_system() {
  local host="${PYTHON:-python3}" missing=() packages=()
  if [[ -x $python ]]; then host="$python"; fi # an existing environment builds with its own Python
  command -v "$host" >/dev/null || die "no $host on PATH; Python 3.10 or newer is needed (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev gcc)."
  "$host" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$host is $("$host" -c 'import platform; print(platform.python_version())'), but Python 3.10 or newer is needed; name another with PYTHON=..."
  if [[ ! -x $python ]] && ! "$host" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=("the venv module") packages+=(python3-venv)
  fi
  if ! "$host" -c 'import os, sys, sysconfig; sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))'; then
    missing+=("Python.h") packages+=(python3-dev)
  fi
  # What setuptools will call: CC, else the compiler that built Python.
  if ! command -v "$("$host" -c 'import os, shlex, sysconfig; print(shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0])')" >/dev/null; then
    missing+=("a C compiler") packages+=(gcc)
  fi
  if ((${#missing[@]})); then
    local list
    list="$(printf '%s, ' "${missing[@]}")"
    die "missing: ${list%, } (Debian, Ubuntu: apt-get install ${packages[*]})."
  fi
}

# One hash over names and contents; the project's place counts because an editable install holds it.
digest() {
  (cd "$project" && find "$@" -type f -print0 | sort -z | xargs -0 sha256sum && pwd) | sha256sum | cut -d' ' -f1
}

pip_install() {
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
}

# install EXTRAS: everything from an empty venv on. Dependencies are read from pyproject.toml by pip.
install() {
  require_system
  echo "Setting up $venv (minutes the first time, seconds later)" >&2
  # Also repairs a half-made one; an existing one keeps its packages.
  "$python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv "$venv"
  pip_install --upgrade "pip>=23.1" "setuptools>=77" wheel
  # First, so that no other requirement decides which torch comes.
  pip_install "$torch_requirement"
  # Without isolation: the environment already has what the build needs. setuptools warns of every editable install; nothing to act on.
  PYTHONWARNINGS=ignore pip_install --no-build-isolation --editable "$project[$1]"
  if [[ ,$1, == *,test,* ]] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    pip_install --no-deps "$torchtitan_requirement"
  fi
}

# ensure_environment demo|test: does what has changed since last time, nothing else.
ensure_environment() {
  local stamp="$venv/deep_gemm.$1.stamp" wanted_install wanted_build
  mkdir -p "$project/build"
  exec 9>"$project/build/environment.lock"
  flock 9 # two scripts at once: the second finds the work done
  wanted_install="$torch_requirement $(digest pyproject.toml setup.py third-party scripts/_env.sh scripts/fetch_headers.py)"
  wanted_build="$(digest setup.py csrc deep_gemm/include/deep_gemm/layout deep_gemm/include/deep_gemm/schedule)"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$wanted_install" ]]; then
    # What the tests need includes what the demo needs.
    if [[ $1 == test ]]; then install demo,test,compiler; else install demo; fi
    if [[ $1 == test ]]; then echo "$wanted_install" >"$venv/deep_gemm.demo.stamp"; fi
    echo "$wanted_install" >"$stamp"
    echo "$wanted_build" >"$venv/deep_gemm.build.stamp"
  elif [[ "$(cat "$venv/deep_gemm.build.stamp" 2>/dev/null)" != "$wanted_build" || ! -d $project/deep_gemm/include/third_party ]] ||
    ! compgen -G "$project/deep_gemm/_C*.so" >/dev/null; then
    require_system
    (cd "$project" && "$python" setup.py --quiet build_ext --inplace --force)
    echo "$wanted_build" >"$venv/deep_gemm.build.stamp"
  fi
  exec 9>&-
}

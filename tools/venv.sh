# Sourced by the other scripts: a virtual environment with this package in it, made once and reused.
#   CUTE_KERNELS_VENV    where (default: .venv in the repository)
#   CUTE_KERNELS_TORCH   which torch to install first (default: torch==2.13.0), so that the resolver never picks another
#   CUTE_KERNELS_PYTHON  the Python to make it with (default: python3; 3.10 or newer)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${CUTE_KERNELS_VENV:-$root/.venv}
cd "$root"

use_venv() { # use_venv EXTRAS
  local want="${CUTE_KERNELS_TORCH:-torch==2.13.0} [$1] $(cksum <pyproject.toml)"
  if [ ! -x "$venv/bin/python" ]; then
    echo "Making a virtual environment in $venv"
    "${CUTE_KERNELS_PYTHON:-python3}" -m venv "$venv" || {
      echo "Python's venv module is missing: install it (Debian, Ubuntu: apt-get install python3-venv) or set CUTE_KERNELS_VENV" >&2
      exit 1
    }
  fi
  if [ "$(cat "$venv/.cute_kernels-$1" 2>/dev/null)" != "$want" ]; then
    echo "Installing ${CUTE_KERNELS_TORCH:-torch==2.13.0} and cute-kernels[$1] (a few minutes the first time)"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check "${CUTE_KERNELS_TORCH:-torch==2.13.0}"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -e ".[$1]"
    printf '%s' "$want" >"$venv/.cute_kernels-$1"
  fi
}

#!/usr/bin/env bash
# The tests.
#   tools/test.sh             under 10 minutes on 2 cores
#   tools/test.sh --full      all shapes, schedules and faults; under 25 minutes (what CI runs)
#   tools/test.sh --nightly   everything
# Other arguments go to pytest.
set -euo pipefail
. "$(dirname "$0")/venv.sh"
use_venv test,inspect
published=tests/emulator/requirements.txt
if ! cmp -s "$published" "$venv/.cute_kernels-published"; then
  if "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "$published"; then
    cp "$published" "$venv/.cute_kernels-published"
  else
    echo "The published kernels could not be installed: their tests skip, with that reason"
  fi
fi
start=$(date +%s)
status=0
"$venv/bin/python" -m pytest "$@" || status=$?
echo "took $(( $(date +%s) - start )) s, exit status $status"
exit "$status"

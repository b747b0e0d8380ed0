#!/usr/bin/env bash
# The tests.
#   tools/test.sh             under 10 minutes on 2 cores
#   tools/test.sh --full      all shapes, schedules and faults; under 25 minutes (what CI runs)
#   tools/test.sh --nightly   everything
# Other arguments go to pytest. CUTE_KERNELS_TEST_WORKERS: processes (default 2; 0: in this one).
set -euo pipefail
. "$(dirname "$0")/venv.sh"
use_venv test,inspect,integrations
# Packages that others publish, without their dependencies: kernels that the emulator runs, clients of the integrations.
for list in emulator integrations; do
  published=tests/$list/requirements.txt
  if ! cmp -s "$published" "$venv/.cute_kernels-$list"; then
    if "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "$published"; then
      cp "$published" "$venv/.cute_kernels-$list"
    else
      echo "$published could not be installed: its tests skip, with that reason"
    fi
  fi
done
start=$(date +%s)
status=0
"$venv/bin/python" -m pytest -n "${CUTE_KERNELS_TEST_WORKERS:-2}" --dist worksteal "$@" || status=$?
echo "took $(( $(date +%s) - start )) s, exit status $status"
exit "$status"

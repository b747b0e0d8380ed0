#!/usr/bin/env bash
# The main job on any machine: sparse prefill, grouped and per token, then a decode loop, on a real text.
#   tools/demo.sh [--text FILE] [other options: tools/demo.sh --help]
set -euo pipefail
. "$(dirname "$0")/venv.sh"
use_venv inspect
exec "$venv/bin/python" tools/demo.py "$@"

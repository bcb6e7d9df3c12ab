#!/usr/bin/env bash
# Gives a copy that was made without copier its name, and removes what only copier needs:
#   scripts/rename.sh my-project
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-}
if ! [[ $name =~ ^[a-z0-9][a-z0-9._-]*$ ]]; then
  echo "error: scripts/rename.sh NAME: lower-case letters, digits, dots, hyphens and underscores, such as my-project" >&2
  exit 2
fi
if [ ! -f copier.yml ]; then
  echo "error: no copier.yml: this copy has its name, which is in pyproject.toml and in the first line of README.md" >&2
  exit 2
fi
sed -i "s/^name = .*/name = \"$name\"/" pyproject.toml
sed -i "1s/.*/# $name/; /^To make it yours: /,/^$/d" README.md
find . -type f -name '*.copier' -not -path './.venv/*' -delete
rm -r .copier copier.yml docs/copying.md tests/test_copier.py scripts/rename.sh
echo "$name: review with git status, then commit"

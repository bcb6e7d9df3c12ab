#!/usr/bin/env bash
# Runs sshd in a container, as the container's user, on port SSH_PORT (2222), so that
# scripts/launch.sh can connect to it. ~/.ssh must hold authorized_keys and host_key.
# docs/containers.md has the commands that make them.
set -euo pipefail
keys=$HOME/.ssh
for file in authorized_keys host_key; do
  if [ ! -r "$keys/$file" ]; then
    echo "error: cannot read $keys/$file; mount the folder with the job's keys there, see docs/containers.md" >&2
    exit 2
  fi
done
# sshd starts commands with a new environment: add the variables of the image and the GPU runtime.
exec /usr/sbin/sshd -D -e -f /dev/null -p "${SSH_PORT:-2222}" -h "$keys/host_key" \
  -o AuthorizedKeysFile="$keys/authorized_keys" -o StrictModes=no -o PasswordAuthentication=no \
  -o KbdInteractiveAuthentication=no -o PidFile=none -o MaxStartups=100 \
  -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"

"""The container image and its sshd.    pytest tests/kubernetes/test_container.py

CONTAINER_BASE=debian:12 pytest tests/kubernetes/test_container.py    also builds it, for 10 minutes
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from harness.processes import free_port, lacking, wait_until
from harness.repository import REPO, copy_repository, repository_files

DOCKERFILE = REPO / "deploy" / "Dockerfile"
LEFT_OUT = {"benchmarks", "docs", "tests"}
"""Folders that a run does not need."""
SECRET = "hunter2hunter2"
SECRETS = (
    ".env", ".git/config", ".deepspeed_env", ".netrc", "hostfile", "id_ed25519", "prod.env",
    "private.jsonl", "runs/a/metrics.jsonl", "wandb/debug.log", "ssh/host_key", "pip.conf",
    "scripts/.env", "deploy/prod.env", "deploy/tls.key", "deploy/tls.pem", "config/id_rsa",
    "data/.cache/tokens.arrow", "zerotrain/wandb/run.log", "zerotrain/__pycache__/x.pyc",
)  # fmt: skip
"""Files of a checkout that may hold secrets, data or settings of this machine."""


@pytest.fixture
def buildah(tmp_path):
    """A function that runs buildah with a new storage and returns its output."""
    if reason := lacking(["buildah"], "buildah"):
        pytest.skip(reason)
    storage = "--root", tmp_path / "root", "--runroot", tmp_path / "runroot"
    options = ["--storage-driver", "vfs", *storage]

    def run(*args, timeout=300):
        done = subprocess.run(
            ["buildah", *options, *args], cwd=REPO, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout.strip()

    yield run
    run("rm", "--all")


def test_the_image_gets_the_code_and_no_secrets(buildah, tmp_path):
    """The builder applies .dockerignore to a checkout that has all of these files."""
    files, context = repository_files(), tmp_path / "context"
    copy_repository(context)
    for name in SECRETS:
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text(SECRET)
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    buildah("bud", "-q", "-f", str(tmp_path / "Dockerfile"), "-t", "context", str(context))
    container = buildah("from", "localhost/context")
    image = Path(buildah("mount", container))
    inside = {str(path.relative_to(image)) for path in image.rglob("*") if path.is_file()}
    buildah("umount", container)
    folders = {name: name.split("/")[0] for name in files if "/" in name and name[0] != "."}
    code = {name for name, folder in folders.items() if folder not in LEFT_OUT}
    top = {name for name in inside if "/" not in name}
    assert inside - top == code, sorted((inside - top) ^ code)
    assert {"train.py", "requirements.txt", "requirements.lock"} <= top <= set(files), top


@pytest.fixture
def keys(tmp_path):
    """The folder of the job's keys. The commands of docs/containers.md make it."""
    text = (REPO / "docs" / "containers.md").read_text()
    block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
    (tmp_path / "home").mkdir()
    subprocess.run(["bash", "-euc", block[1]], cwd=tmp_path / "home", check=True)
    (tmp_path / "home" / "ssh").rename(tmp_path / "home" / ".ssh")
    return tmp_path / "home" / ".ssh"


def test_sshd_admits_only_the_job_s_key_and_passes_the_image_s_environment(keys):
    """The keys and the config are the documented ones."""
    if reason := lacking(["/usr/sbin/sshd"], "openssh-server"):
        pytest.skip(reason)
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    (keys / "config").write_text((keys / "config").read_text().replace("2222", port))
    env = {"HOME": str(keys.parent), "PATH": f"/here:{os.environ['PATH']}", "SSH_PORT": port,
           "LD_LIBRARY_PATH": "/driver"}  # fmt: skip
    script = REPO / "deploy" / "sshd.sh"
    nowhere = {**env, "HOME": "/nowhere"}
    missing = subprocess.run([script], env=nowhere, capture_output=True, text=True)
    assert missing.returncode == 2 and "cannot read /nowhere/.ssh/authorized_keys" in missing.stderr
    log = keys.parent / "log"
    with log.open("w") as file:
        sshd = subprocess.Popen([script], env=env, stderr=file)
    try:
        wait_until(lambda: f"port {port}" in log.read_text(), sshd)
        ssh = [
            "ssh", "-F", keys / "config", "-o", f"UserKnownHostsFile={keys / 'known_hosts'}",
            "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes",
        ]  # fmt: skip

        def entered(key):
            command = [*ssh, "-i", keys / key, "localhost", "echo $PATH $LD_LIBRARY_PATH"]
            return subprocess.run(command, capture_output=True, text=True)

        inside = entered("id_ed25519")
        assert "/here:" in inside.stdout and inside.stdout.endswith(" /driver\n"), inside
        assert "Permission denied (publickey)" in entered("host_key").stderr
    finally:
        sshd.terminate()
        sshd.wait()


@pytest.mark.launch
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    "CONTAINER_BASE" not in os.environ,
    reason="takes 10 minutes: set CONTAINER_BASE, to debian:12 for example",
)
def test_the_built_image_runs_the_demo():
    """It is in buildah's usual storage. CONTAINER_BUILD_ARGS has more arguments of `buildah bud`,
    for example --build-arg TORCH_INDEX=... or --secret id=pip_conf,src=...
    """
    arguments = shlex.split(os.environ.get("CONTAINER_BUILD_ARGS", ""))
    base = f"BASE={os.environ['CONTAINER_BASE']}"
    isolation = "--isolation", "chroot"  # works without systemd, so also in a container
    subprocess.run(
        ["buildah", "bud", *isolation, "-f", DOCKERFILE, "-t", "tried", "--build-arg", base,
         *arguments, REPO], check=True,
    )  # fmt: skip
    made = subprocess.run(["buildah", "from", "localhost/tried"], capture_output=True, text=True)
    name = made.stdout.strip()

    try:
        commands = "id -un; ls /etc/ssh /etc/pip.conf; ./scripts/demo.sh --train.steps 110"
        command = ["buildah", "run", *isolation, name, "--", "bash", "-c", commands]
        demo = subprocess.run(command, capture_output=True, text=True)
        assert demo.returncode == 0, demo.stdout + demo.stderr
        assert demo.stdout.startswith("trainer\n") and "ssh_host" not in demo.stdout
        assert "cannot access '/etc/pip.conf'" in demo.stderr
        assert re.search(r"^  checkpoint +runs/demo_\S+/step_00000110$", demo.stdout, re.MULTILINE)

    finally:
        subprocess.run(["buildah", "rm", name], check=True, stdout=subprocess.DEVNULL)

"""Hosts on one machine.

Each host has its own network, PID, mount and UTS namespaces, its own address and its own sshd. This
needs root and Debian packages, which `why_not` lists. Test files get the fixtures from here.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from harness import processes
from harness.processes import environment, lacking, wait_until
from harness.repository import REPO

# Simultaneous test runs have different names and addresses.
TAG = f"h{os.getpid() % 10**7}"
PREFIX = f"10.{64 + os.getpid() // 250 % 128}.{os.getpid() % 250}"
ALL = (1, 2, 3)
NEEDED = ("ip", "unshare", "ssh", "ssh-keygen", "pdsh", "rsync", "/usr/sbin/sshd")


def why_not():
    """Return why such hosts cannot be made here, None if they can."""
    probe = f"probe-{os.getpid()}"  # a name of its own, because several test processes ask
    if reason := lacking(NEEDED, "pdsh rsync openssh-server iproute2"):
        return reason
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return made.stderr or None


class Hosts:
    """node-1 and node-2 with addresses PREFIX.1 and PREFIX.2, and node-3, which a test may boot.
    This machine has PREFIX.254.
    """

    def __init__(self, folder):
        self.folder = folder
        self.ssh_config = folder / "ssh_config"
        self._processes: dict[int, subprocess.Popen] = {}

    def up(self):
        self.down()
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "id"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True
            )
        names = "".join(f"{PREFIX}.{i} node-{i}\n" for i in ALL)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        blocks = "".join(f"Host node-{i} {PREFIX}.{i}\n HostName {PREFIX}.{i}\n" for i in ALL)
        self.ssh_config.write_text(
            f"{blocks}Host *\n IdentityFile {self.folder}/id\n StrictHostKeyChecking no\n"
            f" UserKnownHostsFile {self.folder}/known_hosts\n LogLevel ERROR\n ConnectTimeout 5\n"
            " KexAlgorithms curve25519-sha256\n"  # the default takes 0.1 s of CPU per connection
        )
        sh(f"ip link add {TAG}br type bridge", f"ip addr add {PREFIX}.254/24 dev {TAG}br",
           f"ip link set {TAG}br up")  # fmt: skip
        for i in ALL:
            sh(f"ip netns add {TAG}{i}",
               f"ip link add {TAG}v{i} type veth peer name eth0 netns {TAG}{i}",
               f"ip link set {TAG}v{i} master {TAG}br", f"ip link set {TAG}v{i} up",
               f"ip -n {TAG}{i} addr add {PREFIX}.{i}/24 dev eth0",
               f"ip -n {TAG}{i} link set eth0 up", f"ip -n {TAG}{i} link set lo up",
               # An unconnected interface that is listed first, as docker0 is on many hosts.
               f"ip -n {TAG}{i} link add docker0 type bridge",
               f"ip -n {TAG}{i} addr add 172.17.0.1/16 dev docker0",
               f"ip -n {TAG}{i} link set docker0 up")  # fmt: skip
        self.revive()
        return self

    def boot(self, i, binds=None, environment=None):
        """Start or restart host i.

        Args:
            binds: {path: path to replace on this host}.
            environment: variables for the host's ssh sessions.
        """
        self.kill(i)
        mounts = {self.folder / "hosts": "/etc/hosts", **(binds or {})}
        script = [f"hostname node-{i}", "mount --make-rprivate /"]
        script.append("mount -t tmpfs -o size=2g tmpfs /dev/shm")  # each host has its own
        script += [f"mount --bind {new} {old}" for new, old in mounts.items()]
        options = {
            "ListenAddress": f"{PREFIX}.{i}:22",
            "AuthorizedKeysFile": self.folder / "id.pub",
            "PidFile": "none", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
            "MaxStartups": "100",
        }  # fmt: skip
        home = self.folder / "home"  # empty: a .bashrc may take half a second of each connection
        home.mkdir(exist_ok=True)
        variables = {"TORCHDYNAMO_DISABLE": 1, "HOME": home, **(environment or {})}
        options["SetEnv"] = " ".join(f"{k}={v}" for k, v in variables.items())
        flags = " ".join(f"-o '{k}={v}'" for k, v in options.items())
        script.append(f"exec /usr/sbin/sshd -D -f /dev/null -h {self.folder}/host {flags}")
        self._processes[i] = subprocess.Popen(
            ["ip", "netns", "exec", f"{TAG}{i}", "unshare", "--uts", "--pid", "--mount", "--fork",
             "--mount-proc", "--kill-child", "bash", "-euc", "\n".join(script)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        wait_until(lambda: self.answers(i), self._processes[i])

    def answers(self, i):
        return subprocess.run(self.ssh(i, "true"), capture_output=True).returncode == 0

    def revive(self):
        """Boot the hosts that an earlier test has left broken."""
        for i in (1, 2):
            self.mend(i)
            if not self.answers(i):
                self.boot(i)

    def ssh(self, i, command):
        return ["ssh", "-F", str(self.ssh_config), f"node-{i}", command]

    def run(self, i, command):
        """Run a command on host i and return its standard output."""
        return subprocess.run(self.ssh(i, command), capture_output=True, text=True).stdout

    def cut(self, i):
        sh(f"ip link set {TAG}v{i} down")

    def mend(self, i):
        sh(f"ip link set {TAG}v{i} up")

    def kill(self, i):
        """Kill all processes of host i. After `cut`, the other host does not notice."""
        process = self._processes.pop(i, None)
        if process is not None:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)])
            process.kill()
            process.wait()

    def down(self):
        for i in list(self._processes):
            self.kill(i)
        for i in ALL:
            subprocess.run(["ip", "netns", "del", f"{TAG}{i}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{TAG}v{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{TAG}br"], capture_output=True)


def sh(*commands):
    for command in commands:
        words = command.split(" ")
        subprocess.run(words, check=True, capture_output=True)


# --------------------------------------------------------------------------------------------------
# Fixtures, and commands on the hosts

WHY_NOT = why_not()


def needs_hosts(test):
    return pytest.mark.launch(pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))(test))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    yield made.up()
    made.down()


@pytest.fixture
def hosts(two_hosts):
    two_hosts.revive()
    return two_hosts


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two hosts\nnode-1 slots=1\n\nnode-2 slots=1  # the second\n")
    return path


def with_ssh(hosts, command):
    """Return the words of a command, with ssh's config in `--ssh_args` after its script."""
    words = [str(word) for word in command]
    script = next(i for i, word in enumerate(words) if word.endswith(".sh") or "scripts." in word)
    return [*words[: script + 1], "--ssh_args", f"-F {hosts.ssh_config}", *words[script + 1 :]]


def start(hosts, log, *command):
    """Start a command, and leave it running. Its output goes to the file `log`."""
    return subprocess.Popen(
        with_ssh(hosts, command), cwd=REPO, env=environment(), stdout=log.open("w"),
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def run(hosts, *command, code=None):
    """Run a command to its end. Fails if `code` is given and the exit code differs."""
    return processes.run(with_ssh(hosts, command), code=code)


def kill(pattern):
    """Return the command that kills the processes of a host whose command lines match."""
    return f"pkill -KILL -f {shlex.quote(pattern)}"


def left_on_hosts(text):
    """Return the command lines that contain `text`, on the hosts and here: this machine also lists
    the processes of the hosts' namespaces.
    """
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if text in line]

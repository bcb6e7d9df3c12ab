"""Hosts on one machine: network, process, mount and host-name namespaces, each with an address of
its own and an sshd. Needs root and Debian packages, which `why_not` names.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

# Two runs on one machine take names and addresses of their own: LT_TAG=pf LT_PREFIX=10.79.0
TAG = os.environ.get("LT_TAG", "lt")
PREFIX = os.environ.get("LT_PREFIX", "10.78.0")
NEEDED = ("ip", "unshare", "ssh", "ssh-keygen", "pdsh", "rsync", "nft", "/usr/sbin/sshd")


def why_not() -> str | None:
    """Why there can be no such hosts here, or None."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return (
            f"needs {', '.join(missing)}: apt install pdsh rsync openssh-server iproute2 nftables"
        )
    made = subprocess.run(["ip", "netns", "add", f"probe-{TAG}"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"probe-{TAG}"], capture_output=True)
    return None if made.returncode == 0 else f"cannot make namespaces: {made.stderr.strip()}"


class Hosts:
    """node-1 ... node-N with the addresses 10.78.0.1 ... N; this machine is 10.78.0.254."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.names = [f"node-{i}" for i in range(1, count + 1)]
        self.ssh_config = folder / "ssh_config"
        self._processes: dict[int, subprocess.Popen] = {}

    def up(self) -> "Hosts":
        self.down()
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "id"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True
            )
        authorized = self.folder / "authorized_keys"
        shutil.copy(self.folder / "id.pub", authorized)
        authorized.chmod(0o600)
        lines = [f"{PREFIX}.{i} node-{i}" for i in range(1, self.count + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        blocks = "".join(
            f"Host node-{i} {PREFIX}.{i}\n HostName {PREFIX}.{i}\n"
            for i in range(1, self.count + 1)
        )
        self.ssh_config.write_text(
            f"{blocks}Host *\n IdentityFile {self.folder}/id\n StrictHostKeyChecking no\n"
            f" UserKnownHostsFile {self.folder}/known_hosts\n LogLevel ERROR\n"
        )
        sh(f"ip link add {TAG}br type bridge", f"ip addr add {PREFIX}.254/24 dev {TAG}br",
           f"ip link set {TAG}br up")  # fmt: skip
        for i in range(1, self.count + 1):
            sh(f"ip netns add {TAG}{i}",
               f"ip link add {TAG}v{i} type veth peer name eth0 netns {TAG}{i}",
               f"ip link set {TAG}v{i} master {TAG}br", f"ip link set {TAG}v{i} up",
               f"ip -n {TAG}{i} addr add {PREFIX}.{i}/24 dev eth0",
               f"ip -n {TAG}{i} link set eth0 up", f"ip -n {TAG}{i} link set lo up",
               # an interface that leads nowhere and comes first, as docker0 does
               f"ip -n {TAG}{i} link add docker0 type bridge",
               f"ip -n {TAG}{i} addr add 172.17.0.1/16 dev docker0",
               f"ip -n {TAG}{i} link set docker0 up")  # fmt: skip
            self.boot(i)
        return self

    def boot(
        self,
        i: int,
        binds: dict | None = None,
        environment: dict | None = None,
        read_only: tuple = (),
    ) -> None:
        """Start host i, anew if it runs: `binds` are paths that it sees in the place of others,
        `environment` is what its logins get, `read_only` folders it cannot write to.
        """
        self.kill(i)
        mounts = {self.folder / "hosts": "/etc/hosts", **(binds or {})}
        script = [f"hostname node-{i}", "mount --make-rprivate /"]
        script.append("mount -t tmpfs -o size=2g tmpfs /dev/shm")  # memory is each host's own
        script += [f"mount --bind {new} {old}" for new, old in mounts.items()]
        for path in read_only:
            script += [f"mount --bind {path} {path}", f"mount -o remount,ro,bind {path}"]
        options = {
            "ListenAddress": f"{PREFIX}.{i}:22",
            "AuthorizedKeysFile": self.folder / "authorized_keys",
            "PidFile": "none", "StrictModes": "no", "UsePAM": "no", "PermitRootLogin": "yes",
            "MaxStartups": "100",
        }  # fmt: skip
        if environment:
            options["SetEnv"] = " ".join(f"{k}={v}" for k, v in environment.items())
        flags = " ".join(f"-o '{k}={v}'" for k, v in options.items())
        script.append(f"exec /usr/sbin/sshd -D -f /dev/null -h {self.folder}/host {flags}")
        self._processes[i] = subprocess.Popen(
            ["ip", "netns", "exec", f"{TAG}{i}", "unshare", "--uts", "--pid", "--mount", "--fork",
             "--mount-proc", "--kill-child", "bash", "-euc", "\n".join(script)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while subprocess.run(self.ssh(i, "true"), capture_output=True).returncode != 0:
            assert time.monotonic() < deadline, f"node-{i} does not come up"
            time.sleep(0.1)

    def ssh(self, i: int, command: str) -> list[str]:
        return ["ssh", "-F", str(self.ssh_config), f"node-{i}", command]

    def run(self, i: int, command: str) -> str:
        """What a command prints on host i."""
        return subprocess.run(self.ssh(i, command), capture_output=True, text=True).stdout

    def cut(self, i: int) -> None:
        sh(f"ip link set {TAG}v{i} down")

    def mend(self, i: int) -> None:
        sh(f"ip link set {TAG}v{i} up")

    def block(self, i: int, rule: str) -> None:
        """A firewall rule for what comes in at host i, such as `tcp dport 29500 drop`."""
        nft = f"ip netns exec {TAG}{i} nft add"
        sh(f"{nft} table inet hosts",
           f"{nft} chain inet hosts arriving {{ type filter hook input priority 0; }}",
           f"{nft} rule inet hosts arriving {rule}")  # fmt: skip

    def unblock(self, i: int) -> None:
        sh(f"ip netns exec {TAG}{i} nft delete table inet hosts")

    def kill(self, i: int) -> None:
        """All processes of host i at once; with the link cut before, nobody is told."""
        process = self._processes.pop(i, None)
        if process is not None:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)])
            process.kill()
            process.wait()

    def processes(self, i: int, text: str) -> list[str]:
        """Command lines on host i that have `text` in them, the host's own view."""
        listed = self.run(i, "ps -eo args")
        return [line for line in listed.splitlines() if text in line]

    def down(self) -> None:
        for i in list(self._processes):
            self.kill(i)
        for i in range(1, 9):
            subprocess.run(["ip", "netns", "del", f"{TAG}{i}"], capture_output=True)
            subprocess.run(["ip", "link", "del", f"{TAG}v{i}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"{TAG}br"], capture_output=True)


def sh(*commands: str) -> None:
    for command in commands:
        words = command.split(" ")
        subprocess.run(words, check=True, capture_output=True)

"""How much memory this machine has left."""

import re
from pathlib import Path


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can still be allocated on this machine, and what limits them: MemAvailable, or the
    file of a cgroup, of a container or of SLURM.

    Args:
        root: the folder that contains proc and sys.
    """
    meminfo = (root / "proc/meminfo").read_text()
    kib = int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)[1])
    best = (kib * 1024, "MemAvailable")
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        top = root / base
        folder = top / path.lstrip("/")
        # the limits of all parent groups apply; in a container only the top one may be visible
        for group in [folder, *folder.parents]:
            file = group / names[0]
            if file.is_file() and (text := file.read_text().strip()) != "max":
                used = int((group / names[1]).read_text())
                # the page cache is freed when memory is needed
                cached = re.search(
                    rf"^{names[2]} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE
                )
                left = int(text) - used + (int(cached[1]) if cached else 0)
                best = min(best, (left, f"{file.name} of {group.relative_to(root)}"))
            if group == top:
                break
    return best

"""Measure how many tokens fit into a micro-batch, by running the costliest one of a run.

    deepspeed --num_gpus 2 scripts/rehearse.py --config recipes/demo.yaml [--section.key value ...]

It has the launchers and flags of train.py. It loads the model and writes nothing.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Launchers run this file itself.

from zerotrain.config.parse import parse_command_line
from zerotrain.runtime.errors import exit_on_error
from zerotrain.runtime.preemption import follow_launcher


def main() -> None:
    follow_launcher()
    config = parse_command_line(sys.argv[1:], "scripts/rehearse.py").config
    from zerotrain.tools.rehearsal import rehearse  # slow

    rehearse(config)


if __name__ == "__main__":
    exit_on_error(main)

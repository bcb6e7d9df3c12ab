"""What train.py and the scripts import.

The template: runtime, config, rows, data, model, training, checkpoint, tracking; each imports only
from those before it. The tools, which train.py does not import: tools, launch.
"""

import sys
from importlib.util import find_spec

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "pydantic", "yaml")
_missing = [name for name in PACKAGES if find_spec(name) is None]
if _missing:
    print(
        f"error: {sys.executable} has no {', '.join(_missing)}: run scripts/setup.sh once, and "
        "then use .venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(2)

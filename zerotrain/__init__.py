"""What train.py and the scripts import.

The template: runtime, config, data, model, training, checkpoint, tracking; each imports only from
those before it. What train.py does not import: rows, the program that tokenizes; tools; launch.
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

"""Ask a model the questions of chat rows and count the answers that match exactly.

python scripts/exact_match.py MODEL_FOLDER data/sample/eval.jsonl [--show 3]
"""

from zerotrain.runtime.errors import exit_on_error
from zerotrain.tools.exact_match import main

if __name__ == "__main__":
    exit_on_error(main)

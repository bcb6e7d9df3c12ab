"""Draw runs as one HTML page that needs no server and no network.

    python -m scripts.report runs/mine [runs/other ...] [--output report.html]

The page has steps, evaluations, times of the ranks, events, answers and configs, from metrics.jsonl
and the resolved configs. Several runs are drawn over each other. A run may still be training. The
page is RUN/report.html, or ./report.html for several runs.
"""

import argparse
from pathlib import Path

from zerotrain.runtime.errors import UserError, describe, exit_on_error
from zerotrain.runtime.files import replace_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    parser.add_argument("--output", type=Path, metavar="FILE", help="page to write (see above)")
    args = parser.parse_args()
    folders = list(dict.fromkeys(args.runs))
    output = args.output or (folders[0] if len(folders) == 1 else Path()) / "report.html"

    from zerotrain.tools.report import report_page

    page = report_page(folders)
    try:
        replace_text(output, page)
    except OSError as error:
        raise UserError(
            f"cannot write {output} ({describe(error)}); give another file with --output"
        ) from None
    print(output)


if __name__ == "__main__":
    exit_on_error(main)

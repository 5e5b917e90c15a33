"""Measures this package on this machine: `python -m psjobs.bench [CASE ...] [--json] [--runs N]`.

Each case prints a value, a limit that is measured in the same run, and their ratio. Value and limit are medians over the
runs, which alternate. Servers run on this machine; nothing else should.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from psjobs.bench import parts
from psjobs.bench.cases import MEASURES, LeftOut, Wish


def main() -> None:
    """Measures what the command line names, by default everything."""
    parser = argparse.ArgumentParser(
        prog="python -m psjobs.bench", description=(__doc__ or "").split("\n", 2)[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measures", nargs="*", metavar="CASE", help=f"{', '.join(MEASURES)}; by default all")
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="how often value and limit are measured (default: 5)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each measurement (default: 12, of mnist 300)")
    parser.add_argument("--gigabits", type=float, default=10, metavar="N", help="rate of the link of overlap, each way (default: 10)")
    parser.add_argument("--examples", type=int, default=parts.EXAMPLES, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=parts.PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(parts.PARTS[options.part](parts.Size(options.steps, options.examples))))
        return
    if unknown := [name for name in options.measures if name not in MEASURES]:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    for option, least in (("runs", 1), ("steps", 1), ("gigabits", 0.01)):
        if getattr(options, option) is not None and getattr(options, option) < least:
            parser.error(f"--{option} is at least {least}")
    wish = Wish(options.runs, parts.Size(options.steps), options.gigabits)
    for name in options.measures or MEASURES:
        for line in MEASURES[name](wish):
            if options.json:
                ratio = {} if isinstance(line, LeftOut) else {"ratio": line.ratio}
                print(json.dumps({"bench": "python", **asdict(line), **ratio}), flush=True)
            else:
                print(line, flush=True)


if __name__ == "__main__":
    main()

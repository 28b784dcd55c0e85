#!/usr/bin/env bash
# The README's pictures, from the finished experiment smollm2_grpo (make train EXP=smollm2_grpo): make ask as an SVG, and
# a trajectory page, which needs Chromium. Questions: QUESTION="..." and PAGE=FILE.html#item-1.
set -euo pipefail
cd "$(dirname "$0")/.."
question=${QUESTION:-What is the currency of the country in which Plovdiv lies?}
said=$(COLUMNS=100 FORCE_COLOR=1 .venv/bin/python -m experiments ask smollm2_grpo --question "$question" 2>/dev/null)
printf '%s' "$said" | .venv/bin/python -c '
import sys
from rich.console import Console
from rich.text import Text
console = Console(record=True, width=100, file=open("/dev/null", "w"))
console.print(Text.from_ansi(sys.stdin.read()))
console.save_svg("docs/assets/ask.svg", title=f"make ask EXP=smollm2_grpo Q=\"{sys.argv[1]}\"")
' "$question"
if [ -n "${PAGE:-}" ]; then
    chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,760 \
        --screenshot=docs/assets/trajectory.png "file://$(realpath "${PAGE%%#*}")#${PAGE##*#}"
fi

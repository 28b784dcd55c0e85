#!/usr/bin/env bash
# Makes the README's pictures: docs/assets/ask.svg, what `make ask` prints, and docs/assets/trajectory.png, a trajectory
# of a page, by Chromium. After `make train EXP=smollm2_sft`:
#   scripts/pictures.sh outputs/smollm2_sft/KEY/model outputs/smollm2_sft/KEY/trajectories/PAGE.html t2
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 page=$2 article=$3
question=${QUESTION:-What is the currency of the country in which Plovdiv lies?}
COLUMNS=100 FORCE_COLOR=1 .venv/bin/python -m experiments ask smollm2_start --model.policy "$model" \
    --question "$question" 2>/dev/null | tail -n +2 | .venv/bin/python -c '
import os, sys
from rich.console import Console
from rich.text import Text
console = Console(record=True, width=100, file=open(os.devnull, "w"))
console.print(Text.from_ansi(sys.stdin.read()))
console.save_svg("docs/assets/ask.svg", title=sys.argv[1])
' "make ask EXP=smollm2_sft Q=\"$question\""
one=$(mktemp --suffix=.html)
trap 'rm -f "$one"' EXIT
python3 -c '
import re, sys
page = open(sys.argv[1]).read()
print(page[: page.index("</head>")], "</head><body>", re.search(rf"<article id=\"{sys.argv[2]}\">.*?</article>", page, re.S)[0])
' "$page" "$article" > "$one"
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1000,960 \
    --screenshot=docs/assets/trajectory.png "file://$one" 2>/dev/null

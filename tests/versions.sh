#!/usr/bin/env bash
# Runs the tests with each pair of Python and PyTorch that is supported, in an environment each, and writes the guide's table.
#
#     tests/versions.sh [FOLDER] [PAIR...]
#
# The environments are kept in FOLDER, and removed one by one without it. Given pairs, such as "3.11 2.9.1", replace their rows
# only. Each Python has to be found as python3.11, python3.12 or python3.13. The first and the last pair run the moderate tests,
# too. All other packages have the versions of constraints.txt.
# No part of .ci/run: several gigabytes are installed.
set -uo pipefail
cd "$(dirname "$0")/.."

PAIRS=(
    "3.11 2.6.0 --moderate" "3.11 2.9.1" "3.11 2.13.0" "3.11 2.14.1" "3.12 2.13.0" "3.13 2.13.0" "3.13 2.6.0" "3.13 2.14.1 --moderate"
)
PAGE=examples/guide/versions.md

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=${1:-$work}
[ $# -lt 2 ] || PAIRS=("${@:2}")

test_pair() { # PYTHON TORCH [--moderate]: prints the cell of the table
    local place="$folder/python$1-torch$2" log="$work/log"
    if ! "python$1" --version >/dev/null 2>&1; then
        echo "no Python $1 here"
        return
    fi
    grep -v '^torch==' constraints.txt >"$work/constraints.txt"
    echo "torch==$2" >>"$work/constraints.txt"
    mkdir -p "$place/source"
    git archive HEAD | tar -x -C "$place/source"
    if ! { "python$1" -m venv "$place/venv" && "$place/venv/bin/python" -m pip install -q "torch==$2" &&
        "$place/venv/bin/python" -m pip install -q -c "$work/constraints.txt" -e "$place/source[dev]"; } >"$log" 2>&1; then
        echo "cannot be installed: $(grep -m 1 ERROR "$log" | cut -c 1-120)"
        return
    fi
    (cd "$place/source" && OMP_NUM_THREADS=1 "$place/venv/bin/python" -m pytest "${@:3}" --junitxml="$work/tests.xml") >&2
    "$place/venv/bin/python" - "$work/tests.xml" <<'PYTHON'
import sys
from xml.etree import ElementTree

suite = ElementTree.parse(sys.argv[1]).getroot()[0]
total, skipped = int(suite.get("tests")), int(suite.get("skipped"))
failed = int(suite.get("failures")) + int(suite.get("errors"))
print(f"{total - failed - skipped:,} passed, {skipped:,} skipped, {failed:,} failed")
PYTHON
    [ "$folder" != "$work" ] || rm -rf "$place"
}

{
    for pair in "${PAIRS[@]}"; do
        read -r python torch tier <<<"$pair"
        echo "| $python | $torch | $(test_pair $pair)${tier:+ (including the moderate tests)} | $(date +%F) |"
    done
} | tee "$work/table"

python3 - "$PAGE" "$work/table" <<'PYTHON'
import re
import sys
from pathlib import Path

page, table = map(Path, sys.argv[1:])
text = page.read_text()
for row in table.read_text().splitlines():
    begin = "|".join(row.split("|")[:3])
    text = re.sub(rf"^{re.escape(begin)}\|.*$", lambda _, row=row: row, text, flags=re.MULTILINE)
page.write_text(text)
PYTHON
! grep -qv ' 0 failed' "$work/table"

#!/usr/bin/env bash
# At the end of make test, prints what failed in parts that ran side by side: the summary of pytest or, if pytest did
# not fail, the last lines of the part's log.
#
#     tools/failures.sh LOG...
set -euo pipefail

for log in "$@"; do
    grep -qE '^make(\[[0-9]+\])?: \*\*\* ' "$log" || continue
    echo "failed in $log:"
    grep -E '^(FAILED|ERROR) tests/' "$log" | cut -c1-300 || tail -n 20 "$log"
done

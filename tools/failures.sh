#!/usr/bin/env bash
# Says at the end of make test what failed in parts that wrote beside each other: the summary of pytest or, where pytest
# did not fail, what the part wrote last.
#
#     tools/failures.sh LOG...
set -euo pipefail

for log in "$@"; do
    grep -qE '^make(\[[0-9]+\])?: \*\*\* ' "$log" || continue
    echo "failed in $log:"
    grep -E '^(FAILED|ERROR) tests/' "$log" | cut -c1-300 || tail -n 20 "$log"
done

#!/usr/bin/env bash
# The same command on every board, all at once: ./fleet.sh BOARDS COMMAND...
# BOARDS is a file with one ssh destination a line. Prints each board's output under its name.
set -euo pipefail

boards=${1:?"usage: $0 BOARDS COMMAND..."}
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

failed=0
declare -A pids
while read -r board; do
    [ -n "$board" ] || continue
    ssh -o BatchMode=yes -o ConnectTimeout=10 "$board" "$@" </dev/null >"$logs/$board" 2>&1 &
    pids[$board]=$!
done <"$boards"
for board in "${!pids[@]}"; do
    wait "${pids[$board]}" && state=ok || { state=FAILED; failed=1; }
    echo "== $board: $state"
    cat "$logs/$board"
done
exit "$failed"

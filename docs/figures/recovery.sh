#!/usr/bin/env bash
# The session that docs/figures/recovery.svg shows; CONTRIBUTING.md says how to record it.
set -uo pipefail
export PATH="$PWD/.venv/bin:$PATH" SPOOL_STATE
SPOOL_STATE=$(mktemp -d)
LOG=$SPOOL_STATE/serve.log
QUESTION="Tell me a story about a lighthouse."
OPTIONS="--no-ray --target-replicas 2 --quantization none --threads 1"

show() {
    printf '\e[1m$ %s\e[0m\n' "$*"
    sleep 1
}

chat() {
    echo "$QUESTION" | spool chat --temperature 0 --max-tokens 300 --stats
}

busy_target() {
    spool status --json | python -c '
import json, sys
workers = json.load(sys.stdin)["cells"][0]["workers"]
print(next((w["worker_id"] for w in workers if w["role"].endswith("TARGET") and w["sequences"]), ""))'
}

# SIGKILL to the target that is computing the answer.
kill_target() {
    local target=""
    while [ -z "$target" ]; do target=$(busy_target); done
    pkill -KILL -f "deploy.processes worker $target$"
    printf '\e[1;31m[kill -9 %s]\e[0m' "$target"
}

show "make serve SERVE=\"$OPTIONS\" &"
make -s -o .venv/serving serve SERVE="$OPTIONS" >"$LOG" 2>&1 &
trap 'spool down >/dev/null 2>&1; wait' EXIT
until grep -q "stops it" "$LOG"; do sleep 0.2; done
tail -n 7 "$LOG" | grep -v "  try"

show "spool chat --temperature 0 --max-tokens 300 --stats"
echo "> $QUESTION"
kill_target &
chat | tee "$SPOOL_STATE/killed.txt"

show "spool chat --temperature 0 --max-tokens 300 > again.txt   # nobody dies"
chat >"$SPOOL_STATE/again.txt"
cmp <(grep -v '^\[' "$SPOOL_STATE/killed.txt") <(grep -v '^\[' "$SPOOL_STATE/again.txt") && echo "the same text"
sleep 3

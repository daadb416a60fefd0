#!/bin/sh
# The fault tests many times in a row: ./tests/repeat.sh [TIMES=20] [pytest's own arguments]
# Each round starts its servers and engines anew, in an order of its own, and the first failure ends it all.
set -eu
cd "$(dirname "$0")/.."
times=${1:-20}
[ $# -eq 0 ] || shift
round=1
while [ "$round" -le "$times" ]; do
    echo "round $round of $times"
    "${PYTHON:-python}" -m pytest -q -x \
        tests/serving/transport/test_full_queue.py \
        tests/serving/transport/test_hosts.py \
        tests/serving/transport/test_keeping.py \
        tests/serving/transport/test_lives.py \
        tests/serving/transport/test_outages.py \
        tests/serving/transport/test_recovery.py \
        tests/serving/transport/test_slow_readers.py \
        tests/serving/transport/test_supervisor.py \
        tests/serving/transport/test_suspects.py \
        tests/serving/web/test_drain_waits.py \
        tests/serving/web/test_health.py \
        tests/serving/web/test_live_endpoints.py::test_a_killed_keeper_is_missed_by_nobody \
        tests/serving/web/test_poison.py \
        tests/serving/web/test_server.py \
        tests/serving/web/test_server_ending.py \
        tests/serving/web/test_server_faults.py \
        tests/serving/web/test_server_limits.py \
        tests/serving/web/test_server_recovery.py \
        "$@"
    round=$((round + 1))
done

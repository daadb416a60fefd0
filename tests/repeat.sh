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
        tests/serving/transport/client/test_full_queue.py \
        tests/serving/transport/engine_process/test_remote_clients.py \
        tests/serving/supervision/test_restart_backoff.py \
        tests/serving/transport/discovery/test_engine_lifetime.py \
        tests/serving/transport/client/test_outages.py \
        tests/serving/transport/client/test_recovery.py \
        tests/serving/transport/client/test_slow_readers.py \
        tests/serving/supervision/test_supervisor.py \
        tests/serving/transport/client/test_poison_suspects.py \
        tests/serving/server/test_drain_waits.py \
        tests/serving/server/test_stalled_engine_health.py \
        tests/serving/control/test_live_endpoints.py::test_a_killed_controller_process_is_started_again_and_no_request_is_lost \
        tests/serving/server/test_poison_requests.py \
        tests/serving/server/test_server.py \
        tests/serving/server/test_server_ending.py \
        tests/serving/server/test_server_faults.py \
        tests/serving/server/test_server_limits.py \
        tests/serving/server/test_server_recovery.py \
        "$@"
    round=$((round + 1))
done

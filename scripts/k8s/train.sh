#!/usr/bin/env bash
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
# What a pod of jobset.yaml runs: training in RUN_FOLDER, with the arguments.
# On SIGTERM a run saves and ends with 0 on all its machines. For Kubernetes that pod would be
# complete, and with all pods the job. So a run that is not finished ends with 75 here.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

./run_llama_train.sh --job.dump_folder="$RUN_FOLDER" "$@" &
launcher=$! status=0
trap 'kill -TERM "$launcher" 2>/dev/null' TERM
wait "$launcher" || status=$?
# A trapped signal ends `wait`, not the launcher.
while kill -0 "$launcher" 2>/dev/null; do
    status=0
    wait "$launcher" || status=$?
done
[ "$status" -eq 0 ] || exit "$status"
# Rank 0 writes the state; the file systems of other machines show it within a minute.
for _ in {1..90}; do
    case $(cat "$RUN_FOLDER/run_state.json" 2>/dev/null) in
        *'"state": "finished"'*) exit 0 ;;
        *'"state": "stopped"'*) break ;;
    esac
    sleep 1
done
exit 75

#!/bin/bash
# Search with an array of workers, then evaluate, then verify: three jobs, each begun when the one before has succeeded.
#
#   NUM_WORKERS=4 jobs/chain.sh MODEL corpus.path=TEXTS target_length=131072 run=/shared/runs/mine [key=value ...]
#
# Without NUM_WORKERS there are as many as search.sbatch says. All words go to `ropesearch search`; `evaluate` gets those
# of corpus, seed and cache, and writes RUN-evaluation. Where a job fails, those behind it are cancelled. Change the
# resources in the .sbatch files; a partition or an account may also come from SBATCH_PARTITION and SBATCH_ACCOUNT.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

run=
shared=()
for word in "$@"; do
    case $word in
        run=*) run=${word#run=} ;;
        corpus.*=* | seed=* | cache=*) shared+=("$word") ;;
    esac
done
if [ -z "$run" ]; then
    echo "chain.sh: expected run=FOLDER, where the search is kept and the other jobs find it, got: $*" >&2
    exit 2
fi

submit() { sbatch --parsable "$@" | cut -d ";" -f 1; }
after() { submit --dependency="afterok:$1" --kill-on-invalid-dep=yes "${@:2}"; }

workers=$(submit ${NUM_WORKERS:+--array=0-$((NUM_WORKERS - 1))} "$here/search.sbatch" "$@")
evaluation=$(after "$workers" "$here/evaluate.sbatch" "$run" "${shared[@]}" run="$run-evaluation")
verification=$(after "$evaluation" "$here/verify.sbatch" "$run")
echo "search $workers, evaluate $evaluation, verify $verification; look at the search with: ropesearch status $run"

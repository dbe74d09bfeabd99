#!/bin/bash
# Search with an array of workers, fine-tune, evaluate, export, verify: each begun when the one before has succeeded.
#
#   NUM_WORKERS=4 jobs/chain.sh MODEL corpus.path=TEXTS target_length=131072 run=/shared/runs/mine training=longrope2
#
# Without NUM_WORKERS there are as many as search.sbatch says. Words of training and mixture go to `finetune`, which
# writes RUN-tuned; without any there is no fine-tuning. Words of corpus, seed and cache go to all jobs, the others to
# `search`. `evaluate` writes RUN-evaluation, `export`, after a fine-tuning, RUN-served. Where a job fails, those behind
# it are cancelled. Change the resources in the .sbatch files; partition and account may also come from SBATCH_PARTITION
# and SBATCH_ACCOUNT.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

run=
search=()
tuning=()
shared=()
for word in "$@"; do
    case $word in
        training=* | training.*=* | mixture=* | mixture.*=*) tuning+=("$word") ;;
        corpus.*=* | seed=* | cache=*) shared+=("$word") ;;
        run=*) run=${word#run=} ;;
        *) search+=("$word") ;;
    esac
done
if [ -z "$run" ]; then
    echo "chain.sh: expected run=FOLDER, where the search is kept and the other jobs find it, got: $*" >&2
    exit 2
fi

# Where a file is refused, what was submitted before it is taken back.
submitted=()
trap 'code=$?; if [ "$code" != 0 ] && [ ${#submitted[@]} -gt 0 ]; then
    scancel "${submitted[@]}"; echo "chain.sh: cancelled what was submitted: ${submitted[*]}" >&2; fi' EXIT

submit() { sbatch --parsable "$@" | cut -d ";" -f 1; }
after() { submit --dependency="afterok:$1" --kill-on-invalid-dep=yes "${@:2}"; }

last=$(submit ${NUM_WORKERS:+--array=0-$((NUM_WORKERS - 1))} "$here/search.sbatch" "${search[@]}" "${shared[@]}" run="$run")
submitted+=("$last")
jobs="search $last"
result=$run
if [ ${#tuning[@]} -gt 0 ]; then
    result=$run-tuned
    last=$(after "$last" "$here/finetune.sbatch" "$run" "${tuning[@]}" "${shared[@]}" run="$result")
    submitted+=("$last")
    jobs+=", finetune $last"
fi
last=$(after "$last" "$here/evaluate.sbatch" "$result" "${shared[@]}" run="$run-evaluation")
submitted+=("$last")
jobs+=", evaluate $last"
if [ ${#tuning[@]} -gt 0 ]; then
    last=$(after "$last" "$here/export.sbatch" "$result" to="$run-served" single_table=true "${shared[@]}")
    submitted+=("$last")
    jobs+=", export $last"
    result=$run-served
fi
last=$(after "$last" "$here/verify.sbatch" "$result")
echo "$jobs, verify $last; look at the search with: ropesearch status $run"

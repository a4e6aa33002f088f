#!/usr/bin/env bash
# What `make gpu` does: on a machine with a CUDA device, first whole runs, then a run
# that is stopped and goes on, a sweep, a long evaluation, the tests, and speed.
#
#     scripts/gpu.sh .venv/bin/python
#
# Each step has a limit of seconds, all together have ten minutes. The table of verdicts
# comes whatever happens; what each step printed is in build/gpu. Smaller, to try it:
#
#     DEVICE=cpu LENGTH=128 TOKENS=20000 SMALL=demo LARGE=demo \
#         scripts/gpu.sh .venv/bin/python
set -u
python=$1
length=${LENGTH:-1024}   # tokens of the long run; the evaluation reads 64 times as many
tokens=${TOKENS:-300000} # of the short runs; the long one has ten times as many
small=${SMALL:-12m}      # the shape of the models whose speed is measured
large=${LARGE:-124m}     # the same, compiled
device=${DEVICE:-cuda}
end=$((SECONDS + ${LIMIT:-580})) # what is killed then has ten seconds to end
out=build/gpu
verdicts=$out/verdicts.txt
rm -rf $out
mkdir -p $out
touch $verdicts

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
posbench="$python -m posbench"
common="device=$device tracking=none runtime.outputs=$out/runs evaluation.blocks=32"
short="$common training.tokens=$tokens training.warmup_tokens=$((tokens / 10))"
exact="$short encoding=rope ratio=1 runtime.deterministic=true"
exact="$exact runtime.checkpoint_every_steps=5"
export out posbench exact

# step NAME SECONDS COMMAND...: run it, add a line to the verdicts
step() {
    local name=$1 limit=$2 began=$SECONDS left=$((end - SECONDS)) code verdict line
    shift 2
    if [ $left -le 0 ]; then
        say "no time" 0 "$name" ""
        return
    fi
    # in the background, since a signal interrupts nothing but `wait`
    timeout -k 10 $((left < limit ? left : limit)) "$@" >$out/$name.log 2>&1 &
    wait $!
    code=$?
    case $code in
        0) verdict=ok ;;
        124 | 137) verdict="too long" ;;
        *) verdict=FAILED ;;
    esac
    if grep -q "cannot be compiled" $out/$name.log; then
        verdict=FAILED
    fi
    line=$(grep -E "$shown" $out/$name.log | tail -n 1)
    if [[ $verdict == ok && $line == *" skipped"* && $line != *" passed"* ]]; then
        verdict=skipped # every test of it
    fi
    say "$verdict" $((SECONDS - began)) "$name" "$line"
}

# The last line of these is shown with a verdict; at the end the rows of `bench`.
shown="cannot be compiled|rror: |nats/token|passed|skipped|done:"
shown="$shown|^[a-z0-9_]+ +[0-9,]+ +[0-9.]+ +[0-9.]+-"

# A step that runs beside others, in a shell of its own: `beside ... &`
beside() {
    trap 'kill $(jobs -p)' TERM
    step "$@"
}

say() {
    printf "%-8s %4s s  %-16s %.90s\n" "$@" | tee -a $verdicts
}

finish() {
    trap - EXIT
    kill $(jobs -p) 2>/dev/null
    wait
    printf "\nAfter %s s, in %s:\n" $SECONDS $out
    cat $verdicts
    if grep -qv "^ok" $verdicts; then
        exit 1
    fi
    exit 0
}
trap finish EXIT
trap 'say stopped 0 "by a signal" ""; exit' INT TERM

stop_and_go_on() { # SIGTERM after the first checkpoint, then the same command
    $posbench train $exact study=parts &
    local run=$!
    until compgen -G "$out/runs/parts/*/checkpoint/step-*" || ! kill -0 $run; do
        sleep 0.1
    done
    kill -TERM $run
    wait $run
    local code=$?
    [ $code -eq 143 ] || { echo "error: SIGTERM gave exit code $code"; return 1; }
    $posbench train $exact study=parts
}

weights_are_equal() {
    local whole parts
    whole=$(ls $out/runs/whole/*/checkpoint/*/model.safetensors | tail -n 1)
    parts=$(ls $out/runs/parts/*/checkpoint/*/model.safetensors | tail -n 1)
    cmp "$whole" "$parts" || { echo "error: the weights differ"; return 1; }
}
export -f stop_and_go_on weights_are_equal

step version 60 $posbench --version
step prepare 120 $posbench prepare

# Whole runs, all at once: whether they are right needs no quiet GPU.
train="$posbench train $short training.train_length=$((length / 4))"
long="training.train_length=$length training.batch_size=8"
long="$long training.tokens=$((10 * tokens)) training.warmup_tokens=$tokens"
beside bf16 150 $train encoding=fox training.precision=bf16 study=bf16 &
beside compiled 150 $train encoding=t5 runtime.compile=true study=compiled &
beside long 200 $posbench train $common $long encoding=alibi ratio=1 \
    runtime.compile=true study=long &
beside task 150 $posbench train experiment=tasks $short encoding=rope study=task &
beside recomputed 150 $train encoding=fire runtime.compile=true \
    runtime.checkpointing=true study=recomputed &
wait

step whole 60 $posbench train $exact study=whole
step in_parts 90 bash -c stop_and_go_on
step equal 10 bash -c weights_are_equal
step sweep 90 $posbench sweep encoding=rope,kerple_log,cope $short study=sweep --n-jobs 3
step evaluation 90 $posbench evaluate $out/runs/long ratio=1,64 device=$device \
    evaluation.blocks=8 documents=concat
step tests 180 $python -m pytest -m gpu tests/gpu -n ${WORKERS:-8}

# Speed, on a quiet GPU. Each compiled encoding is a step of its own: what fits into the
# time has its row.
rounds="--rounds 3 runtime.device=$device"
step speed_$small 90 $posbench bench none rope alibi t5 fox fire shaw --shape $small \
    training.train_length=$length training.batch_size=4 $rounds
for name in rope alibi t5 fox fire; do
    step compiled_$name 60 $posbench bench none $name --shape $large $rounds \
        runtime.compile=true
done
tail -n +1 $out/speed*.log $out/compiled_*.log 2>/dev/null

#!/usr/bin/env bash
# The records that docs/gpu.md quotes, made on this machine's GPU: alone on it, a quarter of an hour.
#   bash benchmarks/gpu.sh                    all of them, into benchmarks/results
#   RESULTS=/tmp/r bash benchmarks/gpu.sh models kernels      two groups, elsewhere
#   NAME=a100-2026-12-01 bash benchmarks/gpu.sh               another end of the records' names
set -eu
cd "$(dirname "$0")/.."
ALL="matrix models kernels squeeze cycles movement offline serve"
RESULTS=${RESULTS:-benchmarks/results} # records of the same name are replaced
NAME=${NAME:-h200-$(date +%F)}         # how their names end
CONFIGS=pipelines/recipes/configs
QWEN=$CONFIGS/qwen1.5-moe-a2.7b.json
PORT=8123

save() { # record command...: `pw` with what makes it write that record
	local record=$1
	shift
	pw "$@" --save-result --result-dir "$RESULTS" --result-filename "$record-$NAME.json"
}

matrix() { # policies, batch sizes and contexts side by side, and transformers
	save matrix-qwen1.5-moe bench matrix "$QWEN" --load-format dummy --device cuda \
		--hf-overrides '{"max_position_embeddings": 32768}' --gpu-memory-utilization 0.95 \
		--max-num-batched-tokens 2048 --steps 60 --prompt-tokens 8192 --max-bits 6 --transformers \
		--policy static:3 --policy dense --policy adaptive:4 --policy adaptive:3 --policy static:4
	save matrix-6-bits-qwen1.5-moe bench matrix "$QWEN" --load-format dummy --device cuda \
		--hf-overrides '{"max_position_embeddings": 32768}' --gpu-memory-utilization 0.95 \
		--max-num-batched-tokens 2048 --steps 60 --prompt-tokens 8192 --policy static:6 \
		--policy adaptive:6 # which has wider blocks, too: no --max-bits 6
}

model() { # config, batch sizes: contexts of 1,024
	local config=$1 batches=()
	shift
	for batch in "$@"; do batches+=(--batch-size "$batch"); done
	save "matrix-$config" bench matrix "$CONFIGS/$config.json" --load-format dummy --device cuda \
		--gpu-memory-utilization 0.95 --max-num-batched-tokens 2048 --steps 60 \
		--context 1024 --prompt-tokens 1024 --max-bits 6 --policy static:3 --policy dense \
		--policy adaptive:3 "${batches[@]}"
}

models() { # three other models
	model qwen3-30b-a3b 1 8 32
	model mixtral-8x7b 1 4 8 32
	model gemma-4-26b-a4b 1 8 32
}

kernels() { # a step by kind of kernel
	save matrix-kernels-qwen1.5-moe bench matrix "$QWEN" --load-format dummy --device cuda \
		--kernels --gpu-memory-utilization 0.95 --max-num-batched-tokens 2048 --steps 60 \
		--context 1024 --prompt-tokens 1024 --max-bits 6 --policy static:3 --policy adaptive:3 \
		--policy dense --batch-size 1 --batch-size 4 --batch-size 8 --batch-size 32
}

squeeze() { # memory that gets short and long again
	save squeeze-qwen1.5-moe bench squeeze "$QWEN" --load-format dummy --device cuda \
		--memory-budget 22GiB --max-model-len 4096 --max-num-seqs 12 --cycles 12 --probes 4 \
		--steady-steps 16 --ease-steps 64 --idle-grace 0 --dwell-steps 8 --transfer-budget 8GiB
}

cycles() { # the same 1,000 times, small
	save squeeze-tiny bench squeeze tiny --load-format dummy --device cuda --cycles 1000 \
		--max-model-len 256 --max-num-seqs 4 --probes 2 --steady-steps 2 --ease-steps 2 \
		--idle-grace 0 --dwell-steps 1 --transfer-budget 8GiB
}

movement() { # steps while planes come back
	local record="$RESULTS/movement-$NAME.json" python=python
	[ -x "$(dirname "$(command -v pw)")/python" ] && python=$(dirname "$(command -v pw)")/python
	"$python" -m pw.evaluation.bench.movement "$QWEN" --device cuda --memory-budget 24GiB \
		--batch 1 32 --steps 200 --transfer-budget 1GiB --copied 64MiB --form json > "$record.part"
	mv "$record.part" "$record" # a run that fails leaves the record of the last
}

offline() { # requests without a server
	local batch
	save throughput-qwen1.5-moe bench throughput "$QWEN" --load-format dummy --device cuda \
		--precision-policy static:3 --memory-budget 40GiB --max-model-len 4096 --max-num-seqs 64 \
		--num-prompts 256 --random-input-len 512 --random-output-len 128 --ignore-eos
	for batch in 1 32; do
		save "latency-$batch-qwen1.5-moe" bench latency "$QWEN" --load-format dummy --device cuda \
			--precision-policy static:3 --memory-budget 40GiB --max-model-len 4096 --input-len 128 --output-len 128 --batch-size "$batch" \
			--num-iters 5
	done
}

load() { # record, requests a second, how many, seed: clients of the server
	save "$1" bench serve --port "$PORT" --request-rate "$2" --num-prompts "$3" --seed "$4" \
		--random-input-len 1024 --random-output-len 128 --ignore-eos
}

serve() { # a server, and clients beside it
	pw serve "$QWEN" --load-format dummy --device cuda --max-num-batched-tokens 2048 \
		--max-num-seqs 64 --max-model-len 8192 --memory-budget 24GiB \
		--precision-policy adaptive --port "$PORT" &
	local server=$! began=$SECONDS
	trap 'kill $server 2> /dev/null || true' EXIT
	until curl -sf "http://127.0.0.1:$PORT/health" > /dev/null; do
		kill -0 "$server" || exit 1
		sleep 0.25
	done
	echo "the server answers after $((SECONDS - began)) s"
	load serve-rate2-qwen1.5-moe 2 20 1
	load serve-rate6-qwen1.5-moe 6 60 2
	load serve-all-qwen1.5-moe inf 96 3
	kill "$server"
	wait "$server" || true
	trap - EXIT
}

# shellcheck disable=SC2086 # groups are words
set -- ${*:-$ALL}
for group in "$@"; do
	case " $ALL " in
	*" $group "*) ;;
	*)
		echo "error: no group of records is called \`$group\`" >&2
		echo "hint: groups are $ALL; none named: all" >&2
		exit 2
		;;
	esac
done
if ! type pw > /dev/null 2>&1; then
	echo "error: \`pw\` is not on the path" >&2
	echo "hint: \`. .venv/bin/activate\`, or \`make bench-gpu\`" >&2
	exit 2
fi
if [ "$(type -t pw)" = file ] && ! command -v nvidia-smi > /dev/null; then
	echo "error: no NVIDIA GPU on this machine: there is no nvidia-smi" >&2
	echo "hint: on a CPU, \`make bench\` measures the bundled model" >&2
	exit 2
fi
mkdir -p "$RESULTS"
for group in "$@"; do "$group"; done

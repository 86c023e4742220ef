#!/bin/bash
# Run on an emulated Raspberry Pi what `make check-arm` promises, and print a table of what ran and what it took. Root.
#   check.sh [TEXT]   only the parts with this text in their names
# The machine with pages of 16 KiB runs beside the other parts, which take as long.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
export PORT_ARM_CACHE=${PORT_ARM_CACHE:-$source/.cache/arm}
python=${PYTHON:-$source/.venv/bin/python3}
log=$PORT_ARM_CACHE/check.log rows=$PORT_ARM_CACHE/check.rows only=${1-} TIMEFORMAT="%0R %0U %0S"
quick=(python3 -m pytest -p no:cacheprovider -q --tb=short -o addopts=--strict-markers -m "not long and not slow and not root and not attack and not process")

# part NAME ON COMMAND...: run a part; its last line of output is what is said of it.
part() {
	local name=$1 on=$2 result=passed taken said told
	shift 2
	[[ $name == *"$only"* ]] || return 0
	told=$(mktemp -d)
	echo "-- $name ($on)"
	(time "$@" >"$told/log" 2>&1) 2>"$told/time" || result=failed # its own children's seconds alone
	taken=$(awk 'END { print $1 "|" $2 + $3 }' "$told/time")
	said=$(grep -v '^$' "$told/log" | tail -1)
	[ $result = passed ] || tail -40 "$told/log"
	{ echo "-- $name ($on)" && cat "$told/log"; } >>"$log"
	printf '%s|%s|%s|%s|%s\n' "$name" "$on" "$result" "$taken" "$said" >>"$rows"
	rm -r "$told"
}

# on CORE NAME COMMAND...: run a part in the arm64 root, on an emulated core.
on() {
	part "$2" "$1" env CORE="$1" "$here/emulated.sh" root "${@:3}"
}

: >"$log"
: >"$rows"
part "pages of 16 KiB, systemd, package" "machine" nice -n "${PORT_NICE:-10}" env -C "$source" "$python" -m pytest -m "long and root" -v -rA \
	--tb=short -o addopts=--strict-markers -p no:cacheprovider tests/systemd/test_arm.py &
on cortex-a76 "C extensions: packing" "${quick[@]}" tests/agent/packing
on cortex-a76 "C extensions: allocator; facts of the machine" "${quick[@]}" tests/agent/malloc tests/agent/facts
on cortex-a72 "system" "${quick[@]}" tests/agent/system
on cortex-a72 "arithmetic, half products, code pages" "${quick[@]}" tests/planner/exactness/test_applied_arithmetic.py \
	tests/planner/exactness/test_half_products.py tests/planner/base/test_code_pages.py
on cortex-a72 "weights of 16 bits computed with in float32" "${quick[@]}" tests/agent/finetuning/quantized/test_widened.py
on cortex-a76 "operators in tiles and halves" "${quick[@]}" tests/planner/tiling/test_{blocks,gradients,norms,pixels,sums}.py
on cortex-a76 "followed operators" "${quick[@]}" tests/agent/intercept/tiles
on cortex-a76 "training: executor, checkpoints" "${quick[@]}" tests/agent/training/test_executor.py tests/agent/training/state
for kind in exec bundle finetune; do
	on cortex-a72 "$kind beside plain PyTorch" python3 deploy/arm/against_plain.py $kind
done
on cortex-a76 "doctor" sh -c 'python3 -m port_agent.cli doctor --no-flash || [ $? = 1 ]' # no agent runs here
wait
{
	echo "part|on|result|s|CPU s|said"
	cat "$rows"
} | column -t -s '|' | cut -c1-160
grep -hE '^(PASSED|FAILED|ERROR|SKIPPED) ' "$log" | cut -c1-160 || true
echo "everything that was said: $log"
! grep -q '^[^|]*|[^|]*|failed|' "$rows"

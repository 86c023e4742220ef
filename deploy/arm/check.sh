#!/bin/bash
# Run on an emulated Raspberry Pi what `make check-arm` promises, and print a table of what ran and what it took. Root.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${PORT_ARM_CACHE:-$(cd "$here/../.." && pwd)/.cache/arm}
log=$cache/check.log rows=$cache/check.rows failed=0 TIMEFORMAT="%0U %0S"
tests=(python3 -m pytest -p no:cacheprovider -q --tb=short -o addopts=--strict-markers -m "not long and not slow and not root and not attack and not process")

# part NAME CORE COMMAND...: run a part; its last line of output is what is said of it.
part() {
	local name=$1 core=$2 result=failed begin=$SECONDS taken said
	shift 2
	echo "-- $name ($core)" | tee -a "$log"
	if { time CORE=$core "$here/emulated.sh" root "$@" >"$cache/part.log" 2>&1; } 2>"$cache/part.time"; then
		result=passed
	else
		failed=1
	fi
	taken=$(awk '{ print $1 + $2 }' "$cache/part.time")
	cat "$cache/part.log" >>"$log"
	said=$(grep -v '^$' "$cache/part.log" | tail -1)
	[ $result = passed ] || tail -40 "$cache/part.log"
	printf '%s|%s|%s|%s|%s|%s\n' "$name" "$core" "$result" "$taken" "$((SECONDS - begin))" "$said" >>"$rows"
}

: >"$log"
: >"$rows"
part "C extensions: packing" cortex-a76 "${tests[@]}" tests/agent/packing
part "C extensions: allocator; facts of the machine" cortex-a76 "${tests[@]}" tests/agent/malloc tests/agent/facts
part "arithmetic, half products, code pages" cortex-a72 "${tests[@]}" tests/planner/exactness/test_arithmetic.py \
	tests/planner/exactness/test_half_products.py tests/planner/base/test_code_pages.py
part "weights of 16 bits computed with in float32" cortex-a72 "${tests[@]}" tests/agent/finetuning/quantized/test_widened.py
part "gradients of convolutions in halves" cortex-a76 "${tests[@]}" tests/planner/tiling/test_gradients.py -k bits
part "exec beside plain PyTorch" cortex-a72 python3 deploy/arm/against_plain.py
part "doctor" cortex-a76 sh -c 'python3 -m port_agent.cli doctor --no-flash || [ $? = 1 ]' # no agent runs here
{
	echo "part|core|result|CPU s|s|said"
	cat "$rows"
} | column -t -s '|' | cut -c1-160
echo "everything that was said: $log"
exit $failed

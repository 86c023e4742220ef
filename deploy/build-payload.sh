#!/bin/bash
# Fill a directory with what `versions.py` installs from: the application, its lock, pip, perhaps all wheels.
#   build-payload.sh DIRECTORY [--wheels]
# PYTHON: an interpreter (3.11 or later) with pip; default: .venv/bin/python of the checkout.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(dirname "$here")
python=${PYTHON:-$source/.venv/bin/python}
payload=$1
command -v "$python" >/dev/null || {
	echo "build-payload.sh: no $python: \`make setup\` makes it, or name another interpreter in PYTHON" >&2
	exit 2
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$payload/app" "$work/source"

# The wheel is built from a copy, so that no build directory is left in the checkout.
for part in agent planner firmware setup.py pyproject.toml LICENSE README.md; do
	[ ! -e "$source/$part" ] || cp -r "$source/$part" "$work/source/"
done
isolation=()
"$python" -c 'import setuptools, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null &&
	isolation=(--no-build-isolation) # it has what the build needs: no need to fetch it again
"$python" -m pip wheel --quiet --no-deps ${isolation[@]+"${isolation[@]}"} --wheel-dir "$work" "$work/source"
"$python" -m zipfile -e "$work"/port_agent-*.whl "$payload/app"
# The libraries are no Python extensions: the same file serves every Python version.
find "$payload/app" -name '*.cpython-*.so' | while read -r library; do
	mv "$library" "${library%%.cpython-*}.so"
done
# One of them is preloaded into every worker: a symbol that is not there would keep each from starting.
if command -v ldd >/dev/null; then
	find "$payload/app" -name '*.so' | while read -r library; do
		if ldd -r "$library" 2>&1 | grep 'undefined symbol'; then
			echo "build-payload.sh: $library does not load; see its sources in pyproject.toml" >&2
			exit 1
		fi
	done
fi

"$python" -m pip download --quiet --no-deps --dest "$payload" pip
cp "$here/requirements.txt" "$here/hashes.txt" "$payload/"
if [ "${2-}" = --wheels ]; then
	"$python" -m pip download --quiet --only-binary=:all: --dest "$payload/wheelhouse" -r "$here/requirements.txt"
	"$python" "$here/versions.py" hashes "$payload/wheelhouse" >"$payload/wheelhouse.txt"
fi
install -m 755 "$here/versions.py" "$payload/port-agent-versions"

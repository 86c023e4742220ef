#!/bin/bash
# Build what `make check-arm` runs in, under .cache/arm (kept between runs):
#   build.sh tools    install what the rest needs from this machine's packages
#   build.sh qemu     qemu 10 from Debian trixie, as a directory (needs no installation); torch dies in 7.2
#   build.sh root     Debian bookworm for arm64, with a compiler
#   build.sh runtime  torch for arm64, the other dependencies and what the tests need, as a directory
#   build.sh source   a copy of this tree's tracked files, with the C extensions for arm64
#   build.sh all      everything
# All but the tools need root. PORT_MIRROR, PORT_ARM_CACHE and PORT_TORCH_INDEX (an index of CPU builds) override the defaults.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
cache=${PORT_ARM_CACHE:-$source/.cache/arm}
mirror=${PORT_MIRROR:-http://deb.debian.org/debian}
torch_index=${PORT_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
python=${PYTHON:-$source/.venv/bin/python3}
slim=(--aptopt='Apt::Install-Recommends "false"' --dpkgopt='path-exclude=/usr/share/doc/*'
	--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*')

fail() {
	echo "build.sh: $*" >&2
	exit 2
}

install_tools() {
	local package missing=()
	for package in mmdebstrap arch-test util-linux; do
		dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
	done
	[ ${#missing[@]} = 0 ] && return
	command -v apt-get >/dev/null || fail "this needs Debian or Ubuntu: it builds a Debian root with mmdebstrap"
	[ "$(id -u)" = 0 ] || fail "needs root to install ${missing[*]} and to build a root file system: sudo make check-arm"
	echo "installing ${missing[*]}"
	apt-get update -q
	apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" ||
		fail "could not install ${missing[*]} (no network?)"
}

require() {
	[ "$(id -u)" = 0 ] || fail "building a root file system needs root: run it with sudo"
	command -v mmdebstrap >/dev/null || fail "missing mmdebstrap (\`make check-arm\` installs it)"
}

# finished NAME KEY: was NAME built from exactly these inputs?
finished() {
	[ "$(cat "$cache/$1.stamp" 2>/dev/null)" = "$2" ]
}

build_qemu() {
	local key="qemu 1"
	finished qemu "$key" && return
	require
	echo "unpacking qemu 10 (half a minute)"
	rm -rf "$cache/qemu" "$cache/qemu.stamp"
	mmdebstrap --quiet --variant=extract "${slim[@]}" --include=qemu-user trixie "$cache/qemu" "$mirror"
	echo "$key" >"$cache/qemu.stamp"
}

build_root() {
	local key="root 2"
	finished root "$key" && return
	require
	echo "building the arm64 root file system (a quarter of an hour, under emulation)"
	rm -rf "$cache/root" "$cache/root.stamp"
	"$here/emulated.sh" mmdebstrap --quiet --arch=arm64 --variant=minbase --skip=check/qemu "${slim[@]}" \
		--include=python3,python3-dev,gcc,libc6-dev,libstdc++6,libgomp1,procps,ca-certificates \
		--customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
		bookworm "$cache/root" "$mirror"
	echo "$key" >"$cache/root.stamp"
}

# wheels ARGUMENT...: pip, for CPython 3.11 on arm64, into the runtime.
wheels() {
	"$python" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
		--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_26_aarch64 \
		--platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --target "$cache/runtime" "$@"
}

# The CPU build of torch where its index can be reached; else PyPI's, a CUDA build, without the gigabytes that it asks for: what its
# libraries want of CUDA's is answered by libraries of the same names that say that there is no device.
install_torch() {
	wheels --index-url "$torch_index" "$1" 2>/dev/null && return
	echo "no CPU build of torch for arm64 at $torch_index: taking PyPI's, with stand-ins for CUDA's libraries"
	wheels "$1"
	cp "$here/cuda_stand_ins.py" "$cache/root/tmp/"
	"$here/emulated.sh" root python3 /tmp/cuda_stand_ins.py /opt/runtime/torch/lib
}

build_runtime() {
	local key
	key="$(cat "$source/deploy/requirements.txt" "$here/tests.txt" "$here/cuda_stand_ins.py" | sha256sum | cut -c1-16) 1"
	finished runtime "$key" && return
	require
	echo "installing torch and the other dependencies for arm64 (a minute, 2 GB)"
	rm -rf "$cache/runtime" "$cache/runtime.stamp"
	mkdir -p "$cache/runtime"
	wheels -r <(grep -v '^torch==' "$source/deploy/requirements.txt")
	wheels -r "$here/tests.txt" -c "$source/tests/constraints.txt"
	install_torch "$(grep '^torch==' "$source/deploy/requirements.txt")"
	echo "$key" >"$cache/runtime.stamp"
}

# The extensions are made anew only where something of what they are made of changed.
build_source() {
	local key
	require
	key="$(cd "$source" && cat pyproject.toml agent/port_agent/{malloc,guard,packing}/*.[ch] | sha256sum | cut -c1-16) 1"
	mkdir -p "$cache/source"
	(cd "$source" && git ls-files -z | xargs -0 tar -c --ignore-failed-read) | tar -x -C "$cache/source"
	finished source "$key" && return
	echo "compiling the C extensions for arm64 (two minutes, under emulation)"
	rm -f "$cache/source.stamp"
	"$here/emulated.sh" root python3 -W ignore -c \
		'import sys; from setuptools import setup; sys.argv[1:] = ["-q", "build_ext", "--inplace"]; setup()'
	echo "$key" >"$cache/source.stamp"
}

mkdir -p "$cache"
case ${1-} in
tools) install_tools ;;
qemu | root | runtime | source) "build_$1" ;;
all)
	build_qemu
	build_root
	build_runtime
	build_source
	;;
*) fail "usage: build.sh tools | qemu | root | runtime | source | all" ;;
esac

#!/bin/bash
# Build what `make check-arm` runs in, under .cache/arm (kept between runs):
#   build.sh tools    install what the rest needs from this machine's packages
#   build.sh qemu     qemu 10 from Debian trixie, as a directory (needs no installation); torch dies in 7.2
#   build.sh root     Debian bookworm for arm64, with a compiler and systemd
#   build.sh runtime  torch for arm64, the other dependencies and what the tests need, as a directory
#   build.sh source   a copy of this tree's tracked files, with the C extensions for arm64
#   build.sh kernel   Debian trixie's kernel with pages of 16 KiB, as a Raspberry Pi 5 has them
#   build.sh disk     the disks of an emulated machine: the root file system and the runtime
#   build.sh package  the .deb for arm64
#   build.sh all      everything
# All but the tools need root. PORT_MIRROR, PORT_ARM_CACHE and PORT_TORCH_INDEX (an index of CPU builds) override the defaults.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
cache=${PORT_ARM_CACHE:-$source/.cache/arm}
mirror=${PORT_MIRROR:-http://deb.debian.org/debian}
torch_index=${PORT_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
python=${PYTHON:-$source/.venv/bin/python3}
qemu="qemu-user,qemu-system-arm,qemu-utils"
. "$source/deploy/vm/debian.sh"

build_root() {
	local key="root 3"
	finished root "$key" && return
	require
	echo "building the arm64 root file system (a quarter of an hour, under emulation)"
	rm -rf "$cache/root" "$cache/root.stamp"
	# shellcheck disable=SC2016  # $1 belongs to the hooks' own shell
	"$here/emulated.sh" mmdebstrap --quiet --arch=arm64 --variant=minbase --skip=check/qemu "${slim[@]}" \
		--include=python3,python3-dev,gcc,libc6-dev,libstdc++6,libgomp1,procps,binutils \
		--include=systemd,systemd-sysv,libpam-systemd,polkitd,udev,dbus,kmod,iproute2,passwd,busybox-static \
		--customize-hook='echo port-vm > "$1/etc/hostname"' \
		--customize-hook='echo 0123456789abcdef0123456789abcdef > "$1/etc/machine-id"' \
		--customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
		bookworm "$cache/root" "$mirror"
	mask_slow_units "$cache/root"
	add_guest_units "$cache/root"
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

# id_of_runtime: the name under which an installed package looks for its dependencies.
id_of_runtime() {
	"$here/emulated.sh" root python3 -c 'from pathlib import Path; from deploy import versions as v
print(v.Payload(Path("deploy")).runtime_id(v.Settings.read(Path("/nonexistent"), {})))'
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
	find "$cache/source" -type f ! -name '*.so' -delete # what the tree has no longer
	(cd "$source" && git ls-files -z | xargs -0 tar -c --ignore-failed-read) | tar -x -C "$cache/source"
	finished source "$key" && return
	echo "compiling the C extensions for arm64 (two minutes, under emulation)"
	rm -f "$cache/source.stamp"
	"$here/emulated.sh" root python3 -W ignore -c \
		'import sys; from setuptools import setup; sys.argv[1:] = ["-q", "build_ext", "--inplace"]; setup()'
	echo "$key" >"$cache/source.stamp"
}

build_kernel() {
	local key="kernel 1"
	finished kernel "$key" && return
	require
	echo "unpacking a kernel with pages of 16 KiB (half a minute)"
	rm -rf "$cache/kernel" "$cache/kernel.stamp"
	mmdebstrap --quiet --arch=arm64 --variant=extract --skip=check/qemu "${slim[@]}" --include=linux-image-arm64-16k \
		trixie "$cache/kernel" "$mirror"
	depmod -b "$cache/kernel/usr" "$(basename "$cache"/kernel/usr/lib/modules/*)"
	echo "$key" >"$cache/kernel.stamp"
}

# in_mounts COMMAND...: run a function of this script where its mounts are its own.
in_mounts() {
	unshare --mount --propagation private "$0" --mounted "$@"
}

write_root_disk() {
	mount --bind "$cache/root" "$cache/stage"
	mkdir -p "$cache/stage/usr/lib/modules"
	mount --bind "$cache/kernel/usr/lib/modules" "$cache/stage/usr/lib/modules"
	mke2fs -q -t ext4 -d "$cache/stage" -L root -F "$cache/arm64-16k.ext4" 4G >/dev/null
}

write_runtime_disk() {
	mount -t tmpfs tmpfs "$cache/stage"
	mkdir "$cache/stage/$1"
	mount --bind "$cache/runtime" "$cache/stage/$1"
	touch "$cache/stage/$1/.complete"
	mke2fs -q -t ext4 -d "$cache/stage" -L runtime -F "$cache/runtime.ext4" 3G >/dev/null
}

build_disk() {
	local key
	key="$(cat "$cache"/{root,kernel,runtime}.stamp "$vm/initrd-init" "$vm"/guest/* | sha256sum | cut -c1-16) 1"
	finished disk "$key" && return
	require
	echo "writing the disks of the emulated machine (a minute, 3 GB)"
	rm -f "$cache"/{arm64-16k,runtime}.ext4 "$cache/disk.stamp"
	mkdir -p "$cache/stage"
	add_guest_units "$cache/root"
	in_mounts write_root_disk
	in_mounts write_runtime_disk "$(id_of_runtime)"
	build_initrd "$cache/root" "$cache/kernel" "$cache/arm64-16k.initrd"
	cp "$cache"/kernel/boot/vmlinuz-* "$cache/arm64-16k.vmlinuz"
	echo "$key" >"$cache/disk.stamp"
}

# The package carries pip's own wheel, which the host fetches: what is emulated has no index.
build_package() {
	require
	mkdir -p "$cache/root/opt/wheels" "$cache/package"
	[ -n "$(find "$cache/root/opt/wheels" -name 'pip-*.whl')" ] ||
		"$python" -m pip download -q --disable-pip-version-check --no-deps --dest "$cache/root/opt/wheels" pip
	rm -f "$cache"/package/*.deb
	"$here/emulated.sh" root env PYTHON=/usr/bin/python3 PIP_NO_INDEX=1 PIP_FIND_LINKS=/opt/wheels \
		deploy/build-deb.sh --output /work/dist
	mv "$cache"/source/dist/*.deb "$cache/package/"
}

mkdir -p "$cache"
case ${1-} in
--mounted) "${@:2}" ;;
tools) install_packages mmdebstrap arch-test e2fsprogs cpio zstd kmod util-linux ;;
qemu) build_qemu "$qemu" ;;
root | runtime | source | kernel | disk | package) "build_$1" ;;
all)
	build_qemu "$qemu"
	build_root
	build_runtime
	build_source
	build_kernel
	build_disk
	build_package
	;;
*) fail "usage: build.sh tools | qemu | root | runtime | source | kernel | disk | package | all" ;;
esac

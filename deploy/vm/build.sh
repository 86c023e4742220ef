#!/bin/bash
# Build the machines of `make check-systemd` under .cache/vm (kept between runs):
#   build.sh tools                install what the rest needs from this machine's packages
#   build.sh qemu                 qemu 10 from Debian trixie, as a directory (needs no installation)
#   build.sh tree trixie|bookworm a root file system with systemd 257 or 252, for systemd-nspawn
#   build.sh disk trixie|bookworm the same as a disk image with kernel and a 1 MB initial RAM disk
#   build.sh runtime              torch and the other dependencies, as a directory and as a disk
#   build.sh all                  everything
# All but the tools need root and say so. PORT_MIRROR and PORT_VM_CACHE override the defaults.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${PORT_VM_CACHE:-$(cd "$here/../.." && pwd)/.cache/vm}
mirror=${PORT_MIRROR:-http://deb.debian.org/debian}
qemu="qemu-system-x86,qemu-utils,ipxe-qemu,seabios"
. "$here/debian.sh"

# The agent needs CPython 3.11 or later and a CPU torch built for it. trixie gets bookworm's 3.11 beside its own
# 3.13, so that one set of wheels serves both machines.
build_tree() {
	local suite=$1 kernel=linux-image-cloud-amd64 sources=("deb $mirror $1 main") key="$1 5"
	[ "$suite" = bookworm ] || sources+=("deb $mirror bookworm main")
	if ! finished "tree-$suite" "$key"; then
		require
		echo "building the $suite root file system (about a minute)"
		rm -rf "$cache/tree-$suite" "$cache/tree-$suite.stamp" "$cache/disk-$suite.stamp"
		# shellcheck disable=SC2016  # $1 belongs to the hooks' own shell
		# initramfs-tools is kept out: the disk boots with the small RAM disk made below.
		mmdebstrap --quiet --variant=minbase "${slim[@]}" \
			--include=systemd,systemd-sysv,libpam-systemd,polkitd,udev,dbus,kmod,iproute2,procps,passwd,libstdc++6,ca-certificates \
			--include=python3,python3.11,busybox-static,$kernel \
			--customize-hook='echo port-vm > "$1/etc/hostname"' \
			--customize-hook='echo 0123456789abcdef0123456789abcdef > "$1/etc/machine-id"' \
			--customize-hook='chroot "$1" passwd -d root' \
			--customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*' \
			"$suite" "$cache/tree-$suite" "${sources[@]}"
		mask_slow_units "$cache/tree-$suite"
		chmod 755 "$cache/tree-$suite"
		echo "$key" >"$cache/tree-$suite.stamp"
	fi
	add_guest_units "$cache/tree-$suite"
}

build_disk() {
	local suite=$1 key tree="$cache/tree-$1"
	build_tree "$suite"
	key="$(cat "$cache/tree-$suite.stamp") $(cat "$here/initrd-init" "$here"/guest/* | sha256sum | cut -c1-16) 3"
	finished "disk-$suite" "$key" && return
	require
	build_initrd "$tree" "$tree" "$cache/$suite.initrd"
	cp "$tree"/boot/vmlinuz-* "$cache/$suite.vmlinuz"
	rm -f "$cache/$suite.ext4"
	mke2fs -q -t ext4 -d "$tree" -L root -F "$cache/$suite.ext4" 4G
	echo "$key" >"$cache/disk-$suite.stamp"
}

# torch and the other dependencies for CPython 3.11, installed by the package's own script, as a read-only disk:
# unpacking them inside an emulated machine takes many minutes. A host without Python 3.11 borrows the container's.
build_runtime() {
	local key deploy host_python
	deploy=$(dirname "$here")
	host_python=${PYTHON:-$(dirname "$deploy")/.venv/bin/python}
	key=$(sha256sum <"$deploy/requirements.txt" | cut -c1-16)
	finished runtime "$key" && return
	require
	echo "installing the dependencies for the machines (about a minute, 1 GB)"
	rm -rf "$cache/payload" "$cache/runtime" "$cache/runtime.ext4"
	mkdir -p "$cache/payload" "$cache/runtime"
	cp "$deploy/requirements.txt" "$deploy/versions.py" "$cache/payload/"
	"$host_python" -m pip download -q --no-deps --dest "$cache/payload" pip
	if command -v python3.11 >/dev/null; then
		PORT_PYTHON=python3.11 "$cache/payload/versions.py" --payload "$cache/payload" runtime "$cache/runtime"
	else
		build_tree bookworm
		systemd-nspawn -q -D "$cache/tree-bookworm" --volatile=overlay --register=no --keep-unit --private-users=no \
			--resolv-conf=bind-host --bind="$cache/payload:/mnt/payload" --bind="$cache/runtime:/mnt/runtime" \
			/usr/bin/python3.11 /mnt/payload/versions.py --payload /mnt/payload runtime /mnt/runtime
	fi
	mke2fs -q -t ext4 -d "$cache/runtime" -L runtime -F "$cache/runtime.ext4" 2G
	echo "$key" >"$cache/runtime.stamp"
}

mkdir -p "$cache"
case ${1-} in
tools) install_packages mmdebstrap e2fsprogs cpio zstd kmod systemd-container procps util-linux ;;
qemu) build_qemu "$qemu" ;;
runtime) build_runtime ;;
tree | disk)
	case ${2-} in
	trixie | bookworm) "build_$1" "$2" ;;
	*) fail "usage: build.sh $1 trixie|bookworm" ;;
	esac
	;;
all)
	build_qemu "$qemu"
	build_disk bookworm
	build_disk trixie
	build_runtime
	;;
*) fail "usage: build.sh tools | qemu | tree SUITE | disk SUITE | runtime | all" ;;
esac

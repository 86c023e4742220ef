#!/bin/bash
# Build the machines of `make check-systemd` under .cache/vm (kept between runs):
#   build.sh tools                install what the rest needs from this machine's packages
#   build.sh qemu                 qemu 10 from Debian trixie, as a directory (needs no installation)
#   build.sh tree trixie|bookworm a root file system with systemd 257 or 252, for systemd-nspawn
#   build.sh disk trixie|bookworm the same as a disk image with kernel and a 1 MB initial RAM disk
#   build.sh runtime              torch and the other dependencies, as a directory and as a disk
#   build.sh all                  everything
# All but the tools need root, mmdebstrap, e2fsprogs, cpio and zstd, and say so. PORT_MIRROR and PORT_VM_CACHE override the defaults.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
cache=${PORT_VM_CACHE:-$(cd "$here/../.." && pwd)/.cache/vm}
mirror=${PORT_MIRROR:-http://deb.debian.org/debian}
slim=(--aptopt='Apt::Install-Recommends "false"'
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*'
	--dpkgopt='path-exclude=/usr/share/locale/*')

fail() {
	echo "build.sh: $*" >&2
	exit 2
}

require() {
	[ "$(id -u)" = 0 ] || fail "building a root file system needs root: run it with sudo"
	local tool missing=()
	for tool in mmdebstrap mke2fs cpio zstd; do
		command -v "$tool" >/dev/null || missing+=("$tool")
	done
	[ ${#missing[@]} = 0 ] ||
		fail "missing ${missing[*]}: apt-get install mmdebstrap e2fsprogs cpio zstd (\`make check-systemd\` does)"
}

# Install what is missing on this machine: only `make check-systemd` asks for it, no test does.
install_tools() {
	local package missing=()
	for package in mmdebstrap e2fsprogs cpio zstd systemd-container procps util-linux; do
		dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
	done
	[ ${#missing[@]} = 0 ] && return
	command -v apt-get >/dev/null || fail "this needs Debian or Ubuntu: it builds Debian machines with mmdebstrap"
	[ "$(id -u)" = 0 ] || fail "needs root to install ${missing[*]} and to build root file systems: sudo make check-systemd"
	echo "installing ${missing[*]}"
	apt-get update -q
	apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" ||
		fail "could not install ${missing[*]} (no network?)"
}

# finished NAME KEY: was NAME built from exactly these inputs?
finished() {
	[ "$(cat "$cache/$1.stamp" 2>/dev/null)" = "$2" ]
}

build_qemu() {
	local key="qemu 1"
	finished qemu "$key" && return
	require
	echo "building qemu 10 (about half a minute)"
	rm -rf "$cache/qemu" "$cache/qemu.stamp"
	mmdebstrap --quiet --variant=apt "${slim[@]}" \
		--include=qemu-system-x86,qemu-system-arm,qemu-utils,ipxe-qemu,seabios,qemu-efi-aarch64 \
		trixie "$cache/qemu" "$mirror"
	echo "$key" >"$cache/qemu.stamp"
}

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

add_guest_units() {
	local unit units="$1/etc/systemd/system"
	mkdir -p "$units/multi-user.target.wants"
	install -D -m 755 "$here/guest/vm-control.py" "$1/usr/local/lib/vm-control.py"
	for unit in vm-control vm-data; do
		install -m 644 "$here/guest/$unit.service" "$units/$unit.service"
		ln -sf "../$unit.service" "$units/multi-user.target.wants/$unit.service"
	done
}

# What costs boot time in software emulation and tests nothing here.
mask_slow_units() {
	local unit units="$1/etc/systemd/system"
	for unit in getty.target apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
		e2scrub_reap.service fstrim.timer systemd-timesyncd.service systemd-networkd.service \
		systemd-tmpfiles-clean.timer; do
		ln -sf /dev/null "$units/$unit"
	done
}

# What the kernel needs to see its disk, numbered in the order of loading; what is built in prints as "builtin".
copy_modules() {
	local tree=$1 work=$2 kernel name verb module number=10
	kernel=$(basename "$tree"/lib/modules/*)
	for name in virtio_pci virtio_blk ext4; do
		while read -r verb module _; do
			[ "$verb" = insmod ] || continue
			number=$((number + 1))
			case $module in
			*.xz) xz -dc "$tree$module" ;;
			*.zst) zstd -dcq "$tree$module" ;;
			*) cat "$tree$module" ;;
			esac >"$work/modules/$number.ko"
		done < <(chroot "$tree" modprobe -S "$kernel" --show-depends "$name")
	done
}

build_disk() {
	local suite=$1 key tree="$cache/tree-$1" work
	build_tree "$suite"
	key="$(cat "$cache/tree-$suite.stamp") $(cat "$here/initrd-init" "$here"/guest/* | sha256sum | cut -c1-16) 3"
	finished "disk-$suite" "$key" && return
	require
	work=$(mktemp -d)
	mkdir -p "$work"/{bin,dev,root,modules}
	cp "$tree"/bin/busybox "$work/bin/busybox"
	install -m 755 "$here/initrd-init" "$work/init"
	copy_modules "$tree" "$work"
	(cd "$work" && find . | cpio --quiet -o -H newc) | gzip -1 >"$cache/$suite.initrd"
	rm -rf "$work"
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
tools) install_tools ;;
qemu) build_qemu ;;
runtime) build_runtime ;;
tree | disk)
	case ${2-} in
	trixie | bookworm) "build_$1" "$2" ;;
	*) fail "usage: build.sh $1 trixie|bookworm" ;;
	esac
	;;
all)
	build_qemu
	build_disk bookworm
	build_disk trixie
	build_runtime
	;;
*) fail "usage: build.sh tools | qemu | tree SUITE | disk SUITE | runtime | all" ;;
esac

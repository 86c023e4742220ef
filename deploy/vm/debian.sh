# shellcheck shell=bash
# What the builders of emulated machines share (deploy/vm/build.sh, deploy/arm/build.sh). They set `cache`, where everything is
# kept between runs, and `mirror`.

: "${cache:?}" "${mirror:?}"
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
slim=(--aptopt='Apt::Install-Recommends "false"'
	--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*'
	--dpkgopt='path-exclude=/usr/share/locale/*')

fail() {
	echo "build.sh: $*" >&2
	exit 2
}

# install_packages PACKAGE...: what is missing on this machine; only `make` asks for it, no test does.
install_packages() {
	local package missing=()
	for package in "$@"; do
		dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed' || missing+=("$package")
	done
	[ ${#missing[@]} = 0 ] && return
	command -v apt-get >/dev/null || fail "this needs Debian or Ubuntu: it builds Debian machines with mmdebstrap"
	[ "$(id -u)" = 0 ] || fail "needs root to install ${missing[*]} and to build root file systems: run make with sudo"
	echo "installing ${missing[*]}"
	apt-get update -q
	apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "${missing[@]}" ||
		fail "could not install ${missing[*]} (no network?)"
}

require() {
	[ "$(id -u)" = 0 ] || fail "building a root file system needs root: run it with sudo"
	local tool missing=()
	for tool in mmdebstrap mke2fs cpio zstd modprobe; do
		command -v "$tool" >/dev/null || missing+=("$tool")
	done
	[ ${#missing[@]} = 0 ] || fail "missing ${missing[*]}: \`$0 tools\` installs what is needed"
}

# finished NAME KEY: was NAME built from exactly these inputs?
finished() {
	[ "$(cat "$cache/$1.stamp" 2>/dev/null)" = "$2" ]
}

# build_qemu PACKAGES: qemu 10 from Debian trixie, as a directory (needs no installation).
build_qemu() {
	local key="qemu $1"
	finished qemu "$key" && return
	require
	echo "building qemu 10 (about half a minute)"
	rm -rf "$cache/qemu" "$cache/qemu.stamp"
	mmdebstrap --quiet --variant=apt "${slim[@]}" --include="$1" trixie "$cache/qemu" "$mirror"
	echo "$key" >"$cache/qemu.stamp"
}

add_guest_units() {
	local unit units="$1/etc/systemd/system"
	mkdir -p "$units/multi-user.target.wants"
	install -D -m 755 "$vm/guest/vm-control.py" "$1/usr/local/lib/vm-control.py"
	for unit in vm-control vm-data; do
		install -m 644 "$vm/guest/$unit.service" "$units/$unit.service"
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

# What a kernel needs to see its disk, numbered in the order of loading; what is built in prints as "builtin".
copy_modules() {
	local tree=$1 work=$2 kernel name verb module number=10
	kernel=$(basename "$tree"/usr/lib/modules/*)
	for name in virtio_pci virtio_blk ext4; do
		while read -r verb module _; do
			[ "$verb" = insmod ] || continue
			number=$((number + 1))
			case $module in
			*.xz) xz -dc "$module" ;;
			*.zst) zstd -dcq "$module" ;;
			*) cat "$module" ;;
			esac >"$work/modules/$number.ko"
		done < <(modprobe -d "$tree/usr" -S "$kernel" --show-depends "$name")
	done
}

# build_initrd TREE KERNEL OUT: an initial RAM disk with the busybox of one tree and the modules of another.
build_initrd() {
	local work
	work=$(mktemp -d)
	mkdir -p "$work"/{bin,dev,root,modules}
	cp "$1/bin/busybox" "$work/bin/busybox"
	install -m 755 "$vm/initrd-init" "$work/init"
	copy_modules "$2" "$work"
	(cd "$work" && find . | cpio --quiet -o -H newc) | gzip -1 >"$3"
	rm -rf "$work"
}

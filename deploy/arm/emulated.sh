#!/bin/bash
# Run a command with programs for arm64 emulated by .cache/arm/qemu:
#   emulated.sh COMMAND...       on this machine (mmdebstrap)
#   emulated.sh root COMMAND...  in the arm64 root, in the tree's copy: a Raspberry Pi 5 (CORE=cortex-a72: a Pi 4) in its /sys,
#                                with its name where firmware says it. Nothing is mounted when it ends.
# Needs root. The kernel knows the emulator as port-arm64 while it runs.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
export cache=${PORT_ARM_CACHE:-$(cd "$here/../.." && pwd)/.cache/arm}
export CORE=${CORE:-cortex-a76}
formats=/proc/sys/fs/binfmt_misc

# F: the kernel opens the emulator now, so that it starts in a chroot, too.
register() {
	local magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
	local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
	mountpoint -q "$formats" || mount -t binfmt_misc binfmt_misc "$formats"
	[ -e "$formats/port-arm64" ] || echo ":port-arm64:M::$magic:$mask:$cache/qemu/usr/bin/qemu-aarch64:FPOC" >"$formats/register"
}

# The last that ends takes it away.
unregister() {
	! flock --nonblock --exclusive 9 || [ ! -e "$formats/port-arm64" ] || echo -1 >"$formats/port-arm64"
}

# emulating COMMAND...: run a command while the kernel knows the emulator; on an Arm it is not asked for.
emulating() {
	[ "$(uname -m)" != aarch64 ] || exec "$@"
	exec 9>/run/lock/port-arm64
	flock --shared 9
	register
	trap unregister EXIT
	nice -n "${PORT_NICE:-10}" "$@" 9>&-
}

# What libraries and the agent read of a Raspberry Pi: oneDNN dies without midr_el1.
pi_sysfs() {
	local cpu entry index folder level type size file midr=0x00000000414fd0b1 name="Raspberry Pi 5 Model B Rev 1.0" root=$1
	[ "$CORE" = cortex-a76 ] || { midr=0x00000000410fd083 name="Raspberry Pi 4 Model B Rev 1.5"; }
	mkdir -p "$root/class/dmi/id" "$root/firmware/devicetree/base"
	echo "$name" >"$root/class/dmi/id/product_name"
	printf '%s\0' "$name" >"$root/firmware/devicetree/base/model"
	for cpu in 0 1; do
		folder=$root/devices/system/cpu/cpu$cpu
		mkdir -p "$folder/regs/identification" "$folder/cpufreq"
		echo "$midr" >"$folder/regs/identification/midr_el1"
		echo 2400000 >"$folder/cpufreq/cpuinfo_max_freq"
		index=0
		for entry in 1:Data:64K 1:Instruction:64K 2:Unified:512K; do
			mkdir -p "$folder/cache/index$index"
			IFS=: read -r level type size <<<"$entry"
			echo "$level" >"$folder/cache/index$index/level"
			echo "$type" >"$folder/cache/index$index/type"
			echo "$size" >"$folder/cache/index$index/size"
			echo 64 >"$folder/cache/index$index/coherency_line_size"
			echo "$cpu" >"$folder/cache/index$index/shared_cpu_list"
			index=$((index + 1))
		done
	done
	for file in online possible present; do echo 0-1 >"$root/devices/system/cpu/$file"; done
}

mount_root() {
	local root=$cache/root device name major minor
	mkdir -p "$root/opt/runtime" "$root/work"
	mount --bind "$cache/runtime" "$root/opt/runtime"
	mount --bind "$cache/source" "$root/work"
	mount -t proc proc "$root/proc"
	mount -t tmpfs tmpfs "$root/dev"
	for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
		IFS=: read -r name major minor <<<"$device"
		mknod -m 666 "$root/dev/$name" c "$major" "$minor"
	done
	ln -s /proc/self/fd "$root/dev/fd"
	mkdir -p "$root/dev/shm" && mount -t tmpfs tmpfs "$root/dev/shm"
	mount -t tmpfs tmpfs "$root/sys"
	pi_sysfs "$root/sys"
}

in_root() {
	mount_root
	exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 QEMU_CPU="$CORE" OMP_NUM_THREADS=1 \
		PYTHONPATH=/work/agent:/work/planner:/opt/runtime chroot "$cache/root" sh -c 'cd /work && exec "$@"' sh "$@"
}

[ "$(id -u)" = 0 ] || { echo "emulated.sh: emulation needs root: run it with sudo" >&2; exit 2; }
case ${1-} in
--mounted) shift; in_root "$@" ;;
root)
	shift
	emulating unshare --mount --propagation private "$0" --mounted "$@"
	;;
*) emulating "$@" ;;
esac

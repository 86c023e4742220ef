#!/bin/bash
# Install PORT agent on Raspberry Pi OS, Debian, Ubuntu or a Jetson (64 bit), from a checkout or from a .deb.
#   sudo deploy/install.sh [PACKAGE.deb] [--user NAME] [--no-user]
# --user NAME may control the agent and feed its inbox (group port-agent); default: whoever called sudo.
# Without a package it builds one from this checkout. Torch comes as a CPU build, see /etc/port-agent/install.conf.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
needed_mb=2500
package=
user=${SUDO_USER-}

fail() {
	echo "install.sh: $*" >&2
	exit 1
}

while [ $# -gt 0 ]; do
	case $1 in
	--user)
		[ $# -ge 2 ] || fail "--user needs a name"
		user=$2 && shift
		;;
	--no-user) user= ;;
	-*) fail "usage: install.sh [PACKAGE.deb] [--user NAME] [--no-user]" ;;
	*) package=$1 ;;
	esac
	shift
done

check_machine() {
	[ "$(id -u)" = 0 ] || fail "needs root: sudo $0"
	command -v apt-get >/dev/null || fail "apt-get not found: this is not a Debian-like system; see deploy/macos for a Mac"
	[ -z "$user" ] || id "$user" >/dev/null 2>&1 || fail "there is no user $user; --no-user leaves only root in control"
	if [ -n "$package" ]; then
		dpkg-deb --info "$package" >/dev/null 2>&1 ||
			fail "$package is not a Debian package; without an argument this checkout is built"
		package=$(readlink -f "$package")
	fi
	local architecture free_mb
	architecture=$(dpkg --print-architecture)
	case $architecture in
	amd64 | arm64) ;;
	*) fail "$architecture has no torch wheels; on a Pi 3 or later install the 64-bit Raspberry Pi OS" ;;
	esac
	[ ! -L /opt/port-agent/current ] || return 0 # torch is there; an upgrade that needs another one looks itself
	mkdir -p /opt
	free_mb=$(df --output=avail -m /opt | tail -1)
	[ "$free_mb" -ge "$needed_mb" ] || fail "$free_mb MB free in /opt, but torch and the other dependencies need $needed_mb MB; free some space"
}

has_python() {
	command -v "$1" >/dev/null && "$1" -I -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The distribution's own Python where it is 3.11 or later (Debian 12, Pi OS bookworm, Ubuntu 24.04); Ubuntu 22.04 and with
# it JetPack 6 have 3.11 in universe.
install_python() {
	local name
	apt-get update -q
	apt-get install -y -q --no-install-recommends python3 libstdc++6
	for name in python3 python3.13 python3.12 python3.11; do
		has_python "$name" && return
	done
	apt-get install -y -q --no-install-recommends python3.11 ||
		fail "no Python 3.11 in this system's packages; install one and name it in PORT_PYTHON"
}

build_package() {
	local name environment
	environment=$(mktemp -d)
	apt-get install -y -q --no-install-recommends gcc libc6-dev python3-venv dpkg-dev
	for name in python3 python3.13 python3.12 python3.11; do
		has_python "$name" && break
	done
	[ "$name" = python3 ] || apt-get install -y -q --no-install-recommends "$name-venv"
	"$name" -m venv "$environment"
	# shtab, msgspec and xxhash: completion and the manual page are made from the command line's own parser.
	"$environment/bin/pip" install -q "setuptools>=77" wheel shtab msgspec xxhash ||
		fail "pip could not fetch what the build needs; build the package elsewhere (\`make deb\`) and name it here"
	package=$(PYTHON=$environment/bin/python "$here/build-deb.sh" --output "$environment" | tail -1)
	[ -f "$package" ] || fail "the package could not be built; see the messages above"
}

# A Pi as delivered lacks this: its firmware disables the memory controller, and with it pressure figures.
explain_boot_options() {
	local options=() boot
	grep -qw memory /sys/fs/cgroup/cgroup.controllers 2>/dev/null || options+=("cgroup_enable=memory")
	[ -r /proc/pressure/memory ] || options+=("psi=1")
	[ ${#options[@]} -gt 0 ] || return 0
	for boot in /boot/firmware/cmdline.txt /boot/cmdline.txt /boot/extlinux/extlinux.conf /etc/default/grub; do
		[ -f $boot ] && break
	done
	echo "install.sh: for memory limits that the kernel enforces, and for pressure figures, add to the kernel"
	echo "            command line in $boot and restart: ${options[*]}"
}

check_machine
install_python
[ -n "$package" ] || build_package
# A configuration that was changed here stays: the new one differs in its comments and shows the defaults.
apt-get install -y -q --no-install-recommends -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \
	"$package" ||
	fail "the package is not set up; see the messages above, then try again: \`dpkg --configure port-agent\`"
if [ -n "$user" ] && [ "$user" != root ]; then
	usermod -aG port-agent "$user"
	echo "install.sh: $user may use port-agent after the next login"
fi
explain_boot_options
port-agent doctor || echo "install.sh: see above what to fix; the agent runs and says the same in \`port-agent status\`"

#!/usr/bin/env bash
# The system libraries that simulators render with.
#
#   scripts/system_packages.sh metaworld [maniskill] [libero]
#
# As root on Debian or Ubuntu: installs those that are missing. Otherwise: names them, and says what works without.
# Never fails: training, serving and data sets need none of them.
set -uo pipefail

missing=()
need() {  # need LIBRARY PACKAGE: the package is missing if the loader does not find the library
  if ! { ldconfig -p 2>/dev/null || /sbin/ldconfig -p; } | grep -q "$1"; then missing+=("$2"); fi
}
need libEGL.so.1 libegl1
need libGL.so.1 libgl1
need libglib-2.0.so.0 libglib2.0-0
need libOSMesa.so libosmesa6
case " $* " in
  *" maniskill "*)
    need libvulkan.so.1 libvulkan1
    need libvulkan_lvp.so mesa-vulkan-drivers
    ;;
esac
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null
  left=()
  for package in "${missing[@]}"; do  # one by one: a release may lack one that another replaces
    apt-get install -y -qq --no-install-recommends "$package" </dev/null >/dev/null 2>&1 || left+=("$package")
  done
  [ ${#left[@]} -eq 0 ] && exit 0
  missing=("${left[@]}")
fi

cat >&2 <<END
System packages are missing: ${missing[*]}
  As root:  apt-get install --no-install-recommends ${missing[*]}
  Without them: training, serving, data sets and the tests that need no pictures of a simulator work; simulators render
  through EGL (libegl1) or, more slowly, OSMesa (libosmesa6), so one of the two is enough for MetaWorld.
END
exit 0

#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the pinned program that has this script's name, with the libraries that it was built for: the
# machine's own libc may be older. All paths stay relative, so that no output names the machine.
bin=${0%/*}
root=${bin%/*}/root
name=${0##*/}
gcc=$root/usr/lib/gcc/x86_64-linux-gnu/12
case $name in
  gcc)
    program=$root/usr/bin/x86_64-linux-gnu-gcc-12
    # gcc's own search path, which it would make absolute: by language, and after all -isystem.
    include=$root/usr/include
    unset CPATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX
    export C_INCLUDE_PATH="$gcc/include:$include/x86_64-linux-gnu:$include"
    export CPLUS_INCLUDE_PATH="$include/c++/12:$include/x86_64-linux-gnu/c++/12:$include/c++/12/backward:$C_INCLUDE_PATH"
    set -- --sysroot="$root" -no-canonical-prefixes -fno-canonical-system-headers -nostdinc \
      -ffile-prefix-map="$root"= -B"$bin/" "$@"
    ;;
  cc1 | cc1plus | collect2) program=$gcc/$name ;;
  *) program=$root/usr/bin/x86_64-linux-gnu-$name ;;
esac
export LC_ALL=C # else its libc would load the machine's character sets
exec "$root/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2" --inhibit-cache \
  --library-path "$root/lib/x86_64-linux-gnu:$root/usr/lib/x86_64-linux-gnu" "$program" "$@"
